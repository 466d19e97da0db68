"""How often the student's turns went wrong in evaluations, before and after.

An evaluation in an environment has the metrics `errors` (share of assistant turns with any event),
`errors/low` and `errors/high` (ends of its 95% interval), `turns` (per episode) and, by kind,
`events/KIND`. After training perhaps `drift`, the KL per token from what the student wrote before,
in turns that were right then, and `drift/wrong` in the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape

from courtside.report.page.svg import Interval, interval_plot
from courtside.report.page.tables import table
from courtside.report.summary import compact, percent
from courtside.types import Evaluation

Pair = tuple[Evaluation, Evaluation | None]
"""The first and the last evaluation of the same tasks; None while there is only one."""

EVENTS = "events/"
DRIFTS = {"drift": "drift where right", "drift/wrong": "where wrong"}


def error_rates(pairs: Mapping[str, Pair]) -> str:
    """Numbers of the first pair, a plot and tables of all; nothing without an environment.

    By who was evaluated, e.g. `student` and `student:held_out`.
    """
    pairs = {who: pair for who, pair in pairs.items() if "errors" in pair[0].metrics}
    if not pairs:
        return ""
    before, after = next(iter(pairs.values()))
    numbers = _number("before", before)
    if after is not None:
        numbers += _number(f"after {after.step} steps", after)
    caption = (
        "Share of assistant turns in which the environment found something wrong, with 95% "
        "intervals."
    )
    intervals = [
        interval
        for who, pair in pairs.items()
        for interval in _intervals(pair, "" if len(pairs) == 1 else f"{_suite(who)}, ")
    ]
    plot = interval_plot(intervals, title=caption) if intervals else ""
    return (
        f'<div class="numbers">{numbers}</div>{plot}<p class="caption">{caption}</p>'
        f"{_suites(pairs)}{_kinds(pairs)}"
    )


def _number(name: str, evaluation: Evaluation) -> str:
    return (
        f'<div class="number"><span>turns with an error, {escape(name)}</span>'
        f"<b>{percent(_metric(evaluation, 'errors'))}</b><small>{_ends(evaluation)}</small></div>"
    )


def _intervals(pair: Pair, prefix: str) -> list[Interval]:
    named = zip(("before", "after"), pair, strict=True)
    return [
        Interval(
            name=f"{prefix}{name}",
            value=_metric(one, "errors"),
            low=_metric(one, "errors/low"),
            high=_metric(one, "errors/high"),
            colour=colour,
        )
        for colour, (name, one) in enumerate(named)
        if one is not None
        and all(math.isfinite(_metric(one, f"errors{end}")) for end in ("", "/low", "/high"))
    ]


def _suite(who: str) -> str:
    """`held out` of `student:held_out`."""
    return who.partition(":")[2].replace("_", " ") or who


def _suites(pairs: Mapping[str, Pair]) -> str:
    heads = ["evaluated", "tasks", "errors before", "errors after", "turns per episode"]
    drifts = {
        name: title
        for name, title in DRIFTS.items()
        if any(after is not None and name in after.metrics for _, after in pairs.values())
    }
    rows = (
        f"<tr><th>{escape(who)}</th><td>{len(before.scores)} {before.split}</td>"
        f"<td>{_interval(before)}</td><td>{_interval(after)}</td>"
        f"<td>{_turns(before)} → {_turns(after)}</td>"
        f"{''.join(f'<td>{_nats(after, name)}</td>' for name in drifts)}</tr>"
        for who, (before, after) in pairs.items()
    )
    return table([*heads, *drifts.values()], rows)


def _nats(evaluation: Evaluation | None, name: str) -> str:
    value = None if evaluation is None else evaluation.metrics.get(name)
    return "–" if value is None else f"{compact(value)} nats"


def _kinds(pairs: Mapping[str, Pair]) -> str:
    """Rows are kinds, the most frequent before training first."""
    evaluations = [one for pair in pairs.values() for one in pair if one is not None]
    kinds = {name for one in evaluations for name in one.metrics if name.startswith(EVENTS)}
    first = next(iter(pairs.values()))[0]
    order = sorted(kinds, key=lambda kind: (-first.metrics.get(kind, 0.0), kind))
    rows = [
        f"<tr><th>{escape(kind.removeprefix(EVENTS).replace('_', ' '))}</th>"
        f"{''.join(_kind(pair, kind) for pair in pairs.values())}</tr>"
        for kind in order
    ]
    heads = ["kind of error"]
    heads += ["share of turns"] if len(pairs) == 1 else [f"{who}, of turns" for who in pairs]
    return table(heads, rows) if rows else ""


def _kind(pair: Pair, kind: str) -> str:
    """A kind that an evaluation does not name did not occur in it."""
    before, after = pair
    then = None if after is None else after.metrics.get(kind, 0.0)
    return f"<td>{_change(before.metrics.get(kind, 0.0), then)}</td>"


def _change(before: float, after: float | None) -> str:
    return f"{percent(before)} → {'–' if after is None else percent(after)}"


def _interval(evaluation: Evaluation | None) -> str:
    if evaluation is None:
        return "–"
    rate = percent(_metric(evaluation, "errors"))
    return f"<b>{rate}</b> <small>{_ends(evaluation)}</small>"


def _ends(evaluation: Evaluation) -> str:
    low, high = (_metric(evaluation, f"errors/{end}") for end in ("low", "high"))
    return f"{percent(low)} to {percent(high)}"


def _turns(evaluation: Evaluation | None) -> str:
    return compact(None if evaluation is None else evaluation.metrics.get("turns"))


def _metric(evaluation: Evaluation, name: str) -> float:
    return evaluation.metrics.get(name, math.nan)
