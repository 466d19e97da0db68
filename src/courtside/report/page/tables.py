"""Tables and numbers of the report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from courtside.report.summary import format_percent


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
