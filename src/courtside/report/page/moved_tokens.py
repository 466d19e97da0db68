"""The tokens of hinted turns whose probability the hint moved most, where they stand."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from courtside.report.folder.parquet import StoredTrajectory
from courtside.report.page.tables import table
from courtside.report.page.token_gaps import Decode, Gap, shade, shade_class, token_gaps
from courtside.report.summary import signed

NUM_TOKENS = 10
"""Of each step."""
PER_TURN = 3
"""So that one turn does not take all the room."""
CONTEXT = 44
"""Characters on each side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    before: str
    token: str
    behind: str
    gap: Gap
    hint: str


def moved_tokens(stored: Sequence[StoredTrajectory], decode: Decode) -> list[Moved]:
    """Of turns with a hint that trains: the largest gaps first, the same words only once."""
    found: dict[tuple[str, str, str], Moved] = {}
    for one in stored:
        gaps = token_gaps(one)
        hinted = {j.hint.turn: j.hint.text for j in one.hints if j.drop_reason is None}
        for turn, hint in hinted.items():
            scored = _large(one.trajectory.turns[turn].completion_mask, gaps[turn])
            largest = heapq.nlargest(PER_TURN, scored, key=lambda at: abs(at[1].nats))
            pieces = decode(one.trajectory.turns[turn].token_ids) if largest else []
            for place, gap in largest:
                before = _end("".join(pieces[:place]))
                behind = _begin("".join(pieces[place + 1 :]))
                moved = Moved(before=before, token=pieces[place], behind=behind, gap=gap, hint=hint)
                key = (before, moved.token, behind)
                if key not in found or abs(gap.nats) > abs(found[key].gap.nats):
                    found[key] = moved
    return heapq.nlargest(NUM_TOKENS, found.values(), key=lambda one: abs(one.gap.nats))


def moved_table(moved: Sequence[Moved]) -> str:
    rows = (
        f'<tr><td class="text" title="{escape(one.hint)}">{_shown(one.before)}'
        f'<span class="{shade_class(one.gap)} token">{_shown(one.token)}</span>'
        f"{_shown(one.behind)}</td>"
        f"<td>{_probability(one.gap.student)}</td><td>{_probability(one.gap.teacher)}</td>"
        f"<td>{signed(one.gap.nats)}</td></tr>"
        for one in moved
    )
    return table(["token", "student", "under the hint", "nats"], rows, "figures moved")


def _large(chosen: Sequence[bool], gaps: Sequence[Gap | None]) -> list[tuple[int, Gap]]:
    """Places in the turn with their gaps, those that would have a colour."""
    places = (place for place, is_chosen in enumerate(chosen) if is_chosen)
    return [
        (place, gap)
        for place, gap in zip(places, gaps, strict=True)
        if gap is not None and math.isfinite(gap.nats) and shade(gap.nats)
    ]


def _end(text: str) -> str:
    return text if len(text) <= CONTEXT else "…" + text[1 - CONTEXT :]


def _begin(text: str) -> str:
    return text if len(text) <= CONTEXT else text[: CONTEXT - 1] + "…"


def _shown(text: str) -> str:
    return escape(text.replace("\n", "↵"))


def _probability(logp: float) -> str:
    share = 100 * math.exp(min(logp, 0.0))
    return f"{share:.1f}%" if share >= 0.1 or logp == -math.inf else f"{share:.1g}%"
