"""Access to a folder of a run or a pipeline: one writing process at a time, and one recipe."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from courtside.errors import RecipeError, UserError
from courtside.recipe import Recipe
from courtside.report.folder.files import TEMPORARY

RECIPE = "recipe.toml"
LOCK = ".lock"
LENGTH_FIELDS = (
    "train.max_flops",
    "train.max_seconds",
    "train.max_student_tokens",
    "train.max_teacher_tokens",
    "train.steps",
)
"""When a run ends."""
CHANGEABLE_FIELDS = (
    *LENGTH_FIELDS,
    "run",
    "sharding",
    "rollout.kv_cache_tokens",
    "rollout.limits.max_fault_fraction",
    "rollout.limits.step_seconds",
    "student.gradient_checkpointing",
    "tasks.grader_seconds",
    "tasks.workers",
    "train.logits_chunk_tokens",
    "train.micro_batch_tokens",
    "train.optimizer_offload",
)
"""May differ in a resumed run: what is stored, memory settings, where and how long user code runs,
how processes share the work, and when the run ends. Training is the same up to rounding."""


class LockedFolder:
    """A folder that is locked for writing until `close`, or is open for reading alone."""

    def __init__(self, path: Path, lock: int | None) -> None:
        """Use `open` or `read`. `lock` is a file descriptor; None: read-only."""
        self.path = path
        self._lock = lock
        self._is_marked = False

    def mark_as_open(self) -> bool:
        """Leave a mark in the lock's file until `close`. Whether there was one: the last process
        ended without a word, so that nothing could be said or saved."""
        assert self._lock is not None
        was_open = os.pread(self._lock, 1, 0) != b""
        os.pwrite(self._lock, b"open\n", 0)
        self._is_marked = True
        return was_open

    def close(self) -> None:
        """Release the lock, as the end of the process does too."""
        if self._lock is not None:
            if self._is_marked:
                with suppress(OSError):  # a disk that went away: the mark stays
                    os.ftruncate(self._lock, 0)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def create_folder(path: Path, *, marker: str, expected: Collection[str]) -> set[str]:
    """Create a folder if there is none, and list the names of foreign files in it.

    A folder that has the file `marker` has none. `expected` names what a first start leaves that
    was killed before it wrote `marker`.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        names = {entry.name for entry in path.iterdir()}
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"{path}: is a file, or lies below one. Give another folder") from None
    except OSError as error:
        raise UserError(
            f"{path}: cannot be created or listed ({error.strerror}). Give a folder that you "
            "may write to"
        ) from None
    if marker in names:
        return set()
    return {name for name in names - {LOCK, *expected} if not name.endswith(TEMPORARY)}


def refuse_foreign_folder(path: Path) -> None:
    """Refuse to write a run into a folder with other files."""
    expected = ("checkpoints", "trajectories", "environment.json")
    if foreign := create_folder(path, marker=RECIPE, expected=expected):
        raise UserError(
            f"{path}: has files ({', '.join(sorted(foreign)[:3])}…) but no {RECIPE}, so it is no "
            "run folder. Give a new or an empty folder"
        )


def acquire_lock(path: Path) -> int:
    """A file descriptor that locks the folder until it is closed or the process ends."""
    try:
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written to ({error.strerror}). Give a folder that you may write to"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise UserError(
            f"{path}: another process is training into this folder. Wait for it or stop it, or "
            "give another folder"
        ) from None
    except OSError as error:
        os.close(lock)
        raise UserError(
            f"{path}: cannot be locked ({error.strerror}). Give a folder on a local disk"
        ) from None
    return lock


def dump_recipe(recipe: Recipe) -> dict[str, Any]:
    return recipe.model_dump(mode="json", exclude_none=True)


def refuse_other_recipe(path: Path, old: Recipe, new: Recipe) -> None:
    """Fields in `CHANGEABLE_FIELDS` may differ."""
    changeable = tuple(f"{name}{end}" for name in CHANGEABLE_FIELDS for end in ".:")
    lines = [
        line
        for line in find_differences(dump_recipe(old), dump_recipe(new))
        if not line.startswith(changeable)
    ]
    if lines:
        raise RecipeError(
            f"{path}: holds a run of another recipe:\n"
            + "\n".join(f"  {line}" for line in lines)
            + f"\nTrain into another folder, or go on with the old recipe ({path / RECIPE})"
        )


def find_differences(old: Any, new: Any, name: str = "") -> Iterator[str]:
    """`field: old → new` for each leaf that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys((*old, *new)):
            yield from find_differences(
                old.get(key), new.get(key), f"{name}.{key}" if name else key
            )
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from find_differences(a, b, f"{name}[{index}]")
    elif old != new:
        yield f"{name}: {_format_value(old)} → {_format_value(new)}"


def _format_value(value: Any) -> str:
    return "not set" if value is None else repr(value)
