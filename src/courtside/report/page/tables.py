"""Tables and numbers of the report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from courtside.report.evaluation_pairs import Difference
from courtside.report.summary import format_percent, format_points


def render_table(heads: Sequence[str], rows: Iterable[str], kind: str = "figures") -> str:
    """`rows` are HTML, `<tr>` each; wide ones scroll sideways."""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    return (
        f'<div class="wide"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def render_number(name: str, value: float, low: float, high: float) -> str:
    """A fraction with its interval, as a large number."""
    return (
        f'<div class="number"><span>{escape(name)}</span><b>{format_percent(value)}</b>'
        f"<small>{format_percent(low)} to {format_percent(high)}</small></div>"
    )


def render_interval(value: float, low: float, high: float) -> str:
    """A fraction with its interval, for a cell of a table."""
    interval = f"{format_percent(low)} to {format_percent(high)}"
    return f"<b>{format_percent(value)}</b> <small>{interval}</small>"


def render_difference(difference: Difference | None, *, rise_is_worse: bool = False) -> str:
    """Points with their interval, for a cell; marked where the change is for the worse."""
    if difference is None:
        return "–"
    mean, low, high, _ = difference
    interval = f"<small>{format_points(low)} to {format_points(high)}</small>"
    mark = ""
    if mean > 0 if rise_is_worse else mean < 0:
        is_clear = low > 0 if rise_is_worse else high < 0
        mark = render_mark("worse" if is_clear else "worse, within noise")
    return f"{mark}<b>{format_points(mean)}</b> {interval}"


def render_mark(text: str) -> str:
    return f'<span class="badge failed mark">{escape(text)}</span> '
