"""The report's hints: counts by source, and the hints with the largest, negative and smallest
shifts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from courtside.report.folder.parquet import StoredTrajectory
from courtside.report.metrics import READER
from courtside.report.page.reading import FolderReader
from courtside.report.page.tables import render_table
from courtside.report.page.token_gaps import Decode
from courtside.report.page.transcript import (
    Conversation,
    pluralize,
    readable_name,
    render_messages,
)
from courtside.report.summary import format_signed
from courtside.types import HintOutcome

NUM_LARGEST, NUM_SMALLEST = 4, 3

SHIFT = (
    "Shift: how many nats the tokens of the turn lose in sum with the hint in the context. Below 0 "
    "the hint makes the turn more likely and would teach the mistake (hints.harmful)."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHint:
    step: int
    outcome: HintOutcome


def render_hints(
    reader: FolderReader, metrics: Sequence[Mapping[str, Any]], decode: Decode | None
) -> str:
    """The body of the section; empty for a run without hints."""
    steps = reader.folder.trajectory_steps()
    hints = [
        StepHint(step=step, outcome=outcome) for step in steps for outcome in reader.hints(step)
    ]
    counts = render_reader_table(metrics)
    if not hints:
        return counts
    parts = [
        f'<p class="caption">{SHIFT} Counted in {pluralize(len(steps), "stored step")}.</p>',
        render_source_table([hint.outcome for hint in hints]),
        counts,
    ]
    groups = {
        "Largest shifts": largest_shifts(hints),
        "Hints that make their turn more likely": harmful_hints(hints),
        "Smallest shifts, dropped": smallest_shifts(hints),
    }
    stored = {
        step: reader.trajectories(step) for step in {h.step for g in groups.values() for h in g}
    }
    for title, group in groups.items():
        if group:
            cards = "".join(_render_card(hint, stored[hint.step], decode) for hint in group)
            parts.append(f"<h3>{title}</h3>{cards}")
    return "".join(parts)


def largest_shifts(hints: Iterable[StepHint]) -> list[StepHint]:
    """Of trained hints that make their turn less likely."""
    trained = [h for h in _measured(hints) if h.outcome.drop_reason is None and _shift(h) >= 0]
    return _unique_texts(sorted(trained, key=lambda hint: -_shift(hint)))[:NUM_LARGEST]


def harmful_hints(hints: Iterable[StepHint]) -> list[StepHint]:
    """The most negative shifts, of dropped and of trained hints."""
    harmful = [h for h in _measured(hints) if h.outcome.is_harmful]
    return _unique_texts(sorted(harmful, key=_shift))[:NUM_LARGEST]


def smallest_shifts(hints: Iterable[StepHint]) -> list[StepHint]:
    """Of hints that were dropped because they do too little, and no harm."""
    dropped = [h for h in _measured(hints) if h.outcome.drop_reason == "shift" and _shift(h) >= 0]
    return _unique_texts(sorted(dropped, key=_shift))[:NUM_SMALLEST]


def _measured(hints: Iterable[StepHint]) -> Iterator[StepHint]:
    return (h for h in hints if h.outcome.shift is not None and math.isfinite(h.outcome.shift))


def _shift(hint: StepHint) -> float:
    assert hint.outcome.shift is not None
    return hint.outcome.shift


def _unique_texts(hints: Iterable[StepHint]) -> list[StepHint]:
    """The first hint of each text: a rule repeats its text hundreds of times."""
    first: dict[str, StepHint] = {}
    for hint in hints:
        first.setdefault(hint.outcome.hint.text, hint)
    return list(first.values())


# ── tables ───────────────────────────────────────────────────────────────────────────────────────


def render_source_table(hints: Sequence[HintOutcome]) -> str:
    """By source: how many train, how many were dropped by reason, and their mean shift."""
    reasons = [r for r, _ in Counter(h.drop_reason for h in hints if h.drop_reason).most_common()]
    sources = [source for source, _ in Counter(h.hint.source for h in hints).most_common()]
    rows = [(source, [h for h in hints if h.hint.source == source], "") for source in sources]
    if len(sources) > 1:
        rows.append(("total", list(hints), ' class="total"'))
    lines = (
        f"<tr{css}><th>{escape(source)}</th><td>{len(group):,}</td>"
        f"<td>{sum(h.drop_reason is None for h in group):,}</td>"
        + "".join(f"<td>{sum(h.drop_reason == r for h in group):,}</td>" for r in reasons)
        + f"<td>{_format_mean_shift(group)}</td></tr>"
        for source, group, css in rows
    )
    heads = ["source", "hints", "trained on"]
    heads += [f"dropped: {readable_name(reason)}" for reason in reasons] + ["mean shift"]
    return render_table(heads, lines)


def render_reader_table(metrics: Sequence[Mapping[str, Any]]) -> str:
    """The reader's own counters, over all steps."""
    counts: Counter[str] = Counter()
    for row in metrics:
        for name, count in row.items():
            if name.startswith(READER) and count:
                counts[name.removeprefix(READER)] += count
    if not counts:
        return ""
    lines = (
        f"<tr><th>{escape(name)}</th><td>{counts[name]:,}</td></tr>" for name in sorted(counts)
    )
    body = render_table(["counter", f"in {pluralize(len(metrics), 'step')}"], lines)
    return f'<details class="whole"><summary>Counters of the reader</summary>{body}</details>'


def _format_mean_shift(hints: Sequence[HintOutcome]) -> str:
    shifts = [h.shift for h in hints if h.shift is not None and math.isfinite(h.shift)]
    return format_signed(sum(shifts) / len(shifts)) if shifts else "–"


# ── cards ────────────────────────────────────────────────────────────────────────────────────────


def _render_card(hint: StepHint, stored: Sequence[StoredTrajectory], decode: Decode | None) -> str:
    """The message before the turn, the hint, and the turn as it was sampled without the hint."""
    turn, reason = hint.outcome.hint.turn, hint.outcome.hint.reason
    item = next((s for s in stored if s.trajectory.id == hint.outcome.hint.trajectory), None)
    if item is None:  # the hints of this file can be read, its trajectories cannot
        return ""
    facts = [f"step {hint.step}", f"turn {turn}", *([reason] if reason else [])]
    conversation = Conversation.of(item, decode, hints=[hint.outcome])
    previous = (
        render_messages(item.trajectory.turns[turn - 1], item.trajectory, last=turn == 1)
        if turn
        else ""
    )
    return (
        f'<article class="sample"><header><span>{escape(" · ".join(facts))}</span></header>'
        f'<div class="turns">{previous}{conversation.render_turn(turn)}</div></article>'
    )
