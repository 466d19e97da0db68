"""A person's hints, from a file that a viewer or an editor writes: one JSON object a line.

The file is read again whenever it changed, so hints can be added while a run goes on.
"""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from courtside.config.reader import PersonReader
from courtside.errors import RunError, UserError
from courtside.reader.base import Reading, total
from courtside.reader.wording import one_line
from courtside.types import Hint, Trajectory

KEYS = ("trajectory", "turn", "text", "reason")


class ByPerson:
    def __init__(self, config: PersonReader):
        self.config = config
        self.read_at: tuple[int, int] | None = None
        self.read: tuple[tuple[Hint, ...], Mapping[str, int]] = ((), {})
        self._hints()  # a wrong path or a broken line is told before anything was sampled

    def __call__(self, trajectories: Sequence[Trajectory]) -> Reading:
        ids: dict[str, list[str]] = {}
        for trajectory in trajectories:
            for name in {trajectory.id, hinted_id(trajectory)}:
                ids.setdefault(name, []).append(trajectory.id)
        try:
            written, skipped = self._hints()
        except UserError as error:
            raise RunError(f"{error}. Then start the same command again") from None
        counts = Counter(skipped)
        here: dict[tuple[str, int], Hint] = {}
        for hint in written:
            meant = ids.get(hint.trajectory, [])
            counts["person/proposed"] += max(len(meant), 1)
            counts["dropped/no_such_trajectory"] += not meant
            for id in meant:
                if len(hint.text) > self.config.max_chars:
                    counts["dropped/long_hint"] += 1
                    continue
                # A later line about the same turn corrects an earlier one.
                replaced = here.pop((id, hint.turn), None)
                counts["dropped/replaced"] += replaced is not None
                here[id, hint.turn] = replace(hint, trajectory=id)
        return Reading(hints=tuple(here.values()), counts=total([counts]))

    def _hints(self) -> tuple[tuple[Hint, ...], Mapping[str, int]]:
        path = self.config.path
        try:
            now = path.stat()
            stamp = (now.st_mtime_ns, now.st_size)
            if stamp != self.read_at:
                self.read = parse_hints(path.read_bytes(), name=str(path))
                self.read_at = stamp
        except OSError as error:
            raise UserError(
                f"reader.path = {str(path)!r} cannot be read ({error.strerror}). Create the file "
                "(an empty one will do), or correct the path"
            ) from None
        return self.read


def hinted_id(trajectory: Trajectory) -> str:
    """The id under which a hint is written for it: the task's for a recorded conversation, which
    has a new trajectory id in every step; its own otherwise."""
    return trajectory.task.id if trajectory.source == "dataset" else trajectory.id


def hinted_names(config: PersonReader) -> frozenset[str]:
    """The ids that the hints of its file name now."""
    return frozenset(hint.trajectory for hint in ByPerson(config).read[0])


def parse_hints(content: bytes, *, name: str) -> tuple[tuple[Hint, ...], Mapping[str, int]]:
    """The hints of a file and what was skipped; a broken line is an error with its number."""
    hints: list[Hint] = []
    *lines, rest = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            hints.append(_hint(line, where=f"{name}:{number}"))
    if rest.strip():
        try:
            json.loads(rest)
        except (ValueError, RecursionError):
            # No line break yet: somebody is in the middle of writing it.
            return tuple(hints), {"person/unfinished_line": 1}
        hints.append(_hint(rest, where=f"{name}:{len(lines) + 1}"))
    return tuple(hints), {}


def write_hint(path: Path, hint: Hint) -> None:
    """Add a hint to a file: the whole line or nothing, also when others add to it too."""
    row: dict[str, Any] = {
        "trajectory": hint.trajectory,
        "turn": hint.turn,
        "text": one_line(hint.text),
    }
    if hint.reason:
        row["reason"] = one_line(hint.reason)
    line = json.dumps(row).encode() + b"\n"
    _hint(line, where=f"hint for {path}")
    try:
        # Appended in one write, which lands behind whatever others have added by then.
        with path.open("ab+", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 1, 0))
            if size and file.read(1) != b"\n":
                line = b"\n" + line  # an editor left the last line open
            written = file.write(line)
            if written < len(line):
                file.truncate(file.seek(0, os.SEEK_END) - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise UserError(
            f"{path}: the hint could not be written ({error.strerror}). Make room or make the "
            "folder writable; what was in the file is still there"
        ) from None


def _hint(line: bytes, *, where: str) -> Hint:
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
    text = one_line(row["text"])
    if not text:
        raise UserError(f"{where}: `text` is empty; write the hint, or remove the line")
    return Hint(
        trajectory=row["trajectory"],
        turn=turn,
        text=text,
        source="person",
        reason=one_line(row.get("reason", "")),
    )
