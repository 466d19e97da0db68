"""Experiment controls: hints moved or exchanged on purpose.

A control changes the turns or texts of hints and nothing else. Its random numbers depend on
the run's seed and on the trajectories' ids, never on the order of a batch.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from courtside.ranks import Ranks
from courtside.reader.base import Batch, Control, Hints, ReaderOutput
from courtside.seeds import seed_for
from courtside.types import Hint


def random_turn(hints: Hints, proposed: Hints, trajectories: Batch, seed: int) -> ReaderOutput:
    """Each before another turn of its trajectory: one that no hint was meant for, and no other hint
    was moved to. Where there is none left, the hint is dropped."""
    relocated: list[Hint] = []
    counts: Counter[str] = Counter()
    free: dict[str, list[int]] = {}
    for trajectory in trajectories:
        hinted_turns = {hint.turn for hint in proposed if hint.trajectory == trajectory.id}
        free[trajectory.id] = [
            turn for turn in trajectory.hintable_turns if turn not in hinted_turns
        ]
        random.Random(seed_for(seed, "random_turn", trajectory.id)).shuffle(free[trajectory.id])
    for hint in hints:
        if free[hint.trajectory]:
            relocated.append(_relocate(hint, free[hint.trajectory].pop(), hint.text, "random_turn"))
        else:
            counts["dropped/no_other_turn"] += 1
    return ReaderOutput(hints=tuple(relocated), counts=counts)


def random_hint(hints: Hints, _proposed: Hints, _trajectories: Batch, seed: int) -> ReaderOutput:
    """The texts permuted so that no turn gets the words that were meant for it, from wherever they
    come. Of a text that is more than half of the batch, the surplus is dropped."""
    order = sorted(range(len(hints)), key=lambda i: (hints[i].trajectory, hints[i].turn))
    where = "/".join(f"{hints[i].trajectory}:{hints[i].turn}" for i in order)
    rng = random.Random(seed_for(seed, "random_hint", where))
    rng.shuffle(order)
    by_text: dict[str, list[int]] = {}
    for i in order:
        by_text.setdefault(hints[i].text, []).append(i)
    groups = sorted(by_text.values(), key=len, reverse=True)
    if not groups:
        return ReaderOutput(hints=(), counts={})
    surplus = max(2 * len(groups[0]) - len(hints), 0)
    groups[0] = groups[0][surplus:]
    # With equal texts side by side, a turn by the size of the largest group leads out of each.
    rotation = [i for group in groups for i in group]
    shift = len(groups[0])
    source_of = {i: rotation[(k + shift) % len(rotation)] for k, i in enumerate(rotation)}
    swapped = tuple(
        _relocate(hint, hint.turn, hints[source_of[i]].text, "random_hint")
        for i, hint in enumerate(hints)
        if i in source_of
    )
    return ReaderOutput(hints=swapped, counts={"dropped/no_other_hint": surplus})


def all_turns(hints: Hints, _proposed: Hints, trajectories: Batch, _seed: int) -> ReaderOutput:
    """Above every turn of a trajectory that has a hint: its own, or else the trajectory's first."""
    spread: list[Hint] = []
    for trajectory in trajectories:
        hint_at = {hint.turn: hint for hint in hints if hint.trajectory == trajectory.id}
        if hint_at:
            first = next(iter(hint_at.values()))
            spread += [
                hint_at.get(turn) or _relocate(first, turn, first.text, "all_turns")
                for turn in trajectory.hintable_turns
            ]
    return ReaderOutput(hints=tuple(spread), counts={"control/added": len(spread) - len(hints)})


def other_kind(hints: Hints, _proposed: Hints, trajectories: Batch, seed: int) -> ReaderOutput:
    """Each turn gets the text of a hint of the batch that another rule gave, for another kind of
    decision where the environment tells them apart. Where there is none, the hint is dropped."""
    turns = {(t.id, turn): t.turns[turn] for t in trajectories for turn in t.hintable_turns}

    def kind_of(hint: Hint) -> str:
        decision = turns[hint.trajectory, hint.turn].decision
        return hint.source if decision is None else decision.partition("/")[0]

    swapped: list[Hint] = []
    ordered = sorted(hints, key=lambda hint: (hint.trajectory, hint.turn))
    for hint in hints:
        texts = [other.text for other in ordered if kind_of(other) != kind_of(hint)]
        if texts:
            rng = random.Random(seed_for(seed, "other_kind", hint.trajectory, hint.turn))
            swapped.append(_relocate(hint, hint.turn, rng.choice(texts), "other_kind"))
    num_dropped = len(hints) - len(swapped)
    return ReaderOutput(hints=tuple(swapped), counts={"dropped/no_other_kind": num_dropped})


def mirror_turn(hints: Hints, proposed: Hints, trajectories: Batch, seed: int) -> ReaderOutput:
    """Each before a turn of the batch without an event whose decision is of the same kind, on the
    other side (`date/habit_right` for `date/habit_wrong`): one that no hint was meant for, and no
    other hint was moved to. Where there is none, the hint is dropped."""
    sides = {
        (t.id, turn): (t.turns[turn].decision or "").partition("/")[::2]
        for t in trajectories
        for turn in t.hintable_turns
    }
    hinted_turns = {(hint.trajectory, hint.turn) for hint in proposed}
    free = {
        (t.id, turn)
        for t in trajectories
        for turn in t.hintable_turns
        if not t.turns[turn].events and (t.id, turn) not in hinted_turns
    }
    relocated: list[Hint] = []
    # Each takes a turn from those after it, so they come in an order that the batch has no part in.
    for hint in sorted(hints, key=lambda hint: (hint.trajectory, hint.turn)):
        kind, side = sides[hint.trajectory, hint.turn]
        mirrors = sorted(p for p in free if side and sides[p][0] == kind and sides[p][1] != side)
        if mirrors:
            rng = random.Random(seed_for(seed, "mirror_turn", hint.trajectory, hint.turn))
            trajectory, turn = place = rng.choice(mirrors)
            free.remove(place)
            mirrored_hint = _relocate(hint, turn, hint.text, "mirror_turn")
            reason = f"control mirror_turn: meant for turn {hint.turn} of {hint.trajectory}"
            relocated.append(replace(mirrored_hint, trajectory=trajectory, reason=reason))
    num_dropped = len(hints) - len(relocated)
    return ReaderOutput(hints=tuple(relocated), counts={"dropped/no_mirror_turn": num_dropped})


def control_all_ranks(control: Control, ranks: Ranks) -> Control:
    """`control` over the whole batch, of which this rank has some trajectories: it returns those of
    its own. All ranks call it together."""
    if ranks.size == 1:
        return control

    gather = ranks.gather_lists

    def control_batch(
        hints: Hints, proposed: Hints, trajectories: Batch, seed: int
    ) -> ReaderOutput:
        output = control(gather(hints), gather(proposed), gather(trajectories), seed)
        ids = {trajectory.id for trajectory in trajectories}
        return ReaderOutput(
            hints=tuple(hint for hint in output.hints if hint.trajectory in ids),
            counts=output.counts if ranks.is_leader else {},  # of the batch, once
        )

    return control_batch


def pair_wrong_hints(
    control: Control, hints: Hints, trajectories: Batch, seed: int
) -> ReaderOutput:
    """Each hint with the text that `control` would put in its place as its `wrong_text`. Where it
    has none, the hint is dropped."""
    swapped = control(hints, hints, trajectories, seed)
    texts = {(hint.trajectory, hint.turn): hint.text for hint in swapped.hints}
    paired = tuple(
        replace(hint, wrong_text=texts[hint.trajectory, hint.turn])
        for hint in hints
        if (hint.trajectory, hint.turn) in texts
    )
    return ReaderOutput(hints=paired, counts=swapped.counts)


CONTROLS: Mapping[str, Control] = {
    "random_turn": random_turn,
    "random_hint": random_hint,
    "all_turns": all_turns,
    "other_kind": other_kind,
    "mirror_turn": mirror_turn,
}


def _relocate(hint: Hint, turn: int, text: str, control: str) -> Hint:
    reason = (
        f"control {control}: meant for turn {hint.turn}"
        if turn != hint.turn
        else (f"control {control}: other words were meant")
    )
    # The bad span belongs to the turn that the hint was written for.
    return replace(hint, turn=turn, text=text, reason=reason, bad_span=None)
