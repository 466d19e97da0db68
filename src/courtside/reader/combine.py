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
        outputs = [reader(trajectories) for reader in self.readers]
        counts: Counter[str] = Counter()
        proposed: dict[tuple[str, int], Hint] = {}
        for hint in (hint for output in outputs for hint in output.hints):
            if problem := rejection_reason(hint, by_id):
                counts[f"dropped/{problem}"] += 1
            elif (hint.trajectory, hint.turn) in proposed:
                counts["dropped/duplicate"] += 1
            else:
                proposed[hint.trajectory, hint.turn] = hint
        selected = self._within_budget(list(proposed.values()), counts)
        if self.control is not None:
            controlled = self.control(selected, list(proposed.values()), trajectories, self.seed)
            selected = list(controlled.hints)
            counts.update(controlled.counts)
        # Members that are CombinedReaders counted "kept" hints, which are selected again here.
        inner = [{n: c for n, c in output.counts.items() if n != "accepted"} for output in outputs]
        return ReaderOutput(
            hints=tuple(selected), counts=sum_counts([*inner, counts, {"accepted": len(selected)}])
        )

    def _within_budget(self, hints: Sequence[Hint], counts: Counter[str]) -> list[Hint]:
        num_hints: Counter[str] = Counter()
        selected: list[Hint] = []
        for hint in hints:
            if num_hints[hint.trajectory] < self.max_hints:
                num_hints[hint.trajectory] += 1
                selected.append(hint)
            else:
                counts["dropped/budget"] += 1
        return selected
