"""Answers for people to read: coloured by what the teacher thought, or before beside after."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import islice

from courtside.report.folder.parquet import StoredTrajectory
from courtside.report.metrics import is_multi_turn
from courtside.report.page.token_gaps import Decode, Gap, plain, token_gaps, words
from courtside.report.page.transcript import (
    Conversation,
    badge,
    counted,
    episode_facts,
    event_badge,
    teachers_context,
    transcript,
)
from courtside.report.summary import shorten, signed
from courtside.types import Evaluation, Message, Trajectory

FOLD_FROM = 240
"""Characters of a system message: longer ones, such as a list of tools, are folded away."""
NUM_LINES = 12
"""Turns of an episode beside another one."""


def coloured(stored: StoredTrajectory, decode: Decode | None) -> str:
    """One answer from training as a card."""
    trajectory = stored.trajectory
    facts = [
        f"step {stored.step}",
        f"written by the {trajectory.source}",
        *episode_facts(trajectory),
    ]
    if stored.teacher is not None:
        facts.append(f"teacher {stored.teacher}")
    facts.append(_mean([gap for turn in token_gaps(stored) for gap in turn if gap is not None]))
    turns = "".join(
        f'<div class="text {turn.role}">{words(turn, gaps, decode)}</div>'
        for turn, gaps in zip(trajectory.turns, token_gaps(stored), strict=True)
        if turn.role != "prompt"
    )
    return (
        f'<article class="sample"><header>{badge(trajectory.grade)}'
        f"<span>{escape(' · '.join(facts))}</span></header>"
        f"{_prompt(trajectory)}{teachers_context(stored)}{turns}</article>"
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


def telling(stored: Sequence[StoredTrajectory]) -> list[StoredTrajectory]:
    """Those with hints that train first, then those with other hints, then those with errors."""

    def rank(one: StoredTrajectory) -> tuple[bool, bool, bool]:
        trains = any(hint_outcomes.drop_reason is None for hint_outcomes in one.hints)
        wrong = any(turn.events for turn in one.trajectory.turns)
        return not trains, not one.hints, not wrong

    return sorted(stored, key=rank)


def _mean(gaps: Sequence[Gap]) -> str:
    if not gaps:
        return "not scored by a teacher"
    return f"mean gap {signed(sum(gap.nats for gap in gaps) / len(gaps))} nats"


def _prompt(trajectory: Trajectory) -> str:
    return f'<div class="prompt">{"".join(map(_message, trajectory.task.messages))}</div>'


def _message(message: Message) -> str:
    text = plain(message.content)
    if message.role == "system" and len(message.content) > FOLD_FROM:
        return (
            f'<details class="context"><summary>system: {escape(shorten(message.content, 80))}'
            f"</summary><pre>{text}</pre></details>"
        )
    return f'<div class="message"><b>{message.role}</b> {text}</div>'


def _answer(title: str, trajectory: Trajectory) -> str:
    facts = " · ".join([title, *episode_facts(trajectory)])
    if is_multi_turn(trajectory):
        whole = transcript(Conversation(trajectory=trajectory), prompt=False)
        body = (
            f'{_outline(trajectory)}<details class="whole"><summary>the whole episode</summary>'
            f"{whole}</details>"
        )
    else:
        body = f'<div class="text assistant">{plain(trajectory.response)}</div>'
    return (
        f"<div><header>{badge(trajectory.grade)}<span>{escape(facts)}</span></header>{body}</div>"
    )


def _outline(trajectory: Trajectory) -> str:
    """What the student said, a line a turn."""
    own = [turn for turn in trajectory.turns if turn.role == "assistant"]
    lines = "".join(
        f"<li>{''.join(map(event_badge, turn.events))}<code>{escape(shorten(turn.text, 120))}"
        "</code></li>"
        for turn in own[:NUM_LINES]
    )
    more = counted(len(own) - NUM_LINES, "more turn")
    rest = f'<p class="left-out">… {more}</p>' if len(own) > NUM_LINES else ""
    return f'<ol class="outline">{lines}</ol>{rest}'
