"""Several readers in order, one hint a turn, a budget for each trajectory, and then a control."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from courtside.reader.base import Reader, ReaderOutput, rejection_reason, sum_counts
from courtside.reader.controls import CONTROLS
from courtside.types import Hint, Trajectory


class CombinedReader:
    """What its readers propose, as far as it can be used.

    A hint for a turn that does not exist is dropped whoever wrote it; of several for one turn the
    first stays, in the order of the readers; then come the first `max_hints` of each trajectory.
    """

    def __init__(
        self, readers: Sequence[Reader], *, max_hints: int, control: str = "none", seed: int = 0
    ):
        self.readers = tuple(readers)
        self.max_hints = max_hints
        self.control = None if control == "none" else CONTROLS[control]
        self.seed = seed

    def __call__(self, trajectories: Sequence[Trajectory]) -> ReaderOutput:
        by_id = {trajectory.id: trajectory for trajectory in trajectories}
        assert len(by_id) == len(trajectories), "ids name trajectories"
        readings = [reader(trajectories) for reader in self.readers]
        counts: Counter[str] = Counter()
        proposed: dict[tuple[str, int], Hint] = {}
        for hint in (hint for reading in readings for hint in reading.hints):
            if problem := rejection_reason(hint, by_id):
                counts[f"dropped/{problem}"] += 1
            elif (hint.trajectory, hint.turn) in proposed:
                counts["dropped/duplicate"] += 1
            else:
                proposed[hint.trajectory, hint.turn] = hint
        kept = self._within_budget(list(proposed.values()), counts)
        if self.control is not None:
            put = self.control(kept, list(proposed.values()), trajectories, self.seed)
            kept = list(put.hints)
            counts.update(put.counts)
        # A reader within this one counted as kept what is judged once more here.
        inner = [{n: c for n, c in one.counts.items() if n != "kept"} for one in readings]
        return ReaderOutput(
            hints=tuple(kept), counts=sum_counts([*inner, counts, {"kept": len(kept)}])
        )

    def _within_budget(self, hints: Sequence[Hint], counts: Counter[str]) -> list[Hint]:
        used: Counter[str] = Counter()
        kept: list[Hint] = []
        for hint in hints:
            if used[hint.trajectory] < self.max_hints:
                used[hint.trajectory] += 1
                kept.append(hint)
            else:
                counts["dropped/budget"] += 1
        return kept
