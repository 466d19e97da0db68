"""Error rates of evaluations in an environment, before and after training.

Such an evaluation has the metrics `error_rate` (fraction of assistant turns with any event) with
the ends of its 95% interval (`error_rate/low`, `error_rate/high`), `turns` per episode and
`events/KIND`. After training also `logp_drop/clean_turns` and `logp_drop/error_turns`.
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
LOGP_DROPS = {
    "logp_drop/clean_turns": "log-prob drop, clean turns",
    "logp_drop/error_turns": "turns with errors",
}


def error_rates(pairs: Mapping[str, Pair]) -> str:
    """Numbers of the first pair, a plot and tables of all; nothing without an environment.

    `pairs` is keyed by evaluated policy, e.g. `student` and `student:held_out`.
    """
    pairs = {policy: pair for policy, pair in pairs.items() if "error_rate" in pair[0].metrics}
    if not pairs:
        return ""
    before, after = next(iter(pairs.values()))
    numbers = _number("before", before)
    if after is not None:
        numbers += _number(f"after {after.step} steps", after)
    caption = (
        "Fraction of assistant turns for which the environment reported an error, with 95% "
        "intervals."
    )
    intervals = [
        interval
        for policy, pair in pairs.items()
        for interval in _intervals(pair, "" if len(pairs) == 1 else f"{_suite(policy)}, ")
    ]
    plot = interval_plot(intervals, title=caption) if intervals else ""
    return (
        f'<div class="numbers">{numbers}</div>{plot}<p class="caption">{caption}</p>'
        f"{_suites(pairs)}{_kinds(pairs)}"
    )


def _number(name: str, evaluation: Evaluation) -> str:
    return (
        f'<div class="number"><span>turns with an error, {escape(name)}</span>'
        f"<b>{percent(_metric(evaluation, 'error_rate'))}</b>"
        f"<small>{_ends(evaluation)}</small></div>"
    )


def _intervals(pair: Pair, prefix: str) -> list[Interval]:
    named = zip(("before", "after"), pair, strict=True)
    return [
        Interval(
            name=f"{prefix}{name}",
            value=_metric(one, "error_rate"),
            low=_metric(one, "error_rate/low"),
            high=_metric(one, "error_rate/high"),
            colour=colour,
        )
        for colour, (name, one) in enumerate(named)
        if one is not None
        and all(math.isfinite(_metric(one, f"error_rate{end}")) for end in ("", "/low", "/high"))
    ]


def _suite(policy: str) -> str:
    """`held out` of `student:held_out`."""
    return policy.partition(":")[2].replace("_", " ") or policy


def _suites(pairs: Mapping[str, Pair]) -> str:
    heads = ["evaluated", "tasks", "errors before", "errors after", "turns per episode"]
    drops = {
        name: title
        for name, title in LOGP_DROPS.items()
        if any(after is not None and name in after.metrics for _, after in pairs.values())
    }
    rows = (
        f"<tr><th>{escape(policy)}</th><td>{len(before.scores)} {before.split}</td>"
        f"<td>{_interval(before)}</td><td>{_interval(after)}</td>"
        f"<td>{_turns(before)} → {_turns(after)}</td>"
        f"{''.join(f'<td>{_nats(after, name)}</td>' for name in drops)}</tr>"
        for policy, (before, after) in pairs.items()
    )
    return table([*heads, *drops.values()], rows)


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
    heads += (
        ["fraction of turns"] if len(pairs) == 1 else [f"{policy}, of turns" for policy in pairs]
    )
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
    rate = percent(_metric(evaluation, "error_rate"))
    return f"<b>{rate}</b> <small>{_ends(evaluation)}</small>"


def _ends(evaluation: Evaluation) -> str:
    low, high = (_metric(evaluation, f"error_rate/{end}") for end in ("low", "high"))
    return f"{percent(low)} to {percent(high)}"


def _turns(evaluation: Evaluation | None) -> str:
    return compact(None if evaluation is None else evaluation.metrics.get("turns"))


def _metric(evaluation: Evaluation, name: str) -> float:
    return evaluation.metrics.get(name, math.nan)
