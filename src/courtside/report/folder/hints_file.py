"""A hints file: a person's hints for turns of stored trajectories, as JSON Lines.

The viewer and text editors write it; the reader of kind `human` uses it. Appending and removing a
hint lock the file, so that concurrent writers lose no line; text editors do not take the lock.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import IO, Any

from courtside.errors import RunError, UserError
from courtside.files import DuplicateKeyError, require_unique_keys
from courtside.recipe import Recipe
from courtside.recipe.reader import HumanReaderConfig
from courtside.report.folder.files import replace_file
from courtside.sanitize import to_one_line
from courtside.types import Hint, Trajectory

KEYS = ("trajectory", "turn", "text", "reason")


@dataclass(frozen=True, slots=True, kw_only=True)
class HintLimits:
    """Limits of the reader, which drops and counts all other hints."""

    max_chars: int
    """Characters of one hint."""
    max_hints: int
    """Hints of one trajectory."""

    @classmethod
    def of(cls, recipe: Recipe) -> HintLimits:
        """Limits of the recipe's human reader, or the defaults without one."""
        default = HumanReaderConfig(kind="human", path=Path("hints.jsonl"))
        reader = next(iter(recipe.human_readers), default)
        return cls(max_chars=reader.max_chars, max_hints=reader.max_hints)


def hints_file_id(trajectory: Trajectory) -> str:
    """The id of a trajectory in a hints file.

    For a recorded conversation the id of its task, as its trajectory has a new id in every step.
    """
    return trajectory.task.id if trajectory.source == "dataset" else trajectory.id


def parse_hints(content: bytes, *, name: str) -> tuple[tuple[Hint, ...], Mapping[str, int]]:
    """The hints and counts of skipped lines; an invalid line is an error with its number."""
    hints: list[Hint] = []
    *lines, last = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            hints.append(_parse_line(line, where=f"{name}:{number}"))
    if last.strip():
        if _is_unfinished(last):
            return tuple(hints), {"human/unfinished_line": 1}
        hints.append(_parse_line(last, where=f"{name}:{len(lines) + 1}"))
    return tuple(hints), {}


def append_hint(path: Path, hint: Hint) -> None:
    """Append a hint: the whole line or nothing, also with concurrent writers."""
    row: dict[str, Any] = {
        "trajectory": hint.trajectory,
        "turn": hint.turn,
        "text": to_one_line(hint.text),
    }
    if hint.reason:
        row["reason"] = to_one_line(hint.reason)
    line = json.dumps(row).encode() + b"\n"
    _parse_line(line, where=f"hint for {path}")
    try:
        # One write in append mode, after all that others have appended by then.
        with _open_locked(path, "ab+") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 1, 0))
            if size and file.read(1) != b"\n":
                line = b"\n" + line  # an editor left the last line open
            num_written = file.write(line)
            if num_written < len(line):
                file.truncate(file.seek(0, os.SEEK_END) - num_written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise _write_error(path, "written", error) from None


def remove_hint(path: Path, trajectory: str, turn: int) -> None:
    """Delete all lines for one turn and keep every other byte.

    A file with an invalid line is refused: the turn of that line is unknown.
    """
    try:
        with _open_locked(path, "rb") as file:
            content = file.read()
            *complete, last = content.split(b"\n")
            lines = [*(line + b"\n" for line in complete), last]
            remaining = [
                line
                for number, line in enumerate(lines, start=1)
                if not _is_about(line, trajectory, turn, where=f"{path}:{number}")
            ]
            if len(remaining) < len(lines):
                replace_file(path, b"".join(remaining))
    except FileNotFoundError:
        return
    except OSError as error:
        raise _write_error(path, "removed", error) from None
    except RunError as error:
        assert isinstance(error.__cause__, OSError)
        raise _write_error(path, "removed", error.__cause__) from None


@contextmanager
def _open_locked(path: Path, mode: str) -> Iterator[FileIO]:
    """The open file, locked."""
    while True:
        with open(path, mode, buffering=0, opener=_open_no_link) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_same_file(path, file):
                assert isinstance(file, FileIO)
                yield file
                return


def _open_no_link(path: str, flags: int) -> int:
    """A link in a run folder of somebody else must not lead a hint to another file."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _is_same_file(path: Path, file: IO[bytes]) -> bool:
    """False if the previous holder of the lock replaced or removed the file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _write_error(path: Path, action: str, error: OSError) -> UserError:
    if error.errno == errno.ELOOP:
        return UserError(
            f"{path}: is a symbolic link, and hints are written to plain files only. Give the file "
            "that it leads to"
        )
    return UserError(
        f"{path}: the hint could not be {action} ({error.strerror}). Free some space or make the "
        "folder writable; the content of the file is unchanged"
    )


def _is_unfinished(line: bytes) -> bool:
    """A last line without a line break that is not JSON yet: it is still being written."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return not line.endswith(b"\n")
    return False


def _is_about(line: bytes, trajectory: str, turn: int, *, where: str) -> bool:
    if not line.strip() or _is_unfinished(line):
        return False
    hint = _parse_line(line, where=where)
    return (hint.trajectory, hint.turn) == (trajectory, turn)


def _parse_line(line: bytes, *, where: str) -> Hint:
    try:
        row = json.loads(line, object_pairs_hook=require_unique_keys)
    except DuplicateKeyError as error:
        raise UserError(f"{where}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON ({error}); correct or remove the line") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: must be an object with {', '.join(KEYS)}")
    if unknown := sorted(row.keys() - set(KEYS)):
        raise UserError(f"{where}: unknown key {unknown[0]!r}; a hint has {', '.join(KEYS)}")
    for key in ("trajectory", "text", "reason"):
        if not isinstance(row.get(key, "" if key == "reason" else None), str):
            raise UserError(f"{where}: `{key}` must be a string")
    turn = row.get("turn")
    if not isinstance(turn, int) or isinstance(turn, bool) or turn < 0:
        raise UserError(f"{where}: `turn` must be the index of a turn, counted from 0")
    text = to_one_line(row["text"])
    if not text:
        raise UserError(f"{where}: `text` has no visible character; write one, or remove the line")
    return Hint(
        trajectory=row["trajectory"],
        turn=turn,
        text=text,
        source="human",
        reason=to_one_line(row.get("reason", "")),
    )
