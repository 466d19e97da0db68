"""The user's hints, in a file that other programs may change at any time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from courtside.errors import UserError
from courtside.files import read_regular_file
from courtside.report.folder.hints_file import HintLimits, append_hint, parse_hints, remove_hint
from courtside.sanitize import to_one_line
from courtside.types import Hint

Key = tuple[str, int]
"""Id of a trajectory in the file, and index of a turn."""


class HintsEditor:
    def __init__(self, path: Path, limits: HintLimits) -> None:
        self.path = path
        self.limits = limits
        self.problem: str | None = None
        """Why hints cannot be written, with the line to correct; None: they can."""
        self._stamp: tuple[int, int] | None = None
        self._hints: dict[Key, Hint] = {}

    def read(self) -> dict[Key, Hint]:
        """The hints in the file; a later line for a turn replaces an earlier one.

        While a line is invalid: the last valid state, and `problem` is set.
        """
        if self.path.is_symlink():  # since the start
            self._stamp = None
            self.problem = f"{self.path}: became a symbolic link. Put the file itself there"
            return self._hints
        try:
            now = self.path.stat()
            stamp = (now.st_mtime_ns, now.st_size)
            if stamp == self._stamp:
                return self._hints
            hints, skipped = parse_hints(read_regular_file(self.path), name=str(self.path))
        except FileNotFoundError:
            self._stamp, self._hints, self.problem = None, {}, None
            return self._hints
        except OSError as error:
            self._stamp = None
            self.problem = f"{self.path}: cannot be read ({error.strerror}). Put a file there"
            return self._hints
        except UserError as error:
            self._stamp = None
            self.problem = str(error)
            return self._hints
        self._stamp = stamp
        self._hints = {(hint.trajectory, hint.turn): hint for hint in hints}
        self.problem = _describe_unfinished(self.path) if skipped else None
        return self._hints

    @property
    def version(self) -> str:
        """Changes whenever the file does."""
        return str(self._stamp)

    def of_trajectory(self, trajectory: str) -> dict[int, Hint]:
        return {turn: hint for (id, turn), hint in self.read().items() if id == trajectory}

    def write(self, trajectory: str, turn: int, text: str) -> Hint:
        """Refuses an empty text, and one that the reader would drop as too long."""
        line = to_one_line(text)
        if not line:
            raise UserError("the hint is empty. Write a few words, or remove the hint")
        if len(line) > self.limits.max_chars:
            raise UserError(
                f"the hint has {len(line):,} characters, and the reader drops those of more than "
                f"{self.limits.max_chars:,} (reader.max_chars). Shorten it"
            )
        previous = self.read().get((trajectory, turn))
        hint = Hint(trajectory=trajectory, turn=turn, text=line, source="human")
        if previous is not None:
            hint = replace(hint, reason=previous.reason)
        if hint != previous:
            append_hint(self.path, hint)
        return hint

    def remove(self, trajectory: str, turn: int) -> None:
        remove_hint(self.path, trajectory, turn)


def _describe_unfinished(path: Path) -> str:
    return f"{path}: its last line is not finished. End it with a line break, or remove it"
