"""The reader protocol: trajectories to hints, without models that train or losses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
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


@contextmanager
def no_phase(name: str) -> Iterator[None]:
    yield


Reader = Callable[[Sequence[Trajectory]], ReaderOutput]

Phase = Callable[[str], AbstractContextManager[None]]
"""Charges what happens inside to the phase of this name."""


class ReaderStage:
    """The reader stage of the loop: trajectories in, hints out."""

    def __init__(self, reader: Reader):
        self.reader = reader

    def __call__(self, trajectories: Sequence[Trajectory], phase: Phase = no_phase) -> ReaderOutput:
        with phase("reader"):
            return self.reader(trajectories)


class NoReader(ReaderStage):
    """Gives no hints and costs nothing."""

    def __init__(self) -> None:
        super().__init__(lambda trajectories: ReaderOutput(hints=(), counts={}))

    def __call__(self, trajectories: Sequence[Trajectory], phase: Phase = no_phase) -> ReaderOutput:
        return self.reader(trajectories)


def hintable_turns(trajectory: Trajectory) -> tuple[int, ...]:
    """Indices of turns that can get a hint: assistant turns with completion tokens."""
    return tuple(
        i
        for i, t in enumerate(trajectory.turns)
        if t.role == "assistant" and any(t.completion_mask)
    )


def rejection_reason(hint: Hint, trajectories: Mapping[str, Trajectory]) -> str | None:
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


def sum_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sums by name, in the order of the names; names that counted nothing are left out."""
    sums: dict[str, int] = {}
    for mapping in counts:
        for name, number in mapping.items():
            sums[name] = sums.get(name, 0) + number
    return {name: sums[name] for name in sorted(sums) if sums[name]}
