"""Hints of a person, from a JSONL file that the viewer or an editor writes.

The file is read again whenever it changed, so hints can be added while a run goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from courtside.errors import RunError, UserError
from courtside.files import read_regular_file
from courtside.reader.base import ReaderOutput
from courtside.recipe.reader import HumanReaderConfig
from courtside.report.folder.hints_file import hints_file_id, parse_hints
from courtside.types import Hint, Trajectory


class HumanReader:
    def __init__(self, config: HumanReaderConfig):
        self.config = config
        self._stamp: tuple[int, int] | None = None
        self.read: tuple[tuple[Hint, ...], Mapping[str, int]] = ((), {})
        self._hints()  # raises for a wrong path or line before anything is sampled

    def __call__(self, trajectories: Sequence[Trajectory]) -> ReaderOutput:
        ids: dict[str, list[str]] = {}
        for trajectory in trajectories:
            for name in {trajectory.id, hints_file_id(trajectory)}:
                ids.setdefault(name, []).append(trajectory.id)
        try:
            file_hints, skipped = self._hints()
        except UserError as error:
            raise RunError(f"{error}. Then start the same command again") from None
        counts = Counter(skipped)
        hint_at: dict[tuple[str, int], Hint] = {}
        for hint in file_hints:
            matching_ids = ids.get(hint.trajectory, [])
            counts["human/proposed"] += max(len(matching_ids), 1)
            counts["dropped/no_such_trajectory"] += not matching_ids
            for id in matching_ids:
                if len(hint.text) > self.config.max_chars:
                    counts["dropped/long_hint"] += 1
                    continue
                # A later line about the same turn corrects an earlier one.
                replaced = hint_at.pop((id, hint.turn), None)
                counts["dropped/replaced"] += replaced is not None
                hint_at[id, hint.turn] = replace(hint, trajectory=id)
        return ReaderOutput(hints=tuple(hint_at.values()), counts=+counts)

    def _hints(self) -> tuple[tuple[Hint, ...], Mapping[str, int]]:
        path = self.config.path
        try:
            now = path.stat()
            stamp = (now.st_mtime_ns, now.st_size)
            if stamp != self._stamp:
                self.read = parse_hints(read_regular_file(path), name=str(path))
                self._stamp = stamp
        except OSError as error:
            raise UserError(
                f"reader.path = {str(path)!r} cannot be read ({error.strerror}). Write the file "
                "(`courtside view` does), or correct the path"
            ) from None
        return self.read


def hinted_task_ids(config: HumanReaderConfig) -> frozenset[str]:
    """The ids that the hints of its file name now."""
    return frozenset(hint.trajectory for hint in HumanReader(config).read[0])
