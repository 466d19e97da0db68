"""The tokens of hinted turns whose probability the hint changed most, in their context."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from courtside.report.folder.parquet import StoredTrajectory
from courtside.report.page.tables import render_table
from courtside.report.page.token_gaps import (
    Decode,
    TokenGap,
    compute_token_gaps,
    shade,
    shade_class,
)
from courtside.report.summary import format_signed

NUM_TOKENS = 10
"""Of each step."""
PER_TURN = 3
"""So that a single turn does not fill the table."""
CONTEXT = 44
"""Characters on each side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShiftedToken:
    before: str
    token: str
    after: str
    gap: TokenGap
    hint: str


def find_shifted_tokens(stored: Sequence[StoredTrajectory], decode: Decode) -> list[ShiftedToken]:
    """Of turns with a trained hint that does no harm: the largest gaps first, each text once."""
    tokens: dict[tuple[str, str, str], ShiftedToken] = {}
    for item in stored:
        gaps = compute_token_gaps(item)
        helpful = {
            h.hint.turn: h.hint.text
            for h in item.hints
            if h.drop_reason is None and not h.is_harmful
        }
        for turn, hint in helpful.items():
            colored = _colored_gaps(item.trajectory.turns[turn].completion_mask, gaps[turn])
            largest = heapq.nlargest(PER_TURN, colored, key=lambda pair: abs(pair[1].nats))
            pieces = decode(item.trajectory.turns[turn].token_ids) if largest else []
            for index, gap in largest:
                before = _tail("".join(pieces[:index]))
                after = _head("".join(pieces[index + 1 :]))
                key = (before, pieces[index], after)
                if key not in tokens or abs(gap.nats) > abs(tokens[key].gap.nats):
                    tokens[key] = ShiftedToken(
                        before=before, token=pieces[index], after=after, gap=gap, hint=hint
                    )
    return heapq.nlargest(NUM_TOKENS, tokens.values(), key=lambda token: abs(token.gap.nats))


def render_shifted_tokens(tokens: Sequence[ShiftedToken]) -> str:
    rows = (
        f'<tr><td class="text" title="{escape(token.hint)}">{_escape_line(token.before)}'
        f'<span class="{shade_class(token.gap)} token">{_escape_line(token.token)}</span>'
        f"{_escape_line(token.after)}</td>"
        f"<td>{_format_probability(token.gap.student)}</td>"
        f"<td>{_format_probability(token.gap.teacher)}</td>"
        f"<td>{format_signed(token.gap.nats)}</td></tr>"
        for token in tokens
    )
    return render_table(["token", "student", "with the hint", "nats"], rows, "figures shifted")


def _colored_gaps(
    mask: Sequence[bool], gaps: Sequence[TokenGap | None]
) -> list[tuple[int, TokenGap]]:
    """Indices in the turn with their gaps, those large enough for a color."""
    indices = (index for index, is_completion in enumerate(mask) if is_completion)
    return [
        (index, gap)
        for index, gap in zip(indices, gaps, strict=True)
        if gap is not None and math.isfinite(gap.nats) and shade(gap.nats)
    ]


def _tail(text: str) -> str:
    return text if len(text) <= CONTEXT else "…" + text[1 - CONTEXT :]


def _head(text: str) -> str:
    return text if len(text) <= CONTEXT else text[: CONTEXT - 1] + "…"


def _escape_line(text: str) -> str:
    return escape(text.replace("\n", "↵"))


def _format_probability(logp: float) -> str:
    percent = 100 * math.exp(min(logp, 0.0))
    return f"{percent:.1f}%" if percent >= 0.1 or logp == -math.inf else f"{percent:.1g}%"
