"""Records as the page gets them: plain trees, with all texts as they are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from courtside.report.folder.hints_file import hints_file_id
from courtside.report.folder.outlines import Outline
from courtside.report.folder.parquet import (
    StoredTrajectory,
    serialize_hint_outcome,
    serialize_record,
)
from courtside.report.page.token_gaps import TurnGaps, compute_token_gaps
from courtside.report.summary import shorten
from courtside.types import Hint, HintOutcome, Trajectory

Tree = dict[str, Any]

ASKED_CHARS = 200

WHY_DROPPED = {
    "shift": "it moves the turn by less than hints.min_shift",
    "not_passed": "too few replies under it pass (hints.min_pass_rate)",
    "merge": "the tokenizer would merge characters across its edges",
    "too_long": "it does not fit the context",
    "no_assistant_turn": "there is no assistant turn to stand above",
    "no_message": "there is no message above the turn to put it in",
    "empty": "nothing of it is left as text",
    "other_render": "the turn above was rendered by another template",
}


def listed(outline: Outline) -> Tree:
    """A line of the list of trajectories."""
    trajectory = outline.trajectory
    own = [turn for turn in trajectory.turns if turn.role == "assistant"]
    return {
        "id": trajectory.id,
        "hinted_id": hints_file_id(trajectory),
        "asked": shorten(_asked(trajectory), ASKED_CHARS),
        "source": trajectory.source,
        "stop": trajectory.stop,
        "grade": trajectory.grade and serialize_record(trajectory.grade),
        "turns": len(own),
        "errors": sum(bool(turn.events) for turn in own),
        "tokens": outline.num_completion_tokens,
        "hints": len(outline.hints),
    }


def conversation(stored: StoredTrajectory, mine: Mapping[int, Hint]) -> Tree:
    """A whole trajectory; `mine` are the person's hints by turn."""
    trajectory = stored.trajectory
    gaps = compute_token_gaps(stored)
    hints: dict[int, list[Tree]] = {}
    for hint_outcomes in stored.hints:
        hints.setdefault(hint_outcomes.hint.turn, []).append(_judged(hint_outcomes))
    return {
        "id": trajectory.id,
        "hinted_id": hints_file_id(trajectory),
        "step": stored.step,
        "asked": shorten(_asked(trajectory), ASKED_CHARS),
        "source": trajectory.source,
        "stop": trajectory.stop,
        "grade": trajectory.grade and serialize_record(trajectory.grade),
        "teacher": stored.teacher,
        # With hints the context repeats them; they are shown in their places.
        "context": None if stored.hints else stored.context,
        "turns": [
            {
                "number": number,
                "role": turn.role,
                "text": turn.text,
                "messages": _messages(trajectory, number),
                "events": [
                    {"kind": event.kind, "message": event.details.get("message", "")}
                    for event in turn.events
                ],
                "tokens": sum(turn.completion_mask),
                "gap": _mean(gaps[number]),
                "hints": hints.get(number, []),
                "mine": mine_tree(mine.get(number)),
            }
            for number, turn in enumerate(trajectory.turns)
        ],
    }


def mine_tree(hint: Hint | None) -> Tree | None:
    return None if hint is None else {"text": hint.text, "reason": hint.reason}


def _judged(hint_outcomes: HintOutcome) -> Tree:
    why = WHY_DROPPED.get(hint_outcomes.drop_reason, "") if hint_outcomes.drop_reason else ""
    return {**serialize_hint_outcome(hint_outcomes), "why": why}


def _asked(trajectory: Trajectory) -> str:
    messages = trajectory.task.messages
    return messages[-1].content if messages else trajectory.task.id


def _messages(trajectory: Trajectory, number: int) -> list[Tree]:
    turn = trajectory.turns[number]
    prompt = trajectory.task.messages if turn.role == "prompt" else ()
    return [serialize_record(message) for message in turn.messages or prompt]


def _mean(gaps: TurnGaps) -> float | None:
    """Nats a token, over the tokens that teacher and student both spoke of."""
    known: Sequence[float] = [gap.nats for gap in gaps if gap is not None]
    known = [nats for nats in known if math.isfinite(nats)]
    return sum(known) / len(known) if known else None
