"""A run's records as pandas DataFrames; pandas is imported when one is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from courtside.errors import UserError
from courtside.report.folder.parquet import StoredTrajectory
from courtside.types import Evaluation, Trajectory

if TYPE_CHECKING:
    from pandas import DataFrame

Decode = Callable[[Sequence[int]], list[str]]


def make_metrics_frame(rows: Sequence[Mapping[str, Any]]) -> DataFrame:
    """Indexed by step; NaN where a step has no such metric."""
    frame: DataFrame = _import_pandas().DataFrame(rows)
    return frame.set_index("step") if len(rows) else frame


def make_evaluations_frame(evaluations: Sequence[Evaluation]) -> DataFrame:
    rows = [
        {
            "step": e.step,
            "policy": e.policy,
            "split": e.split,
            "mean_score": e.mean_score,
            "ci_low": e.ci_low,
            "ci_high": e.ci_high,
            **e.metrics,
        }
        for e in evaluations
    ]
    frame: DataFrame = _import_pandas().DataFrame(rows)
    return frame


def make_trajectories_frame(stored: Sequence[StoredTrajectory]) -> DataFrame:
    """A row for each trajectory."""
    frame: DataFrame = _import_pandas().DataFrame([_trajectory_row(item) for item in stored])
    return frame


def make_tokens_frame(stored: Sequence[StoredTrajectory], decode: Decode | None) -> DataFrame:
    """A row for each completion token."""
    rows = [row for item in stored for row in _token_rows(item, decode)]
    frame: DataFrame = _import_pandas().DataFrame(rows)
    return frame


def _trajectory_row(stored: StoredTrajectory) -> dict[str, Any]:
    trajectory = stored.trajectory
    turns = [turn for turn in trajectory.turns if turn.role == "assistant"]
    return {
        "id": trajectory.id,
        "step": stored.step,
        "task": trajectory.task.id,
        "prompt": _last_message(trajectory),
        "response": trajectory.response,
        "source": trajectory.source,
        "stop": trajectory.stop,
        "score": None if trajectory.grade is None else trajectory.grade.score,
        "passed": None if trajectory.grade is None else trajectory.grade.passed,
        "turns": len(turns),
        "error_turns": sum(bool(turn.events) for turn in turns),
        "tokens": trajectory.num_completion_tokens,
        "hints": len(stored.hints),
        "trained_hints": sum(outcome.drop_reason is None for outcome in stored.hints),
        "teacher": stored.teacher,
        "preference": trajectory.preference,
        "correction": trajectory.correction,
        "draft": trajectory.draft,
        "critique": trajectory.critique,
        **{f"reward/{name}": value for name, value in trajectory.rewards.items()},
    }


def _token_rows(stored: StoredTrajectory, decode: Decode | None) -> list[dict[str, Any]]:
    trajectory = stored.trajectory
    ids, teacher = trajectory.completion_ids, stored.teacher_logp_by_token
    student: Sequence[float | None] = stored.student_logp or (None,) * len(ids)
    texts = [None] * len(ids) if decode is None else decode(ids)
    return [
        {
            "trajectory": trajectory.id,
            "turn": turn,
            "token": token,
            "text": text,
            "student_logp": student_logp,
            "teacher_logp": teacher_logp,
            "gap": None
            if teacher_logp is None or student_logp is None
            else teacher_logp - student_logp,
        }
        for turn, token, text, student_logp, teacher_logp in zip(
            trajectory.turn_of, ids, texts, student, teacher, strict=True
        )
    ]


def _last_message(trajectory: Trajectory) -> str:
    messages = trajectory.task.messages
    return messages[-1].content if messages else ""


def _import_pandas() -> Any:
    try:
        return import_module("pandas")
    except ModuleNotFoundError as error:
        if error.name != "pandas":
            raise
        raise UserError(
            "a DataFrame needs pandas, which is not installed: pip install -e '.[notebook]' in the "
            "clone of courtside. Without it, metrics(), evaluations() and trajectories() have the "
            "same values"
        ) from None
