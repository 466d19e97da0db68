"""Records ↔ plain trees for JSON. What was NaN in a record is null in JSON and NaN again after."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from courtside.errors import UserError
from courtside.types import (
    SCHEMA_VERSION,
    Evaluation,
    Event,
    Grade,
    Hint,
    HintOutcome,
    Message,
    Task,
    Trajectory,
    Turn,
)

Tree = dict[str, Any]


def check_schema(version: Any, where: str) -> None:
    if not isinstance(version, int):
        raise UserError(f"{where}: carries no schema version, so courtside did not write it")
    if version > SCHEMA_VERSION:
        raise UserError(
            f"{where}: written with schema version {version}; this courtside reads up to "
            f"{SCHEMA_VERSION}. Update courtside"
        )


def serialize_task(task: Task) -> Tree:
    return {
        "id": task.id,
        "split": task.split,
        "messages": serialize_messages(task.messages),
        "answer": task.answer,
        "completion": task.completion,
        "rejected": task.rejected,
        "privileged": dict(task.privileged),
        "tags": list(task.tags),
        "grader": task.grader,
        "grader_args": dict(task.grader_args),
        "conversation": [dict(message) for message in task.conversation],
    }


def parse_task(tree: Mapping[str, Any]) -> Task:
    messages = parse_messages(tree["messages"])
    conversation = tuple(tree["conversation"])
    return Task(
        **{
            **tree,
            "messages": messages,
            "tags": tuple(tree["tags"]),
            "conversation": conversation,
        }
    )


def serialize_messages(messages: Sequence[Message]) -> list[Tree]:
    return [{"role": message.role, "content": message.content} for message in messages]


def parse_messages(trees: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    return tuple(Message(**tree) for tree in trees)


def serialize_turn(turn: Turn) -> Tree:
    return {
        "role": turn.role,
        "text": turn.text,
        "token_ids": list(turn.token_ids),
        "completion_mask": list(turn.completion_mask),
        "sampler_logp": None if turn.sampler_logp is None else list(turn.sampler_logp),
        "messages": serialize_messages(turn.messages),
        "num_generation_prompt_tokens": turn.num_generation_prompt_tokens,
        "events": [{"kind": one.kind, "details": dict(one.details)} for one in turn.events],
    }


def parse_turn(tree: Mapping[str, Any]) -> Turn:
    return Turn(
        role=tree["role"],
        text=tree["text"],
        token_ids=tuple(tree["token_ids"]),
        completion_mask=tuple(tree["completion_mask"]),
        sampler_logp=parse_floats(tree["sampler_logp"]),
        messages=parse_messages(tree["messages"]),
        num_generation_prompt_tokens=tree.get("num_generation_prompt_tokens", 0),
        events=tuple(Event(**event) for event in tree["events"]),
    )


def serialize_grade(grade: Grade | None) -> Tree | None:
    if grade is None:
        return None
    return {
        "score": grade.score,
        "passed": grade.passed,
        "feedback": grade.feedback,
        "error": grade.error,
    }


def serialize_trajectory(trajectory: Trajectory) -> Tree:
    return {
        "id": trajectory.id,
        "task": serialize_task(trajectory.task),
        "turns": [serialize_turn(turn) for turn in trajectory.turns],
        "source": trajectory.source,
        "policy_version": trajectory.policy_version,
        "temperature": trajectory.temperature,
        "stop": trajectory.stop,
        "grade": serialize_grade(trajectory.grade),
        "preference": trajectory.preference,
    }


def parse_trajectory(tree: Mapping[str, Any]) -> Trajectory:
    grade = tree["grade"]
    return Trajectory(
        **{
            **tree,
            "task": parse_task(tree["task"]),
            "turns": tuple(parse_turn(turn) for turn in tree["turns"]),
            "grade": None
            if grade is None
            else Grade(**{**grade, "score": none_to_nan(grade["score"])}),
        }
    )


def serialize_hint_outcome(hint_outcomes: HintOutcome) -> Tree:
    """Without the trajectory's id: it is stored with its trajectory."""
    hint = hint_outcomes.hint
    return {
        "turn": hint.turn,
        "text": hint.text,
        "source": hint.source,
        "reason": hint.reason,
        "confidence": hint.confidence,
        "bad_span": hint.bad_span,
        "shift": hint_outcomes.shift,
        "bad_span_shift": hint_outcomes.bad_span_shift,
        "pass_rate": hint_outcomes.pass_rate,
        "drop_reason": hint_outcomes.drop_reason,
    }


def parse_hint_outcome(tree: Mapping[str, Any], trajectory: str) -> HintOutcome:
    outcome = {key: tree[key] for key in ("shift", "bad_span_shift", "pass_rate", "drop_reason")}
    words = {key: value for key, value in tree.items() if key not in outcome}
    return HintOutcome(hint=Hint(trajectory=trajectory, **words), **outcome)


def serialize_evaluation(evaluation: Evaluation) -> Tree:
    return {
        "schema_version": SCHEMA_VERSION,
        "step": evaluation.step,
        "policy": evaluation.policy,
        "split": evaluation.split,
        "mean_score": evaluation.mean_score,
        "ci_low": evaluation.ci_low,
        "ci_high": evaluation.ci_high,
        "metrics": dict(evaluation.metrics),
        "scores": dict(evaluation.scores),
        "samples": [serialize_trajectory(trajectory) for trajectory in evaluation.samples],
    }


def parse_evaluation(tree: Mapping[str, Any], where: str) -> Evaluation:
    check_schema(tree.get("schema_version"), where)
    return Evaluation(
        step=tree["step"],
        policy=tree["policy"],
        split=tree["split"],
        mean_score=none_to_nan(tree["mean_score"]),
        ci_low=none_to_nan(tree["ci_low"]),
        ci_high=none_to_nan(tree["ci_high"]),
        metrics={name: none_to_nan(value) for name, value in tree["metrics"].items()},
        scores={task: none_to_nan(score) for task, score in tree["scores"].items()},
        samples=tuple(parse_trajectory(sample) for sample in tree["samples"]),
    )


def none_to_nan(value: float | None) -> float:
    return math.nan if value is None else value


def parse_floats(values: list[float | None] | None) -> tuple[float, ...] | None:
    return None if values is None else tuple(none_to_nan(value) for value in values)
