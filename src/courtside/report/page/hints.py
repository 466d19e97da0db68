"""Which hints moved the student, which did not, and how many there were."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from courtside.report.folder.folder import RunFolder
from courtside.report.folder.parquet import StoredTrajectory
from courtside.report.page.tables import table
from courtside.report.page.token_gaps import Decode
from courtside.report.page.transcript import Conversation, counted, said_to, spoken
from courtside.report.summary import signed
from courtside.types import HintOutcome

NUM_BEST, NUM_USELESS = 4, 3

SHIFT = "Shift: how many nats the turn's tokens lost, in sum, once the hint stood above them."


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A hint and the step it was given in."""

    step: int
    hint_outcomes: HintOutcome


def hints_section(
    folder: RunFolder, metrics: Sequence[Mapping[str, Any]], decode: Decode | None
) -> str:
    """The body of the section; empty for a run without hints."""
    steps = folder.trajectory_steps()
    given = [
        Given(step=step, hint_outcomes=hint_outcomes)
        for step in steps
        for hint_outcomes in folder.hints(step)
    ]
    counts = reader_table(metrics)
    if not given:
        return counts
    parts = [
        f'<p class="caption">{SHIFT} Counted in {counted(len(steps), "stored step")}.</p>',
        source_table([one.hint_outcomes for one in given]),
        counts,
    ]
    groups = {
        "Those that moved the student most": best(given),
        "Those that did not move it, and were dropped": useless(given),
    }
    told = {one.step for chosen in groups.values() for one in chosen}
    stored = {step: folder.trajectories(step) for step in told}
    for title, chosen in groups.items():
        if chosen:
            cards = "".join(_card(one, stored[one.step], decode) for one in chosen)
            parts.append(f"<h3>{title}</h3>{cards}")
    return "".join(parts)


def best(given: Iterable[Given]) -> list[Given]:
    kept = [one for one in given if one.hint_outcomes.drop_reason is None and _measured(one)]
    return _distinct(sorted(kept, key=lambda one: -_shift(one)))[:NUM_BEST]


def useless(given: Iterable[Given]) -> list[Given]:
    dropped = [one for one in given if one.hint_outcomes.drop_reason == "shift" and _measured(one)]
    return _distinct(sorted(dropped, key=_shift))[:NUM_USELESS]


def _measured(one: Given) -> bool:
    return one.hint_outcomes.shift is not None and math.isfinite(one.hint_outcomes.shift)


def _shift(one: Given) -> float:
    assert one.hint_outcomes.shift is not None
    return one.hint_outcomes.shift


def _distinct(given: Iterable[Given]) -> list[Given]:
    """One of each text: a rule says the same thing hundreds of times."""
    first: dict[str, Given] = {}
    for one in given:
        first.setdefault(one.hint_outcomes.hint.text, one)
    return list(first.values())


# ── tables ───────────────────────────────────────────────────────────────────────────────────────


def source_table(hints: Sequence[HintOutcome]) -> str:
    """By who wrote them: how many train, how many do not and why, and their mean shift."""
    whys = [why for why, _ in Counter(j.drop_reason for j in hints if j.drop_reason).most_common()]
    sources = [source for source, _ in Counter(j.hint.source for j in hints).most_common()]
    rows = [(source, [j for j in hints if j.hint.source == source], "") for source in sources]
    if len(sources) > 1:
        rows.append(("total", list(hints), ' class="total"'))
    lines = (
        f"<tr{kind}><th>{escape(source)}</th><td>{len(own):,}</td>"
        f"<td>{sum(j.drop_reason is None for j in own):,}</td>"
        + "".join(f"<td>{sum(j.drop_reason == why for j in own):,}</td>" for why in whys)
        + f"<td>{_mean_shift(own)}</td></tr>"
        for source, own, kind in rows
    )
    heads = ["written by", "hints", "trained on"]
    heads += [f"dropped: {spoken(why)}" for why in whys] + ["mean shift"]
    return table(heads, lines)


def reader_table(metrics: Sequence[Mapping[str, Any]]) -> str:
    """What the reader itself counted, over all steps."""
    counts: Counter[str] = Counter()
    for row in metrics:
        for name, count in row.items():
            if name.startswith("reader/") and count:
                counts[name.removeprefix("reader/")] += count
    if not counts:
        return ""
    lines = (
        f"<tr><th>{escape(name)}</th><td>{counts[name]:,}</td></tr>" for name in sorted(counts)
    )
    body = table(["what", f"in {counted(len(metrics), 'step')}"], lines)
    return f'<details class="whole"><summary>What the reader counted</summary>{body}</details>'


def _mean_shift(hints: Sequence[HintOutcome]) -> str:
    shifts = [j.shift for j in hints if j.shift is not None and math.isfinite(j.shift)]
    return signed(sum(shifts) / len(shifts)) if shifts else "–"


# ── cards ────────────────────────────────────────────────────────────────────────────────────────


def _card(given: Given, stored: Sequence[StoredTrajectory], decode: Decode | None) -> str:
    """What the student had just read, the hint, and the turn it had written without the hint."""
    hint_outcomes, hint = given.hint_outcomes, given.hint_outcomes.hint
    one = next(one for one in stored if one.trajectory.id == hint.trajectory)
    facts = [f"step {given.step}", f"turn {hint.turn}", *([hint.reason] if hint.reason else [])]
    whole = Conversation.of(one, decode)
    alone = Conversation(
        trajectory=one.trajectory,
        gaps=whole.gaps,
        hints={hint.turn: [hint_outcomes]},
        decode=decode,
    )
    trajectory = one.trajectory
    above = (
        said_to(trajectory.turns[hint.turn - 1], trajectory, last=hint.turn == 1)
        if hint.turn
        else ""
    )
    return (
        f'<article class="sample"><header><span>{escape(" · ".join(facts))}</span></header>'
        f'<div class="turns">{above}{alone.said(hint.turn)}</div></article>'
    )
