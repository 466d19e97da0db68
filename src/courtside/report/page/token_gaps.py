"""Tokens colored by the gap between teacher and student.

A gap is a teacher's log-prob of a completion token minus the student's. A token that the
teacher did not score has no gap, which is not a gap of zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from courtside.report.folder.parquet import StoredTrajectory
from courtside.report.summary import format_signed
from courtside.types import Turn

Decode = Callable[[Sequence[int]], list[str]]
"""Token ids → the piece of text of each; joined, the pieces are the text."""

NATS_PER_SHADE = 0.75
NUM_SHADES = 5
"""Shade 1 starts at 0.375 nats, the darkest at 3.4: smaller gaps are noise, larger ones alike."""

MAX_TOKENS = 2000
"""Of one colored turn; each costs a hundred bytes of the page."""
MAX_CHARS = 8000
"""Of one plain text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGap:
    """Log-probabilities of one token."""

    teacher: float
    student: float

    @property
    def nats(self) -> float:
        return self.teacher - self.student

    @property
    def title(self) -> str:
        if not math.isfinite(self.nats):
            return f"teacher {self.teacher:g}, student {self.student:g}"
        gap = format_signed(self.nats)
        return f"teacher {self.teacher:.2f}, student {self.student:.2f}, gap {gap}"


TurnGaps = Sequence[TokenGap | None]


def compute_token_gaps(stored: StoredTrajectory) -> list[TurnGaps]:
    """By turn, one for each completion token; None where teacher or student did not score it."""
    teacher = iter(stored.teacher_logp_by_token)
    num_completion_tokens = stored.trajectory.num_completion_tokens
    student = iter(stored.student_logp or (math.nan,) * num_completion_tokens)
    is_unscored = stored.student_logp is None
    by_turn: list[TurnGaps] = []
    for turn in stored.trajectory.turns:
        pairs = [
            (next(teacher), next(student))
            for is_completion in turn.completion_mask
            if is_completion
        ]
        by_turn.append(
            [None if t is None or is_unscored else TokenGap(teacher=t, student=s) for t, s in pairs]
        )
    return by_turn


def shade(gap: float) -> int:
    """−5 … 5: positive where the teacher's probability is higher; 0: about equal.

    >>> [shade(gap) for gap in (0.1, 0.8, -0.8, -9.0)]
    [0, 1, -1, -5]
    """
    size = min(round(abs(gap) / NATS_PER_SHADE), NUM_SHADES)
    return size if gap > 0 else -size


def shade_class(gap: TokenGap) -> str:
    return _shade_name(shade(gap.nats)) if math.isfinite(gap.nats) else ""


def render_legend() -> str:
    shades = range(-NUM_SHADES, NUM_SHADES + 1)
    swatches = "".join(f'<i class="{_shade_name(number)}"></i>' for number in shades)
    return (
        f'<p class="legend">teacher probability lower {swatches} higher '
        f"than the student's ({NATS_PER_SHADE:g} nats a shade)</p>"
    )


def render_turn_text(
    turn: Turn, gaps: TurnGaps = (), decode: Decode | None = None, *, bad_spans: Sequence[str] = ()
) -> str:
    """A turn colored by its gaps, or its plain text without them; `bad_spans` are underlined."""
    if decode is None or not any(gaps):
        return render_text(turn.text, bad_spans)
    pieces = decode(turn.token_ids)
    assert len(pieces) == len(turn.token_ids), "decode returns a piece of text for each token"
    bad = _find_spans("".join(pieces), bad_spans)
    remaining_gaps = iter(gaps)
    parts, at = [], 0
    for number, (piece, is_completion) in enumerate(zip(pieces, turn.completion_mask, strict=True)):
        if number == MAX_TOKENS:
            parts.append(_omission(len(pieces) - number, "tokens"))
            break
        gap = next(remaining_gaps) if is_completion else None
        classes = [shade_class(gap)] if gap is not None else [] if is_completion else ["given"]
        if any(start < at + len(piece) and at < end for start, end in bad):
            classes.append("bad")
        title = "" if gap is None else f' title="{gap.title}"'
        # A line break has no width to color; the arrow stands for it.
        text = escape(piece if gap is None else piece.replace("\n", "↵\n"))
        parts.append(f'<span class="{" ".join(classes)}"{title}>{text}</span>')
        at += len(piece)
    return "".join(parts)


def render_text(text: str, bad_spans: Sequence[str] = ()) -> str:
    cut, more = text[:MAX_CHARS], len(text) - MAX_CHARS
    parts, at = [], 0
    for start, end in _find_spans(cut, bad_spans):
        marked = f'<span class="bad">{escape(cut[start:end])}</span>'
        parts += [escape(cut[at:start]), marked]
        at = end
    omission = _omission(more, "characters") if more > 0 else ""
    return f"{''.join(parts)}{escape(cut[at:])}{omission}"


def _find_spans(text: str, spans: Sequence[str]) -> list[tuple[int, int]]:
    """Start and end of each span's first occurrence, in order, overlapping ones merged."""
    occurrences = sorted((text.find(span), len(span)) for span in spans if span and span in text)
    merged: list[tuple[int, int]] = []
    for start, size in occurrences:
        if merged and start <= merged[-1][1]:
            first, end = merged.pop()
            merged.append((first, max(end, start + size)))
        else:
            merged.append((start, start + size))
    return merged


def _omission(number: int, what: str) -> str:
    return f'<span class="omitted">… {number:,} more {what}</span>'


def _shade_name(number: int) -> str:
    return f"{'more' if number > 0 else 'less'}{abs(number)}" if number else "same"
