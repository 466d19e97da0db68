"""Records as plain trees for the page; texts are not escaped."""

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
from courtside.report.page.corrections import find_fork
from courtside.report.page.token_gaps import TurnGaps, compute_token_gaps
from courtside.report.summary import shorten
from courtside.sanitize import show_invisible
from courtside.types import Hint, Trajectory

Tree = dict[str, Any]

PROMPT_CHARS = 200

DROP_REASONS = {
    "shift": "its shift is below hints.min_shift",
    "not_passed": "too few replies with it pass (hints.min_pass_rate)",
    "merge": "the tokenizer would merge characters across its edges",
    "too_long": "it does not fit the context",
    "no_assistant_turn": "the turn is not the assistant's",
    "no_message": "there is no message before the turn to put it in",
    "empty": "its text is empty after cleaning",
    "other_render": "the previous turn was rendered with another template",
}


VERBATIM = frozenset({"id", "hints_file_id", "key", "path", "recipe"})
"""Keys of values that the page sends back or that are copied."""


def show_invisible_texts(tree: Any) -> Any:
    """The same tree; texts have marks that would reorder or hide them as their code points."""
    if isinstance(tree, str):
        return show_invisible(tree)
    if isinstance(tree, Mapping):
        return {
            key: value if key in VERBATIM else show_invisible_texts(value)
            for key, value in tree.items()
        }
    if isinstance(tree, (list, tuple)):
        return [show_invisible_texts(item) for item in tree]
    return tree


def serialize_outline(outline: Outline) -> Tree:
    """A row of the list of trajectories."""
    trajectory = outline.trajectory
    turns = [turn for turn in trajectory.turns if turn.role == "assistant"]
    return {
        "id": trajectory.id,
        "hints_file_id": hints_file_id(trajectory),
        "prompt": shorten(_last_prompt(trajectory), PROMPT_CHARS),
        "source": trajectory.source,
        "stop": trajectory.stop,
        "grade": trajectory.grade and serialize_record(trajectory.grade),
        "turns": len(turns),
        "errors": sum(bool(turn.events) for turn in turns),
        "tokens": outline.num_completion_tokens,
        "hints": len(outline.hints),
        **_serialize_correction(trajectory),
    }


def serialize_conversation(stored: StoredTrajectory, user_hints: Mapping[int, Hint]) -> Tree:
    """A whole trajectory; `user_hints` by turn."""
    trajectory = stored.trajectory
    gaps = compute_token_gaps(stored)
    is_by_teacher = (
        trajectory.correction in ("rewrite", "takeover") and trajectory.source == "teacher"
    )
    fork, num_tokens = find_fork(trajectory) if is_by_teacher else (None, 0)
    differ = len(set(trajectory.token_versions)) > 1
    hints: dict[int, list[Tree]] = {}
    for outcome in stored.hints:
        explanation = DROP_REASONS.get(outcome.drop_reason or "", "")
        tree = {**serialize_hint_outcome(outcome), "drop_explanation": explanation}
        hints.setdefault(outcome.hint.turn, []).append(tree)
    return {
        "id": trajectory.id,
        "hints_file_id": hints_file_id(trajectory),
        "step": stored.step,
        "prompt": shorten(_last_prompt(trajectory), PROMPT_CHARS),
        "source": trajectory.source,
        "stop": trajectory.stop,
        "grade": trajectory.grade and serialize_record(trajectory.grade),
        "teacher": stored.teacher,
        "critique": trajectory.critique,
        **_serialize_correction(trajectory),
        # The context of a hinted trajectory repeats the hints.
        "context": None if stored.hints else stored.context,
        "turns": [
            {
                "number": number,
                "role": turn.role,
                "author": trajectory.author_of(number),
                "text": turn.text,
                "messages": _messages(trajectory, number),
                "events": [
                    {"kind": event.kind, "message": event.detail("message")}
                    for event in turn.events
                ],
                "tokens": sum(turn.completion_mask),
                "gap": _mean_gap(gaps[number]),
                "versions": [s._asdict() for s in turn.policy_versions] if differ else [],
                "fork": num_tokens if number == fork else None,
                "hints": hints.get(number, []),
                "user_hint": serialize_user_hint(user_hints.get(number)),
            }
            for number, turn in enumerate(trajectory.turns)
        ],
    }


def find_related(rows: Sequence[Tree], id: str) -> list[Tree]:
    """The draft of a trajectory, its corrections, and the other member of its preference pair;
    `rows` are those of its batch."""
    center = next((row for row in rows if row["id"] == id), None)
    if center is None:
        return []
    related = []
    for row in rows:
        if row["id"] == id:
            continue
        if row["id"] == center["draft"]:
            relation = "draft"
        elif row["draft"] == id:
            relation = "correction"
        elif row["pair"] is not None and row["pair"] == center["pair"]:
            relation = "pair"
        else:
            continue
        names = ("id", "correction", "preference", "is_pair_copy")
        related.append({**{name: row[name] for name in names}, "relation": relation})
    return related


def _serialize_correction(trajectory: Trajectory) -> Tree:
    names = ("draft", "correction", "preference", "pair", "num_replaced", "is_pair_copy")
    fields = {name: getattr(trajectory, name) for name in names}
    return {
        **fields,
        "has_critique": trajectory.critique is not None,
        "rewards": dict(trajectory.rewards),
    }


def serialize_user_hint(hint: Hint | None) -> Tree | None:
    return None if hint is None else {"text": hint.text, "reason": hint.reason}


def _last_prompt(trajectory: Trajectory) -> str:
    messages = trajectory.task.messages
    return messages[-1].content if messages else trajectory.task.id


def _messages(trajectory: Trajectory, number: int) -> list[Tree]:
    turn = trajectory.turns[number]
    prompt = trajectory.task.messages if turn.role == "prompt" else ()
    return [serialize_record(message) for message in turn.messages or prompt]


def _mean_gap(gaps: TurnGaps) -> float | None:
    """In nats per token, over the tokens that teacher and student both scored."""
    nats = [gap.nats for gap in gaps if gap is not None and math.isfinite(gap.nats)]
    return sum(nats) / len(nats) if nats else None
