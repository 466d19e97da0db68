"""A conversation turn by turn, with the environment's errors and the hints before each turn."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from courtside.report.folder.parquet import StoredTrajectory
from courtside.report.metrics import is_multi_turn
from courtside.report.page.token_gaps import (
    Decode,
    TurnGaps,
    compute_token_gaps,
    render_text,
    render_turn_text,
)
from courtside.report.summary import format_number, format_signed, shorten
from courtside.types import Event, Grade, HintOutcome, Message, Trajectory, Turn

MAX_TURNS = 40
"""Of a longer conversation: the first and last turns, and those around errors and hints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A trajectory with token gaps and hints by turn."""

    trajectory: Trajectory
    gaps: Sequence[TurnGaps] = ()
    hints: Mapping[int, Sequence[HintOutcome]] = field(default_factory=dict)
    decode: Decode | None = None

    @classmethod
    def of(
        cls,
        stored: StoredTrajectory,
        decode: Decode | None,
        *,
        hints: Iterable[HintOutcome] | None = None,
    ) -> Conversation:
        """`hints`: those to show; None: all."""
        by_turn: dict[int, list[HintOutcome]] = {}
        for outcome in stored.hints if hints is None else hints:
            by_turn.setdefault(outcome.hint.turn, []).append(outcome)
        gaps = compute_token_gaps(stored)
        return cls(trajectory=stored.trajectory, gaps=gaps, hints=by_turn, decode=decode)

    def render_turn(self, number: int) -> str:
        """One turn, with its hints first."""
        turn = self.trajectory.turns[number]
        if turn.role != "assistant":
            return render_messages(turn, self.trajectory)
        hints = self.hints.get(number, ())
        gaps = self.gaps[number] if self.gaps else ()
        spans = [outcome.hint.bad_span for outcome in hints if outcome.hint.bad_span]
        body = render_turn_text(turn, gaps, self.decode, bad_spans=spans)
        return "".join(map(render_hint, hints)) + _render_entry(
            self.trajectory.author_of(number), "assistant", body,
            "".join(map(render_event, turn.events)),
        )  # fmt: skip


def render_episode(
    stored: StoredTrajectory, decode: Decode | None, *, is_open: bool = False
) -> str:
    """A trajectory of several turns, or with hints, as a collapsible card."""
    trajectory = stored.trajectory
    num_trained = sum(outcome.drop_reason is None for outcome in stored.hints)
    facts = [f"step {stored.step}", *describe_episode(trajectory)]
    if stored.hints:
        facts.append(f"{pluralize(len(stored.hints), 'hint')}, {num_trained} trained on")
    messages = trajectory.task.messages
    prompt = messages[-1].content if messages else trajectory.task.id
    return (
        f'<details class="sample episode"{" open" if is_open else ""}>'
        f"<summary>{render_grade(trajectory.grade)}<b>{escape(shorten(prompt, 90))}</b>"
        f"<span>{escape(' · '.join(facts))}</span></summary>{render_teacher_context(stored)}"
        f"{render_transcript(Conversation.of(stored, decode))}</details>"
    )


def render_teacher_context(stored: StoredTrajectory) -> str:
    """The teacher's privileged context; empty where it is hints, which precede their turns."""
    if stored.context is None or stored.hints:
        return ""
    return (
        '<details class="context"><summary>teacher-only context</summary>'
        f"<pre>{render_text(stored.context)}</pre></details>"
    )


def render_transcript(conversation: Conversation, *, with_prompt: bool = True) -> str:
    """All turns, or the most informative of very many."""
    turns = conversation.trajectory.turns
    selected = [
        number
        for number in select_turns(conversation)
        if with_prompt or turns[number].role != "prompt"
    ]
    parts, due = [], selected[0] if selected else 0
    for number in selected:
        if number > due:
            parts.append(f'<p class="omitted">{pluralize(number - due, "turn")} omitted</p>')
        parts.append(conversation.render_turn(number))
        due = number + 1
    return f'<div class="turns">{"".join(parts)}</div>'


def select_turns(conversation: Conversation) -> list[int]:
    turns = conversation.trajectory.turns
    if len(turns) <= MAX_TURNS:
        return list(range(len(turns)))
    ends = {0, 1, 2, len(turns) - 2, len(turns) - 1}
    marked = [n for n, turn in enumerate(turns) if turn.events or n in conversation.hints]
    around = [m for n in marked for m in (n, n - 1, n + 1) if 0 <= m < len(turns)]
    selected = [*ends, *dict.fromkeys(m for m in around if m not in ends)]
    return sorted(selected[:MAX_TURNS])


# ── entries ──────────────────────────────────────────────────────────────────────────────────────


def render_messages(turn: Turn, trajectory: Trajectory, *, last: bool = False) -> str:
    """The prompt's or the environment's messages; `last`: only the last one."""
    messages = turn.messages or (trajectory.task.messages if turn.role == "prompt" else ())
    if not messages:
        return _render_entry(turn.role, turn.role, render_text(turn.text))
    return "".join(map(_render_message, messages[-1:] if last else messages))


def render_hint(outcome: HintOutcome) -> str:
    hint = outcome.hint
    facts = [hint.source]
    if outcome.shift is not None:
        facts.append(f"shift {format_nats(outcome.shift)}")
    if outcome.bad_span_shift is not None:
        facts.append(f"shift of the underlined span {format_nats(outcome.bad_span_shift)}")
    if outcome.pass_rate is not None:
        facts.append(f"{outcome.pass_rate:.0%} of replies with the hint pass")
    if hint.confidence is not None:
        facts.append(f"confidence {hint.confidence:g}")
    if outcome.drop_reason is not None:
        facts.append(f"dropped: {outcome.drop_reason}")
    css = "hint" if outcome.drop_reason is None else "hint dropped"
    details = f"<small>{escape(' · '.join(facts))}</small>"
    return _render_entry("hint", css, render_text(hint.text), details)


def render_event(event: Event) -> str:
    message = event.detail("message")
    title = f' title="{escape(shorten(message, 300))}"' if message else ""
    return f'<span class="badge failed"{title}>{escape(readable_name(event.kind))}</span>'


def _render_message(message: Message) -> str:
    return _render_entry(message.role, f"given {message.role}", render_text(message.content))


def _render_entry(name: str, css: str, body: str, details: str = "") -> str:
    facts = f'<div class="facts-line">{details}</div>' if details else ""
    return (
        f'<div class="entry {css}"><b>{escape(name)}</b>'
        f'<div>{facts}<div class="text">{body}</div></div></div>'
    )


# ── labels ───────────────────────────────────────────────────────────────────────────────────────


def render_grade(grade: Grade | None) -> str:
    if grade is None:
        return ""
    label = "passed" if grade.passed else "failed"
    title = escape(grade.feedback or f"score {grade.score:g}")
    return f'<span class="badge {label}" title="{title}">{label}</span>'


def describe_episode(trajectory: Trajectory) -> list[str]:
    """`["5 turns", "2 with errors", "81 tokens (truncated)"]`; of a single turn only the tokens.

    Then tokens that the teacher replaced, and rewards by name, where there are any.
    """
    reasons = {
        "length": " (truncated)",
        "time": " (out of time)",
        "turns": " (out of turns)",
        "fault": " (fault of the environment)",
    }
    num_tokens = pluralize(trajectory.num_completion_tokens, "token")
    tokens = f"{num_tokens}{reasons.get(trajectory.stop, '')}"
    facts = [tokens]
    if trajectory.num_replaced is not None:
        facts.append(f"{trajectory.num_replaced:,} replaced by the teacher")
    if trajectory.rewards:
        facts.append(f"rewards: {describe_rewards(trajectory.rewards)}")
    if not is_multi_turn(trajectory):
        return facts
    turns = [turn for turn in trajectory.turns if turn.role == "assistant"]
    num_errors = sum(bool(turn.events) for turn in turns)
    errors = [f"{num_errors} with errors"] if num_errors else []
    return [pluralize(len(turns), "turn"), *errors, *facts]


def describe_rewards(rewards: Mapping[str, float | None]) -> str:
    """
    >>> describe_rewards({"grade": 1.0, "length": -0.25, "style": None})
    'grade 1, length −0.25, style not computed'
    """
    return ", ".join(
        f"{name} {'not computed' if value is None else format_number(value).replace('-', '−')}"
        for name, value in rewards.items()
    )


def pluralize(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def readable_name(name: str) -> str:
    return name.replace("_", " ")


def format_nats(shift: float) -> str:
    return f"{format_signed(shift)} nats" if math.isfinite(shift) else f"{shift:g} nats"
