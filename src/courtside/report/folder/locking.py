"""Access to a run folder: one writing process at a time, and always the same recipe."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from courtside.errors import RecipeError, UserError
from courtside.recipe import Recipe
from courtside.report.folder.files import TEMPORARY

RECIPE = "recipe.toml"
LOCK = ".lock"
CHANGEABLE_FIELDS = (
    "run",
    "rollout.kv_cache_tokens",
    "rollout.limits.max_fault_fraction",
    "rollout.limits.step_seconds",
    "student.gradient_checkpointing",
    "tasks.grader_seconds",
    "tasks.workers",
    "train.logits_chunk_tokens",
    "train.max_flops",
    "train.max_seconds",
    "train.max_student_tokens",
    "train.max_teacher_tokens",
    "train.micro_batch_tokens",
    "train.optimizer_offload",
    "train.steps",
)
"""May differ in a resumed run: what is stored, memory settings, where and how long user code runs,
and when the run ends. Training is the same up to rounding."""


def refuse_foreign_folder(path: Path) -> None:
    """Refuse to write into a folder with other files."""
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
    # Left by a first start that was killed before it wrote the recipe.
    expected = {LOCK, "checkpoints", "trajectories", "environment.json"}
    foreign = {name for name in names - expected if not name.endswith(TEMPORARY)}
    if foreign and RECIPE not in names:
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
