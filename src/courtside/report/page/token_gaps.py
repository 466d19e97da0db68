"""Tokens in the colours of what a teacher made of them.

A gap is a teacher's log-prob of a completion token minus the student's. Where the teacher gave
none there is no gap, which is not a gap of zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from courtside.report.folder.parquet import StoredTrajectory
from courtside.report.summary import signed
from courtside.types import Turn

Decode = Callable[[Sequence[int]], list[str]]
"""Token ids → the piece of text of each; joined, the pieces are the text."""

NATS_PER_SHADE = 0.75
NUM_SHADES = 5
"""Shade 1 starts at 0.375 nats, the darkest at 3.4: below is noise, above it is all the same."""

MAX_TOKENS = 2000
"""Of one turn, in colours; each costs a hundred bytes of the page."""
MAX_CHARS = 8000
"""Of one text without colours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """What both said of one token."""

    teacher: float
    student: float

    @property
    def nats(self) -> float:
        return self.teacher - self.student

    @property
    def title(self) -> str:
        if not math.isfinite(self.nats):
            return f"teacher {self.teacher:g}, student {self.student:g}"
        return f"teacher {self.teacher:.2f}, student {self.student:.2f}, gap {signed(self.nats)}"


Gaps = Sequence[Gap | None]


def token_gaps(stored: StoredTrajectory) -> list[Gaps]:
    """By turn: one for each of its completion tokens, None where teacher or student gave none."""
    teacher = iter(stored.teacher_logp_by_token)
    num_completion_tokens = stored.trajectory.num_completion_tokens
    student = iter(stored.student_logp or (math.nan,) * num_completion_tokens)
    silent = stored.student_logp is None
    by_turn: list[Gaps] = []
    for turn in stored.trajectory.turns:
        pairs = [(next(teacher), next(student)) for chosen in turn.completion_mask if chosen]
        by_turn.append(
            [None if t is None or silent else Gap(teacher=t, student=s) for t, s in pairs]
        )
    return by_turn


def shade(gap: float) -> int:
    """−5 … 5: how much more (positive) or less likely the teacher finds the token; 0 is as likely.

    >>> [shade(gap) for gap in (0.1, 0.8, -0.8, -9.0)]
    [0, 1, -1, -5]
    """
    size = min(round(abs(gap) / NATS_PER_SHADE), NUM_SHADES)
    return size if gap > 0 else -size


def shade_class(gap: Gap) -> str:
    return _class(shade(gap.nats)) if math.isfinite(gap.nats) else ""


def legend() -> str:
    shades = range(-NUM_SHADES, NUM_SHADES + 1)
    swatches = "".join(f'<i class="{_class(number)}"></i>' for number in shades)
    return (
        f'<p class="legend">the teacher finds the token less likely {swatches} more likely '
        f"than the student ({NATS_PER_SHADE:g} nats a shade)</p>"
    )


def words(
    turn: Turn, gaps: Gaps = (), decode: Decode | None = None, *, bad_spans: Sequence[str] = ()
) -> str:
    """A turn in colours where they are known, else its plain text; `bad_spans` underlined."""
    if decode is None or not any(gaps):
        return plain(turn.text, bad_spans)
    pieces = decode(turn.token_ids)
    assert len(pieces) == len(turn.token_ids), "decode gives one piece of text a token"
    bad = _places("".join(pieces), bad_spans)
    left = iter(gaps)
    parts, at = [], 0
    for number, (piece, chosen) in enumerate(zip(pieces, turn.completion_mask, strict=True)):
        if number == MAX_TOKENS:
            parts.append(_left_out(len(pieces) - number, "tokens"))
            break
        gap = next(left) if chosen else None
        classes = [shade_class(gap)] if gap is not None else [] if chosen else ["given"]
        if any(start < at + len(piece) and at < end for start, end in bad):
            classes.append("bad")
        title = "" if gap is None else f' title="{gap.title}"'
        # A coloured line break has no width to colour; the arrow shows it.
        text = escape(piece if gap is None else piece.replace("\n", "↵\n"))
        parts.append(f'<span class="{" ".join(classes)}"{title}>{text}</span>')
        at += len(piece)
    return "".join(parts)


def plain(text: str, bad_spans: Sequence[str] = ()) -> str:
    cut, more = text[:MAX_CHARS], len(text) - MAX_CHARS
    parts, at = [], 0
    for start, end in _places(cut, bad_spans):
        marked = f'<span class="bad">{escape(cut[start:end])}</span>'
        parts += [escape(cut[at:start]), marked]
        at = end
    rest = _left_out(more, "characters") if more > 0 else ""
    return f"{''.join(parts)}{escape(cut[at:])}{rest}"


def _places(text: str, spans: Sequence[str]) -> list[tuple[int, int]]:
    """Where the spans stand, each where it first does; in order, and apart from each other."""
    found = sorted((text.find(span), len(span)) for span in spans if span and span in text)
    apart: list[tuple[int, int]] = []
    for start, size in found:
        if apart and start <= apart[-1][1]:
            first, end = apart.pop()
            apart.append((first, max(end, start + size)))
        else:
            apart.append((start, start + size))
    return apart


def _left_out(number: int, what: str) -> str:
    return f'<span class="left-out">… {number:,} more {what}</span>'


def _class(number: int) -> str:
    return f"{'more' if number > 0 else 'less'}{abs(number)}" if number else "same"
