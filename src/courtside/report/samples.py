"""Answers for people to read: coloured by what the teacher thought, or before beside after."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import islice

from courtside.report.parquet import StoredTrajectory
from courtside.types import Evaluation, Grade, Trajectory, Turn

Decode = Callable[[Sequence[int]], list[str]]
"""Token ids → the piece of text of each; joined, the pieces are the text."""

NATS_PER_SHADE = 0.75
NUM_SHADES = 5
"""Shade 1 starts at 0.375 nats, the darkest at 3.4: below is noise, above it is all the same."""


def shade(gap: float) -> int:
    """−5 … 5: how much more (positive) or less likely the teacher finds the token; 0 is as likely.

    >>> [shade(gap) for gap in (0.1, 0.8, -0.8, -9.0)]
    [0, 1, -1, -5]
    """
    size = min(round(abs(gap) / NATS_PER_SHADE), NUM_SHADES)
    return size if gap > 0 else -size


def legend() -> str:
    shades = range(-NUM_SHADES, NUM_SHADES + 1)
    swatches = "".join(f'<i class="{_shade_class(number)}"></i>' for number in shades)
    return (
        f'<p class="legend">the teacher finds the token less likely {swatches} more likely '
        f"than the student ({NATS_PER_SHADE:g} nats a shade)</p>"
    )


def coloured(stored: StoredTrajectory, decode: Decode | None) -> str:
    """One training trajectory as a card."""
    trajectory = stored.trajectory
    facts = [f"step {stored.step}", f"written by the {trajectory.source}", _stop(trajectory)]
    if stored.teacher is not None:
        facts.append(f"teacher {stored.teacher}")
    gaps = _gaps(stored)
    facts.append(
        f"mean gap {_signed(sum(gaps) / len(gaps))} nats" if gaps else "not scored by a teacher"
    )
    context = "" if stored.context is None else (
        f'<details class="context"><summary>what only the teacher saw</summary>'
        f"<pre>{escape(stored.context)}</pre></details>"
    )  # fmt: skip
    return (
        f'<article class="sample"><header>{_badge(trajectory.grade)}'
        f"<span>{escape(' · '.join(facts))}</span></header>"
        f"{_prompt(trajectory)}{context}{_turns(stored, decode)}</article>"
    )


def before_after(before: Evaluation, after: Evaluation, limit: int) -> list[str]:
    """Cards of tasks that both evaluations kept an answer of."""
    olds = {sample.task.id: sample for sample in reversed(before.samples)}
    news = {sample.task.id: sample for sample in reversed(after.samples)}
    shared = (task for task in dict.fromkeys(s.task.id for s in before.samples) if task in news)
    return [
        f'<article class="sample">{_prompt(olds[task])}<div class="pair">'
        f"{_answer('before', olds[task])}{_answer(f'after {after.step} steps', news[task])}"
        "</div></article>"
        for task in islice(shared, limit)
    ]


def choose(stored: Sequence[StoredTrajectory], limit: int) -> list[StoredTrajectory]:
    """The first of each task, so that samples of one prompt do not take all the room."""
    first: dict[str, StoredTrajectory] = {}
    for one in stored:
        first.setdefault(one.trajectory.task.id, one)
    return list(first.values())[:limit]


def _gaps(stored: StoredTrajectory) -> list[float]:
    if stored.student_logp is None or stored.teacher_logp is None:
        return []
    pairs = zip(stored.teacher_logp, stored.student_logp, strict=True)
    return [teacher - student for teacher, student in pairs]


def _turns(stored: StoredTrajectory, decode: Decode | None) -> str:
    spans = _spans(stored)
    parts = []
    for turn in stored.trajectory.turns:
        classes = [next(spans) for chosen in turn.chosen if chosen]
        if turn.role == "prompt":
            continue
        if decode is None or not any(title for _, title in classes):
            body = escape(turn.text)
        else:
            body = _tokens(turn, decode, iter(classes))
        parts.append(f'<div class="text {turn.role}">{body}</div>')
    return "".join(parts)


def _spans(stored: StoredTrajectory) -> Iterator[tuple[str, str]]:
    """Class and tooltip of each chosen token of the whole trajectory, in order."""
    if stored.student_logp is None or stored.teacher_logp is None:
        yield from [("", "")] * stored.trajectory.num_chosen
        return
    for teacher, student in zip(stored.teacher_logp, stored.student_logp, strict=True):
        gap = teacher - student
        if math.isfinite(gap):
            title = f"teacher {teacher:.2f}, student {student:.2f}, gap {_signed(gap)}"
            yield _shade_class(shade(gap)), title
        else:
            yield "", f"teacher {teacher:g}, student {student:g}"


def _tokens(turn: Turn, decode: Decode, classes: Iterator[tuple[str, str]]) -> str:
    pieces = decode(turn.token_ids)
    assert len(pieces) == len(turn.token_ids), "decode gives one piece of text a token"
    parts = []
    for piece, chosen in zip(pieces, turn.chosen, strict=True):
        if not chosen:
            parts.append(f'<span class="given">{escape(piece)}</span>')
            continue
        name, title = next(classes)
        # A coloured line break has no width to colour; the arrow shows it.
        text = escape(piece.replace("\n", "↵\n"))
        parts.append(f'<span class="{name}" title="{title}">{text}</span>')
    return "".join(parts)


def _shade_class(number: int) -> str:
    return f"{'more' if number > 0 else 'less'}{abs(number)}" if number else "same"


def _prompt(trajectory: Trajectory) -> str:
    messages = "".join(
        f'<div class="message"><b>{message.role}</b> {escape(message.content)}</div>'
        for message in trajectory.task.messages
    )
    return f'<div class="prompt">{messages}</div>'


def _answer(title: str, trajectory: Trajectory) -> str:
    return (
        f"<div><header>{_badge(trajectory.grade)}<span>{escape(title)} · {_stop(trajectory)}</span>"
        f'</header><div class="text assistant">{escape(trajectory.response)}</div></div>'
    )


def _badge(grade: Grade | None) -> str:
    if grade is None:
        return ""
    word = "passed" if grade.passed else "failed"
    title = escape(grade.feedback or f"score {grade.score:g}")
    return f'<span class="badge {word}" title="{title}">{word}</span>'


def _stop(trajectory: Trajectory) -> str:
    cut = " (cut off)" if trajectory.stop == "length" else ""
    return f"{trajectory.num_chosen} tokens{cut}"


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")
