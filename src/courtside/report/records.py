"""Records ↔ plain trees for JSON. What was NaN in a record is null in JSON and NaN again after."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from courtside.errors import UserError
from courtside.types import SCHEMA_VERSION, Evaluation, Grade, Message, Task, Trajectory, Turn

Tree = dict[str, Any]


def check_schema(version: Any, where: str) -> None:
    if not isinstance(version, int):
        raise UserError(f"{where}: carries no schema version, so courtside did not write it")
    if version > SCHEMA_VERSION:
        raise UserError(
            f"{where}: written with schema version {version}; this courtside reads up to "
            f"{SCHEMA_VERSION}. Update courtside"
        )


def task_tree(task: Task) -> Tree:
    return {
        "id": task.id,
        "split": task.split,
        "messages": [{"role": m.role, "content": m.content} for m in task.messages],
        "answer": task.answer,
        "completion": task.completion,
        "rejected": task.rejected,
        "privileged": dict(task.privileged),
        "tags": list(task.tags),
        "grader": task.grader,
        "grader_args": dict(task.grader_args),
    }


def task_from(tree: Mapping[str, Any]) -> Task:
    messages = tuple(Message(**message) for message in tree["messages"])
    return Task(**{**tree, "messages": messages, "tags": tuple(tree["tags"])})


def turn_tree(turn: Turn) -> Tree:
    return {
        "role": turn.role,
        "text": turn.text,
        "token_ids": list(turn.token_ids),
        "chosen": list(turn.chosen),
        "sampler_logp": None if turn.sampler_logp is None else list(turn.sampler_logp),
    }


def turn_from(tree: Mapping[str, Any]) -> Turn:
    return Turn(
        role=tree["role"],
        text=tree["text"],
        token_ids=tuple(tree["token_ids"]),
        chosen=tuple(tree["chosen"]),
        sampler_logp=floats(tree["sampler_logp"]),
    )


def trajectory_tree(trajectory: Trajectory) -> Tree:
    grade = trajectory.grade
    return {
        "id": trajectory.id,
        "task": task_tree(trajectory.task),
        "turns": [turn_tree(turn) for turn in trajectory.turns],
        "source": trajectory.source,
        "policy_version": trajectory.policy_version,
        "temperature": trajectory.temperature,
        "stop": trajectory.stop,
        "grade": grade
        and {"score": grade.score, "passed": grade.passed, "feedback": grade.feedback},
        "preference": trajectory.preference,
    }


def trajectory_from(tree: Mapping[str, Any]) -> Trajectory:
    grade = tree["grade"]
    return Trajectory(
        **{
            **tree,
            "task": task_from(tree["task"]),
            "turns": tuple(turn_from(turn) for turn in tree["turns"]),
            "grade": None if grade is None else Grade(**{**grade, "score": number(grade["score"])}),
        }
    )


def evaluation_tree(evaluation: Evaluation) -> Tree:
    return {
        "schema_version": SCHEMA_VERSION,
        "step": evaluation.step,
        "who": evaluation.who,
        "split": evaluation.split,
        "rate": evaluation.rate,
        "low": evaluation.low,
        "high": evaluation.high,
        "metrics": dict(evaluation.metrics),
        "scores": dict(evaluation.scores),
        "samples": [trajectory_tree(trajectory) for trajectory in evaluation.samples],
    }


def evaluation_from(tree: Mapping[str, Any], where: str) -> Evaluation:
    check_schema(tree.get("schema_version"), where)
    return Evaluation(
        step=tree["step"],
        who=tree["who"],
        split=tree["split"],
        rate=number(tree["rate"]),
        low=number(tree["low"]),
        high=number(tree["high"]),
        metrics={name: number(value) for name, value in tree["metrics"].items()},
        scores={task: number(score) for task, score in tree["scores"].items()},
        samples=tuple(trajectory_from(sample) for sample in tree["samples"]),
    )


def number(value: float | None) -> float:
    return math.nan if value is None else value


def floats(values: list[float | None] | None) -> tuple[float, ...] | None:
    return None if values is None else tuple(number(value) for value in values)
