"""A conversation as it went: who said what, what was wrong with it, and the hints above it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from courtside.report.folder.parquet import StoredTrajectory
from courtside.report.metrics import is_multi_turn
from courtside.report.page.token_gaps import Decode, Gaps, plain, token_gaps, words
from courtside.report.summary import shorten, signed
from courtside.types import Event, Grade, HintOutcome, Message, Trajectory, Turn

MAX_TURNS = 40
"""Of a longer conversation: the first and last ones, and those around errors and hints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A trajectory with what is known of it."""

    trajectory: Trajectory
    gaps: Sequence[Gaps] = ()
    """By turn."""
    hints: Mapping[int, Sequence[HintOutcome]] = field(default_factory=dict)
    """By turn."""
    decode: Decode | None = None

    @classmethod
    def of(cls, stored: StoredTrajectory, decode: Decode | None) -> Conversation:
        hints: dict[int, list[HintOutcome]] = {}
        for hint_outcomes in stored.hints:
            hints.setdefault(hint_outcomes.hint.turn, []).append(hint_outcomes)
        return cls(
            trajectory=stored.trajectory, gaps=token_gaps(stored), hints=hints, decode=decode
        )

    def said(self, number: int) -> str:
        """One turn, with the hints above it."""
        turn = self.trajectory.turns[number]
        if turn.role != "assistant":
            return said_to(turn, self.trajectory)
        hints = self.hints.get(number, ())
        gaps = self.gaps[number] if self.gaps else ()
        spans = [
            hint_outcomes.hint.bad_span for hint_outcomes in hints if hint_outcomes.hint.bad_span
        ]
        body = words(turn, gaps, self.decode, bad_spans=spans)
        above = "".join(hint_line(hint_outcomes) for hint_outcomes in hints)
        return above + _line(
            self.trajectory.source, "assistant", body, "".join(map(event_badge, turn.events))
        )


def episode(stored: StoredTrajectory, decode: Decode | None, *, unfolded: bool = False) -> str:
    """A trajectory of several turns, or with hints, to unfold."""
    conversation = Conversation.of(stored, decode)
    trajectory = stored.trajectory
    kept = sum(hint_outcomes.drop_reason is None for hint_outcomes in stored.hints)
    facts = [f"step {stored.step}", *episode_facts(trajectory)]
    if stored.hints:
        facts.append(f"{counted(len(stored.hints), 'hint')}, {kept} trained on")
    asked = trajectory.task.messages[-1].content if trajectory.task.messages else trajectory.task.id
    return (
        f'<details class="sample episode"{" open" if unfolded else ""}>'
        f"<summary>{badge(trajectory.grade)}<b>{escape(shorten(asked, 90))}</b>"
        f"<span>{escape(' · '.join(facts))}</span></summary>{teachers_context(stored)}"
        f"{transcript(conversation)}</details>"
    )


def teachers_context(stored: StoredTrajectory) -> str:
    """What only the teacher saw; nothing where that was hints, which are shown in their places."""
    if stored.context is None or stored.hints:
        return ""
    return (
        '<details class="context"><summary>what only the teacher saw</summary>'
        f"<pre>{plain(stored.context)}</pre></details>"
    )


def transcript(conversation: Conversation, *, prompt: bool = True) -> str:
    """All turns, or the telling ones of very many."""
    turns = conversation.trajectory.turns
    shown = [
        number for number in shown_turns(conversation) if prompt or turns[number].role != "prompt"
    ]
    parts, due = [], shown[0] if shown else 0
    for number in shown:
        if number > due:
            parts.append(f'<p class="left-out">{counted(number - due, "turn")} left out</p>')
        parts.append(conversation.said(number))
        due = number + 1
    return f'<div class="turns">{"".join(parts)}</div>'


def shown_turns(conversation: Conversation) -> list[int]:
    turns = conversation.trajectory.turns
    if len(turns) <= MAX_TURNS:
        return list(range(len(turns)))
    ends = {0, 1, 2, len(turns) - 2, len(turns) - 1}
    telling = [n for n, turn in enumerate(turns) if turn.events or n in conversation.hints]
    around = [m for n in telling for m in (n, n - 1, n + 1) if 0 <= m < len(turns)]
    shown = [*ends, *dict.fromkeys(m for m in around if m not in ends)]
    return sorted(shown[:MAX_TURNS])


# ── lines ────────────────────────────────────────────────────────────────────────────────────────


def said_to(turn: Turn, trajectory: Trajectory, *, last: bool = False) -> str:
    """What was said to the student; only the last message, if so asked."""
    messages = turn.messages or (trajectory.task.messages if turn.role == "prompt" else ())
    if not messages:
        return _line(turn.role, turn.role, plain(turn.text))
    return "".join(map(_message, messages[-1:] if last else messages))


def hint_line(hint_outcomes: HintOutcome) -> str:
    hint = hint_outcomes.hint
    facts = [hint.source]
    if hint_outcomes.shift is not None:
        facts.append(f"shift {nats(hint_outcomes.shift)}")
    if hint_outcomes.bad_span_shift is not None:
        facts.append(f"of the underlined words {nats(hint_outcomes.bad_span_shift)}")
    if hint_outcomes.pass_rate is not None:
        facts.append(f"{hint_outcomes.pass_rate:.0%} of replies under it pass")
    if hint.confidence is not None:
        facts.append(f"confidence {hint.confidence:g}")
    if hint_outcomes.drop_reason is not None:
        facts.append(f"dropped: {hint_outcomes.drop_reason}")
    kind = "hint" if hint_outcomes.drop_reason is None else "hint dropped"
    return _line("hint", kind, plain(hint.text), f"<small>{escape(' · '.join(facts))}</small>")


def event_badge(event: Event) -> str:
    told = event.details.get("message", "")
    title = f' title="{escape(shorten(told, 300))}"' if told else ""
    return f'<span class="badge failed"{title}>{escape(spoken(event.kind))}</span>'


def _message(message: Message) -> str:
    return _line(message.role, f"given {message.role}", plain(message.content))


def _line(name: str, kind: str, body: str, facts: str = "") -> str:
    beside = f'<div class="facts-line">{facts}</div>' if facts else ""
    return (
        f'<div class="said {kind}"><b>{escape(name)}</b>'
        f'<div>{beside}<div class="text">{body}</div></div></div>'
    )


# ── words ────────────────────────────────────────────────────────────────────────────────────────


def badge(grade: Grade | None) -> str:
    if grade is None:
        return ""
    word = "passed" if grade.passed else "failed"
    title = escape(grade.feedback or f"score {grade.score:g}")
    return f'<span class="badge {word}" title="{title}">{word}</span>'


def episode_facts(trajectory: Trajectory) -> list[str]:
    """`["5 turns", "2 with errors", "81 tokens (cut off)"]`; of one answer only the tokens."""
    cut = {"length": " (cut off)", "time": " (out of time)", "turns": " (out of turns)"}
    tokens = f"{trajectory.num_completion_tokens} tokens{cut.get(trajectory.stop, '')}"
    if not is_multi_turn(trajectory):
        return [tokens]
    own = [turn for turn in trajectory.turns if turn.role == "assistant"]
    wrong = sum(bool(turn.events) for turn in own)
    return [counted(len(own), "turn"), *([f"{wrong} with errors"] if wrong else []), tokens]


def counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def spoken(name: str) -> str:
    return name.replace("_", " ")


def nats(shift: float) -> str:
    return f"{signed(shift)} nats" if math.isfinite(shift) else f"{shift:g} nats"
