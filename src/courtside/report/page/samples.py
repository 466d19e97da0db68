"""Sampled answers, colored by the teacher's token gaps or plain."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from courtside.report.folder.parquet import StoredTrajectory
from courtside.report.metrics import is_multi_turn
from courtside.report.page.token_gaps import (
    Decode,
    TokenGap,
    compute_token_gaps,
    render_text,
    render_turn_text,
)
from courtside.report.page.transcript import (
    Conversation,
    describe_episode,
    pluralize,
    render_event,
    render_grade,
    render_teacher_context,
    render_transcript,
)
from courtside.report.summary import format_signed, shorten
from courtside.types import Message, Trajectory

MAX_SYSTEM_CHARS = 240
"""Longer system messages, such as a list of tools, are collapsed."""
MAX_OUTLINE_TURNS = 12


def render_scored_answer(stored: StoredTrajectory, decode: Decode | None) -> str:
    """One answer from training as a card."""
    trajectory, gaps = stored.trajectory, compute_token_gaps(stored)
    facts = [f"step {stored.step}", f"source: {trajectory.source}", *describe_episode(trajectory)]
    if trajectory.draft is not None:
        facts.append(f"{trajectory.correction} of {trajectory.draft}")
    if stored.teacher is not None:
        facts.append(f"teacher {stored.teacher}")
    facts.append(_format_mean_gap([gap for turn in gaps for gap in turn if gap is not None]))
    turns = "".join(
        f'<div class="text {turn.role}">{render_turn_text(turn, turn_gaps, decode)}</div>'
        for turn, turn_gaps in zip(trajectory.turns, gaps, strict=True)
        if turn.role != "prompt"
    )
    return (
        f'<article class="sample"><header>{render_grade(trajectory.grade)}'
        f"<span>{escape(' · '.join(facts))}</span></header>"
        f"{render_prompt(trajectory)}{render_teacher_context(stored)}{turns}</article>"
    )


def first_per_task(stored: Sequence[StoredTrajectory], limit: int) -> list[StoredTrajectory]:
    """The first of each task, so that samples of one prompt do not fill the section."""
    first: dict[str, StoredTrajectory] = {}
    for item in stored:
        first.setdefault(item.trajectory.task.id, item)
    return list(first.values())[:limit]


def informative_first(stored: Sequence[StoredTrajectory]) -> list[StoredTrajectory]:
    """Those with trained hints first, then those with other hints, then those with errors."""

    def rank(item: StoredTrajectory) -> tuple[bool, bool, bool]:
        has_trained_hint = any(outcome.drop_reason is None for outcome in item.hints)
        has_errors = any(turn.events for turn in item.trajectory.turns)
        return not has_trained_hint, not item.hints, not has_errors

    return sorted(stored, key=rank)


def _format_mean_gap(gaps: Sequence[TokenGap]) -> str:
    if not gaps:
        return "not scored by a teacher"
    return f"mean gap {format_signed(sum(gap.nats for gap in gaps) / len(gaps))} nats"


def render_prompt(trajectory: Trajectory) -> str:
    return f'<div class="prompt">{"".join(map(_render_message, trajectory.task.messages))}</div>'


def _render_message(message: Message) -> str:
    text = render_text(message.content)
    if message.role == "system" and len(message.content) > MAX_SYSTEM_CHARS:
        return (
            f'<details class="context"><summary>system: {escape(shorten(message.content, 80))}'
            f"</summary><pre>{text}</pre></details>"
        )
    return f'<div class="message"><b>{message.role}</b> {text}</div>'


def render_answer(title: str, trajectory: Trajectory) -> str:
    facts = escape(" · ".join([title, *describe_episode(trajectory)]))
    if is_multi_turn(trajectory):
        turns = render_transcript(Conversation(trajectory=trajectory), with_prompt=False)
        body = (
            f"{_render_outline(trajectory)}"
            f'<details class="whole"><summary>the whole episode</summary>{turns}</details>'
        )
    else:
        body = f'<div class="text assistant">{render_text(trajectory.response)}</div>'
    header = f"<header>{render_grade(trajectory.grade)}<span>{facts}</span></header>"
    return f"<div>{header}{body}</div>"


def _render_outline(trajectory: Trajectory) -> str:
    """A line for each assistant turn."""
    turns = [turn for turn in trajectory.turns if turn.role == "assistant"]
    lines = "".join(
        f"<li>{''.join(map(render_event, turn.events))}<code>{escape(shorten(turn.text, 120))}"
        "</code></li>"
        for turn in turns[:MAX_OUTLINE_TURNS]
    )
    num_omitted = len(turns) - MAX_OUTLINE_TURNS
    more = f'<p class="omitted">… {pluralize(num_omitted, "more turn")}</p>'
    return f'<ol class="outline">{lines}</ol>{more if num_omitted > 0 else ""}'
