"""A hints file: what a person wants said above turns of stored trajectories, a JSON object a line.

The viewer and editors write it, the reader of kind `person` takes it. Whoever adds or removes a
line here holds the file meanwhile, so that nobody's line is lost; an editor does not know of that.
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
from courtside.recipe import HumanReaderConfig, Recipe
from courtside.report.folder.files import replace_file
from courtside.sanitize import to_one_line
from courtside.types import Hint, Trajectory

KEYS = ("trajectory", "turn", "text", "reason")


@dataclass(frozen=True, slots=True, kw_only=True)
class HintLimits:
    """What a reader of the file takes; the rest it drops and counts."""

    max_chars: int
    """Of one hint."""
    max_hints: int
    """Of one trajectory."""

    @classmethod
    def of(cls, recipe: Recipe) -> HintLimits:
        """Those of the recipe's own reader `person`; without one, of a recipe that leaves them."""
        usual = HumanReaderConfig(kind="human", path=Path("hints.jsonl"))
        person = next(iter(recipe.human_readers), usual)
        return cls(max_chars=person.max_chars, max_hints=person.max_hints)


def hints_file_id(trajectory: Trajectory) -> str:
    """What a hints file calls a trajectory.

    Its id; but a recorded conversation is given a new id in every step it comes up in, and there it
    is the id of the task, which stays.
    """
    return trajectory.task.id if trajectory.source == "dataset" else trajectory.id


def parse_hints(content: bytes, *, name: str) -> tuple[tuple[Hint, ...], Mapping[str, int]]:
    """The hints of a file and what was skipped; a broken line is an error with its number."""
    hints: list[Hint] = []
    *lines, rest = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            hints.append(_parse_line(line, where=f"{name}:{number}"))
    if rest.strip():
        if _is_unfinished(rest):
            return tuple(hints), {"human/unfinished_line": 1}
        hints.append(_parse_line(rest, where=f"{name}:{len(lines) + 1}"))
    return tuple(hints), {}


def append_hint(path: Path, hint: Hint) -> None:
    """Add a hint to a file: the whole line or nothing, also when others add to it too."""
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
        # Appended in one write, which lands behind whatever others have added by then.
        with _open_locked(path, "ab+") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 1, 0))
            if size and file.read(1) != b"\n":
                line = b"\n" + line  # an editor left the last line open
            written = file.write(line)
            if written < len(line):
                file.truncate(file.seek(0, os.SEEK_END) - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise _write_error(path, "written", error) from None


def remove_hint(path: Path, trajectory: str, turn: int) -> None:
    """Take all lines about one turn out of a file; every other byte of it stays.

    A file with a broken line is left alone: what that line is about, nobody can say.
    """
    try:
        with _open_locked(path, "rb") as file:
            content = file.read()
            *whole, rest = content.split(b"\n")
            lines = [*(line + b"\n" for line in whole), rest]
            kept = [
                line
                for number, line in enumerate(lines, start=1)
                if not _is_about(line, trajectory, turn, where=f"{path}:{number}")
            ]
            if len(kept) < len(lines):
                # The file itself, where the path is a link to it.
                replace_file(path.resolve(), b"".join(kept))
    except FileNotFoundError:
        return
    except OSError as error:
        raise _write_error(path, "removed", error) from None
    except RunError as error:
        assert isinstance(error.__cause__, OSError)
        raise _write_error(path, "removed", error.__cause__) from None


@contextmanager
def _open_locked(path: Path, mode: str) -> Iterator[FileIO]:
    """The file, open, and nobody else's meanwhile who asks for it here."""
    while True:
        with open(path, mode, buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_same_file(path, file):
                assert isinstance(file, FileIO)
                yield file
                return


def _is_same_file(path: Path, file: IO[bytes]) -> bool:
    """Whoever held it before may have put another file in its place, or removed it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _write_error(path: Path, done: str, error: OSError) -> UserError:
    return UserError(
        f"{path}: the hint could not be {done} ({error.strerror}). Make room or make the "
        "folder writable; what was in the file is still there"
    )


def _is_unfinished(line: bytes) -> bool:
    """A last line without a break that is no JSON yet: somebody is in the middle of writing it."""
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
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON ({error}); correct or remove the line") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: must be an object with {', '.join(KEYS)}")
    if unknown := sorted(row.keys() - set(KEYS)):
        raise UserError(f"{where}: unknown key {unknown[0]!r}; a hint has {', '.join(KEYS)}")
    for key in ("trajectory", "text", "reason"):
        if not isinstance(row.get(key, "" if key == "reason" else None), str):
            raise UserError(f"{where}: `{key}` must be a text; write one")
    turn = row.get("turn")
    if not isinstance(turn, int) or isinstance(turn, bool) or turn < 0:
        raise UserError(f"{where}: `turn` must be the number of a turn, counted from 0")
    text = to_one_line(row["text"])
    if not text:
        raise UserError(f"{where}: `text` is empty; write the hint, or remove the line")
    return Hint(
        trajectory=row["trajectory"],
        turn=turn,
        text=text,
        source="human",
        reason=to_one_line(row.get("reason", "")),
    )
