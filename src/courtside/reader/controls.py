"""Hints put wrong on purpose: what an experiment compares the right ones with.

A control changes where hints are or what they say and nothing else. Its random numbers depend on
the run's seed and on the trajectories' ids, never on the order of a batch.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from courtside.reader.base import ReaderOutput, hintable_turns
from courtside.seeds import seed_for
from courtside.types import Hint, Trajectory

Control = Callable[[Sequence[Hint], Sequence[Hint], Sequence[Trajectory], int], ReaderOutput]
"""(hints that are kept, all that were proposed, their trajectories, seed) → hints put wrong."""


def random_turn(
    hints: Sequence[Hint],
    proposed: Sequence[Hint],
    trajectories: Sequence[Trajectory],
    seed: int,
) -> ReaderOutput:
    """Each above another turn of its trajectory: one that no hint was meant for, and no other hint
    was moved to. Where there is none left, the hint is dropped."""
    moved: list[Hint] = []
    counts: Counter[str] = Counter()
    free: dict[str, list[int]] = {}
    for trajectory in trajectories:
        meant = {hint.turn for hint in proposed if hint.trajectory == trajectory.id}
        free[trajectory.id] = [turn for turn in hintable_turns(trajectory) if turn not in meant]
        random.Random(seed_for(seed, "random_turn", trajectory.id)).shuffle(free[trajectory.id])
    for hint in hints:
        if free[hint.trajectory]:
            moved.append(_put(hint, free[hint.trajectory].pop(), hint.text, "random_turn"))
        else:
            counts["dropped/no_other_turn"] += 1
    return ReaderOutput(hints=tuple(moved), counts=counts)


def random_hint(
    hints: Sequence[Hint],
    _proposed: Sequence[Hint],
    _trajectories: Sequence[Trajectory],
    seed: int,
) -> ReaderOutput:
    """The texts permuted so that no turn gets the words that were meant for it, from wherever they
    come. Of a text that is more than half of the batch, the surplus is dropped."""
    order = sorted(range(len(hints)), key=lambda i: (hints[i].trajectory, hints[i].turn))
    where = "/".join(f"{hints[i].trajectory}:{hints[i].turn}" for i in order)
    draw = random.Random(seed_for(seed, "random_hint", where))
    draw.shuffle(order)
    by_text: dict[str, list[int]] = {}
    for i in order:
        by_text.setdefault(hints[i].text, []).append(i)
    groups = sorted(by_text.values(), key=len, reverse=True)
    if not groups:
        return ReaderOutput(hints=(), counts={})
    surplus = max(2 * len(groups[0]) - len(hints), 0)
    groups[0] = groups[0][surplus:]
    # With equal texts side by side, a turn by the size of the largest group leads out of each.
    turned = [i for group in groups for i in group]
    shift = len(groups[0])
    given = {i: turned[(k + shift) % len(turned)] for k, i in enumerate(turned)}
    swapped = tuple(
        _put(hint, hint.turn, hints[given[i]].text, "random_hint")
        for i, hint in enumerate(hints)
        if i in given
    )
    return ReaderOutput(hints=swapped, counts={"dropped/no_other_hint": surplus})


def all_turns(
    hints: Sequence[Hint],
    _proposed: Sequence[Hint],
    trajectories: Sequence[Trajectory],
    _seed: int,
) -> ReaderOutput:
    """Above every turn of a trajectory that has a hint: its own, or else the trajectory's first."""
    spread: list[Hint] = []
    for trajectory in trajectories:
        own = {hint.turn: hint for hint in hints if hint.trajectory == trajectory.id}
        if own:
            first = next(iter(own.values()))
            spread += [
                own.get(turn) or _put(first, turn, first.text, "all_turns")
                for turn in hintable_turns(trajectory)
            ]
    return ReaderOutput(hints=tuple(spread), counts={"control/added": len(spread) - len(hints)})


CONTROLS: Mapping[str, Control] = {
    "random_turn": random_turn,
    "random_hint": random_hint,
    "all_turns": all_turns,
}


def _put(hint: Hint, turn: int, text: str, control: str) -> Hint:
    reason = (
        f"control {control}: meant for turn {hint.turn}"
        if turn != hint.turn
        else (f"control {control}: other words were meant")
    )
    # The words that the hint was against are not those of the turn it is above now.
    return replace(hint, turn=turn, text=text, reason=reason, bad_span=None)
