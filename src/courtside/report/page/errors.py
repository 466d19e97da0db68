"""Error rates of evaluations in an environment, before and after training.

Such an evaluation has the metrics `error_rate` (fraction of assistant turns with any event) with
the ends of its 95% interval (`error_rate/low`, `error_rate/high`), `turns` per episode and
`events/KIND`, and `decisions/DECISION` where the environment tells decisions apart. After training
also `logp_drop/clean_turns`, `logp_drop/error_turns` and `collateral/…`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape

from courtside.report.evaluation_pairs import Differences, Pair
from courtside.report.page.svg import Interval, interval_plot
from courtside.report.page.tables import (
    render_difference,
    render_interval,
    render_mark,
    render_number,
    render_table,
)
from courtside.report.summary import format_number, format_percent
from courtside.types import Evaluation

EVENTS, DECISIONS, COLLATERAL = "events/", "decisions/", "collateral/"
LOGP_DROPS = {
    "logp_drop/clean_turns": "log-prob drop, clean turns",
    "logp_drop/error_turns": "turns with errors",
}


def render_error_rates(pairs: Mapping[str, Pair], differences: Differences) -> str:
    """Numbers of the first pair, a plot and tables of all; empty without an environment.

    `pairs` is keyed by evaluated policy, e.g. `student` and `student:held_out`.
    """
    pairs = {policy: pair for policy, pair in pairs.items() if "error_rate" in pair[0].metrics}
    if not pairs:
        return ""
    before, after = next(iter(pairs.values()))
    numbers = render_number("turns with an error, before", *_error_rate(before))
    if after is not None:
        name = f"turns with an error, after {after.step} steps"
        numbers += render_number(name, *_error_rate(after))
    caption = (
        "Fraction of assistant turns for which the environment reported an error, with 95% "
        "intervals."
    )
    intervals = [
        interval
        for policy, pair in pairs.items()
        for interval in _intervals(pair, "" if len(pairs) == 1 else f"{_suite_name(policy)}, ")
    ]
    plot = interval_plot(intervals, title=caption) if intervals else ""
    return (
        f'<div class="numbers">{numbers}</div>{plot}<p class="caption">{caption}</p>'
        f"{_render_suites(pairs, differences)}{_render_kinds(pairs)}{_render_decisions(pairs)}"
    )


def _intervals(pair: Pair, prefix: str) -> list[Interval]:
    rates = [None if evaluation is None else _error_rate(evaluation) for evaluation in pair]
    return [
        Interval(name=f"{prefix}{name}", value=rate[0], low=rate[1], high=rate[2], color=color)
        for color, (name, rate) in enumerate(zip(("before", "after"), rates, strict=True))
        if rate is not None and all(map(math.isfinite, rate))
    ]


def _suite_name(policy: str) -> str:
    """`held out` of `student:held_out`."""
    return policy.partition(":")[2].replace("_", " ") or policy


def _render_suites(pairs: Mapping[str, Pair], differences: Differences) -> str:
    heads = ["policy", "tasks", "errors before", "errors after", "difference, points"]
    heads.append("turns per episode")
    drops = {
        name: title
        for name, title in LOGP_DROPS.items()
        if any(after is not None and name in after.metrics for _, after in pairs.values())
    }
    rows = (
        f"<tr><th>{escape(policy)}</th><td>{len(before.scores)} {before.split}</td>"
        f"<td>{_render_rate(before)}</td><td>{_render_rate(after)}</td>"
        f"<td>{_render_change(policy, (before, after), differences)}</td>"
        f"<td>{_format_turns(before)} → {_format_turns(after)}</td>"
        f"{''.join(f'<td>{_format_drop(after, name)}</td>' for name in drops)}</tr>"
        for policy, (before, after) in pairs.items()
    )
    return render_table([*heads, *drops.values()], rows)


def _render_change(policy: str, pair: Pair, differences: Differences) -> str:
    """The paired difference; without one, only whether errors became more frequent."""
    difference = differences.get((policy, "error_rate"))
    before, after = pair
    if difference is None and after is not None and _error_rate(after) > _error_rate(before):
        return render_mark("worse")
    return render_difference(difference, rise_is_worse=True)


def _format_drop(evaluation: Evaluation | None, name: str) -> str:
    value = None if evaluation is None else evaluation.metrics.get(name)
    return "–" if value is None else f"{format_number(value)} nats"


def _render_kinds(pairs: Mapping[str, Pair]) -> str:
    """Rows are kinds, the most frequent before training first."""
    evaluations = [
        evaluation for pair in pairs.values() for evaluation in pair if evaluation is not None
    ]
    kinds = {
        name for evaluation in evaluations for name in evaluation.metrics if name.startswith(EVENTS)
    }
    first = next(iter(pairs.values()))[0]
    order = sorted(kinds, key=lambda kind: (-first.metrics.get(kind, 0.0), kind))
    rows = [
        f"<tr><th>{escape(kind.removeprefix(EVENTS).replace('_', ' '))}</th>"
        f"{''.join(_render_kind(pair, kind) for pair in pairs.values())}</tr>"
        for kind in order
    ]
    heads = ["kind of error"]
    heads += (
        ["fraction of turns"] if len(pairs) == 1 else [f"{policy}, of turns" for policy in pairs]
    )
    return render_table(heads, rows) if rows else ""


def _render_decisions(pairs: Mapping[str, Pair]) -> str:
    """Errors by what a turn had to decide, and what training changed there."""
    names = sorted({
        name.removeprefix(prefix)
        for pair in pairs.values()
        for evaluation in pair
        if evaluation is not None
        for name in evaluation.metrics
        for prefix in (DECISIONS, COLLATERAL)
        if name.startswith(prefix)
    })  # fmt: skip
    last_evaluations = [after for _, after in pairs.values() if after is not None]
    has_kl = any(name.startswith(COLLATERAL) for e in last_evaluations for name in e.metrics)
    rows = []
    for name in names:
        cells = [_format_decision(pair, f"{DECISIONS}{name}") for pair in pairs.values()]
        if has_kl:  # of the first policy: suites have none
            cells.append(_format_drop(last_evaluations[0], f"{COLLATERAL}{name}"))
        rows.append(f"<tr><th>{escape(name)}</th>{''.join(f'<td>{c}</td>' for c in cells)}</tr>")
    heads = ["decision", *(f"{policy}, turns with an error" for policy in pairs)]
    return render_table([*heads, *(["KL(before‖after) a token"] * has_kl)], rows) if rows else ""


def _format_decision(pair: Pair, name: str) -> str:
    """A decision that an evaluation lacks was not made in it."""
    before, after = (None if e is None else e.metrics.get(name) for e in pair)
    return "–" if before is None else _format_change(before, after)


def _render_kind(pair: Pair, kind: str) -> str:
    """A kind that an evaluation lacks did not occur in it."""
    before, after = pair
    rate_after = None if after is None else after.metrics.get(kind, 0.0)
    return f"<td>{_format_change(before.metrics.get(kind, 0.0), rate_after)}</td>"


def _format_change(before: float, after: float | None) -> str:
    is_worse = after is not None and after > before
    mark = render_mark("new" if not before else "worse") if is_worse else ""
    return f"{mark}{format_percent(before)} → {'–' if after is None else format_percent(after)}"


def _render_rate(evaluation: Evaluation | None) -> str:
    return "–" if evaluation is None else render_interval(*_error_rate(evaluation))


def _error_rate(evaluation: Evaluation) -> tuple[float, float, float]:
    """With the ends of its interval."""
    keys = ("error_rate", "error_rate/low", "error_rate/high")
    value, low, high = (evaluation.metrics.get(key, math.nan) for key in keys)
    return value, low, high


def _format_turns(evaluation: Evaluation | None) -> str:
    return format_number(None if evaluation is None else evaluation.metrics.get("turns"))
