"""A table of figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def render_table(heads: Sequence[str], rows: Iterable[str], kind: str = "figures") -> str:
    """`rows` are HTML, `<tr>` each; wide ones scroll sideways."""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    return (
        f'<div class="wide"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
