"""The reader protocol, and the reader that combines others: trajectories in, hints out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from courtside.types import Hint, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderOutput:
    """The hints of one reader for a batch.

    Every hint that was proposed is counted once under its reader (`rules/tool_not_found`,
    `model/proposed`, `human/proposed`), and then is either in `hints` or counted under `dropped/`
    with the reason.
    """

    hints: tuple[Hint, ...]
    """In order of importance: a budget keeps the first ones of a trajectory."""
    counts: Mapping[str, int]


Reader = Callable[[Sequence[Trajectory]], ReaderOutput]

Hints = Sequence[Hint]
Batch = Sequence[Trajectory]
Control = Callable[[Hints, Hints, Batch, int], ReaderOutput]
"""(selected hints, all proposed hints, trajectories, seed) → controlled hints."""


def propose_no_hints(_trajectories: Sequence[Trajectory]) -> ReaderOutput:
    """The reader of a recipe without one."""
    return ReaderOutput(hints=(), counts={})


@dataclass(frozen=True, slots=True, kw_only=True)
class CombinedReader:
    """Several readers in order, one hint a turn, a budget for each trajectory, then a control.

    A hint for a turn that does not exist is dropped whichever reader proposed it; of several for
    one turn the first stays, in the order of the readers; then come the first `max_hints` of each
    trajectory.
    """

    readers: Sequence[Reader]
    max_hints: int
    control: Control | None = None
    pair: Callable[[Hints, Batch, int], ReaderOutput] | None = None
    """Gives each hint a wrong one to be contrasted with; None: there are none."""
    seed: int = 0

    def __call__(self, trajectories: Sequence[Trajectory]) -> ReaderOutput:
        by_id = {trajectory.id: trajectory for trajectory in trajectories}
        assert len(by_id) == len(trajectories), "ids name trajectories"
        counts: Counter[str] = Counter()
        proposed: dict[tuple[str, int], Hint] = {}
        for output in [reader(trajectories) for reader in self.readers]:
            # Members that are CombinedReaders counted "accepted" hints, which are selected again.
            counts.update({name: n for name, n in output.counts.items() if name != "accepted"})
            for hint in output.hints:
                if problem := _find_problem(hint, by_id):
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
        if self.pair is not None:
            paired = self.pair(selected, trajectories, self.seed)
            selected = list(paired.hints)
            counts.update(paired.counts)
        counts["accepted"] = len(selected)
        return ReaderOutput(hints=tuple(selected), counts=dict(sorted((+counts).items())))

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


def _find_problem(hint: Hint, trajectories: Mapping[str, Trajectory]) -> str | None:
    """Why the hint is dropped, whichever reader it is from; None: it is valid."""
    if hint.trajectory not in trajectories:
        return "no_such_trajectory"
    turns = trajectories[hint.trajectory].turns
    if not 0 <= hint.turn < len(turns):
        return "no_such_turn"
    if turns[hint.turn].role != "assistant":
        return "not_assistant"
    if not any(turns[hint.turn].completion_mask):
        return "no_completion"
    return None if hint.text.strip() else "empty_hint"
