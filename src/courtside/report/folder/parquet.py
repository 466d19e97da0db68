"""Records as plain trees for JSON, and batches of scored trajectories as Parquet files.

Log-probs are stored as float32; everything else is restored exactly. JSON has null for NaN.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from courtside.errors import UserError
from courtside.files import require_regular_file
from courtside.report.folder.files import is_finite_number, replace_file
from courtside.types import (
    SCHEMA_VERSION,
    Evaluation,
    Event,
    Grade,
    Hint,
    HintOutcome,
    Message,
    Scored,
    Task,
    Trajectory,
    Turn,
    VersionSpan,
)

VERSION_KEY = b"courtside.schema_version"
GRADE = ("score", "passed", "feedback", "error")
PLAIN = ("id", "source", "policy_version", "temperature", "stop", "preference")
"""Fields of a trajectory that are stored as they are."""
DRAFT = ("draft", "correction", "critique", "pair")
"""The same, of trajectories that a teacher added, marked or wrote about."""
LATER = ("fault", "num_replaced", *DRAFT)
"""Such fields that files of earlier versions do not have."""

Tree = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTrajectory:
    """A trajectory of one training step with the scores of student and teacher."""

    trajectory: Trajectory
    step: int
    """0-based: the step that trained on it."""
    student_logp: tuple[float, ...] | None
    """T log-probs of the completion tokens just before the step; None: not trained on."""
    teacher: str | None
    """None: not scored by a teacher."""
    teacher_logp: tuple[float, ...] | None
    """Of the completion tokens at `teacher_token_indices`."""
    context: str | None
    """The privileged text in the teacher's context."""
    teacher_token_indices: tuple[int, ...] | None = None
    """Indices into the T completion tokens that the teacher scored, ascending; None: all."""
    hints: tuple[HintOutcome, ...] = ()
    """Trained and dropped ones."""

    @property
    def teacher_logp_by_token(self) -> tuple[float | None, ...]:
        """T values in the order of the completion tokens; None where not scored."""
        size = self.trajectory.num_completion_tokens
        if self.teacher_logp is None:
            return (None,) * size
        positions = (
            range(size) if self.teacher_token_indices is None else self.teacher_token_indices
        )
        logp = dict(zip(positions, self.teacher_logp, strict=True))
        return tuple(logp.get(position) for position in range(size))


# ── Parquet ──────────────────────────────────────────────────────────────────────────────────────


def write_trajectories(
    path: Path, scored: Sequence[Scored], student_logp: Mapping[str, tuple[float, ...]]
) -> None:
    replace_file(path, serialize_trajectories(scored, student_logp))


def serialize_trajectories(
    scored: Sequence[Scored], student_logp: Mapping[str, tuple[float, ...]]
) -> bytes:
    """A Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [_serialize_row(s, student_logp.get(s.trajectory.id)) for s in scored]
    table = pa.Table.from_pylist(rows, schema=_schema())
    stream = pa.BufferOutputStream()
    pq.write_table(table, stream, compression="zstd")
    return bytes(stream.getvalue().to_pybytes())


def read_trajectories(
    path: Path, step: int, ids: Collection[str] | None = None
) -> list[StoredTrajectory]:
    """In stored order; `ids`: only those, without parsing the others."""
    import pyarrow as pa
    import pyarrow.compute as pc

    table = read_table(path)
    if ids is not None:
        table = table.filter(pc.is_in(table.column("id"), pa.array(sorted(ids), pa.string())))
    return [parse_row(row, step) for row in table.to_pylist()]


def read_hints(path: Path) -> list[HintOutcome]:
    """Of all trajectories of a step, without reading the trajectories."""
    rows = read_table(path, ["id", "hints"]).to_pylist()
    return [outcome for row in rows for outcome in parse_hints(row)]


def read_table(path: Path, columns: list[str] | None = None) -> Any:
    """An Arrow table with a row for each trajectory; see `parse_row`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        require_regular_file(path)
        # `pq.read_table(path)` would parse `key=value` folder names as columns. A Python file or
        # threads could release a Python object during process exit, which aborts it.
        with pa.OSFile(os.fsencode(path)) as file:
            parquet = pq.ParquetFile(file, pre_buffer=False)
            # Before the rows: a newer schema may have types that cannot be read.
            version = (parquet.schema_arrow.metadata or {}).get(VERSION_KEY, b"")
            check_schema(int(version) if version.isdigit() else None, str(path))
            return parquet.read(columns=columns, use_threads=False)
    except (OSError, pa.ArrowInvalid) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: cannot be read as Parquet ({reason})") from None


def _schema() -> Any:
    import pyarrow as pa

    logps = pa.list_(pa.float32())
    names = ("role", "content", "extra", "tools")
    message = pa.struct([(name, pa.string()) for name in names])
    event = pa.struct([("kind", pa.string()), ("details", pa.string())])
    version_span = pa.struct([("start", pa.int32()), ("end", pa.int32()), ("version", pa.int64())])
    turn = pa.struct(
        [
            ("role", pa.string()),
            ("text", pa.string()),
            ("token_ids", pa.list_(pa.int32())),
            ("completion_mask", pa.list_(pa.bool_())),
            ("sampler_logp", logps),
            ("messages", pa.list_(message)),
            ("num_generation_prompt_tokens", pa.int32()),
            ("events", pa.list_(event)),
            ("decision", pa.string()),
            ("policy_versions", pa.list_(version_span)),
        ]
    )
    hint = pa.struct(
        [
            ("turn", pa.int32()),
            ("text", pa.string()),
            ("source", pa.string()),
            ("reason", pa.string()),
            ("confidence", pa.float64()),
            ("bad_span", pa.string()),
            ("wrong_text", pa.string()),
            ("shift", pa.float64()),
            ("bad_span_shift", pa.float64()),
            ("pass_rate", pa.float64()),
            ("drop_reason", pa.string()),
        ]
    )
    return pa.schema(
        [
            ("id", pa.string()),
            ("task", pa.string()),
            ("source", pa.string()),
            ("policy_version", pa.int64()),
            ("temperature", pa.float64()),
            ("stop", pa.string()),
            ("grade_score", pa.float64()),
            ("grade_passed", pa.bool_()),
            ("grade_feedback", pa.string()),
            ("grade_error", pa.string()),
            ("fault", pa.string()),
            ("rewards", pa.string()),
            ("preference", pa.string()),
            ("num_replaced", pa.int32()),
            *((name, pa.string()) for name in DRAFT),
            ("turns", pa.list_(turn)),
            ("teacher", pa.string()),
            ("context", pa.string()),
            ("teacher_logp", logps),
            ("teacher_token_indices", pa.list_(pa.int32())),
            ("student_logp", logps),
            ("hints", pa.list_(hint)),
        ],
        metadata={VERSION_KEY: str(SCHEMA_VERSION)},
    )


def _serialize_row(scored: Scored, student_logp: tuple[float, ...] | None) -> Tree:
    trajectory, target = scored.trajectory, scored.target
    assert all(outcome.hint.trajectory == trajectory.id for outcome in scored.hints)
    tree = serialize_trajectory(trajectory)
    for turn in tree["turns"]:
        for event in turn["events"]:  # as JSON, like the task: the keys differ between kinds
            event["details"] = json.dumps(event["details"])
    grade = tree.pop("grade") or {}
    return {
        **tree,
        "task": json.dumps(tree["task"]),
        "rewards": json.dumps(tree["rewards"]),
        **{f"grade_{name}": grade.get(name) for name in GRADE},
        "teacher": target and target.teacher,
        "context": target and target.context,
        "teacher_logp": target and target.logp_T.tolist(),
        "teacher_token_indices": target and target.token_indices,
        "student_logp": student_logp,
        "hints": [serialize_hint_outcome(outcome) for outcome in scored.hints],
    }


def parse_row(row: Tree, step: int) -> StoredTrajectory:
    for turn in row["turns"]:
        for event in turn["events"]:
            event["details"] = json.loads(event["details"])
    indices = row["teacher_token_indices"]
    return StoredTrajectory(
        trajectory=parse_row_trajectory(row, tuple(map(_parse_turn, row["turns"]))),
        step=step,
        student_logp=_parse_floats(row["student_logp"]),
        teacher=row["teacher"],
        teacher_logp=_parse_floats(row["teacher_logp"]),
        context=row["context"],
        teacher_token_indices=None if indices is None else tuple(indices),
        hints=parse_hints(row),
    )


def parse_row_trajectory(row: Tree, turns: tuple[Turn, ...]) -> Trajectory:
    grade = {name: row[f"grade_{name}"] for name in GRADE}
    later: Tree = {name: row.get(name) for name in LATER}
    return Trajectory(
        **{name: row[name] for name in PLAIN},
        **later,
        task=_parse_task(json.loads(row["task"])),
        turns=turns,
        grade=None if grade["passed"] is None else _parse_grade(grade),
        rewards=json.loads(row.get("rewards") or "{}"),
    )


def parse_hints(row: Tree) -> tuple[HintOutcome, ...]:
    outcome_names = {field.name for field in fields(HintOutcome)}
    return tuple(
        HintOutcome(
            hint=Hint(
                trajectory=row["id"],
                **{name: value for name, value in tree.items() if name not in outcome_names},
            ),
            **{name: value for name, value in tree.items() if name in outcome_names},
        )
        for tree in row["hints"]
    )


# ── trees ────────────────────────────────────────────────────────────────────────────────────────


def check_schema(version: Any, where: str) -> None:
    if not isinstance(version, int):
        raise UserError(f"{where}: carries no schema version, so courtside did not write it")
    if version > SCHEMA_VERSION:
        raise UserError(
            f"{where}: written with schema version {version}; this courtside reads up to "
            f"{SCHEMA_VERSION}. Update courtside"
        )


def serialize_record(record: Any) -> Tree:
    """The fields of a record, not those of records in it."""
    return {field.name: getattr(record, field.name) for field in fields(record)}


def serialize_trajectory(trajectory: Trajectory) -> Tree:
    task, grade = trajectory.task, trajectory.grade
    return {
        **serialize_record(trajectory),
        "task": {
            **serialize_record(task),
            "messages": [serialize_record(message) for message in task.messages],
            "privileged": dict(task.privileged),
            "grader_args": dict(task.grader_args),
            "conversation": [dict(message) for message in task.conversation],
        },
        "turns": [
            {
                **serialize_record(turn),
                "messages": [serialize_record(message) for message in turn.messages],
                "events": [{"kind": e.kind, "details": dict(e.details)} for e in turn.events],
                "policy_versions": [span._asdict() for span in turn.policy_versions],
            }
            for turn in trajectory.turns
        ],
        "grade": None if grade is None else serialize_record(grade),
        "rewards": dict(trajectory.rewards),
    }


def parse_trajectory(tree: Mapping[str, Any]) -> Trajectory:
    grade = tree["grade"]
    return Trajectory(
        **{
            **tree,
            "task": _parse_task(tree["task"]),
            "turns": tuple(map(_parse_turn, tree["turns"])),
            "grade": None if grade is None else _parse_grade(grade),
        }
    )


def serialize_hint_outcome(outcome: HintOutcome) -> Tree:
    """Without the id of the trajectory that it is stored with."""
    tree = {**serialize_record(outcome.hint), **serialize_record(outcome)}
    del tree["hint"], tree["trajectory"]
    return tree


def serialize_evaluation(evaluation: Evaluation) -> Tree:
    return {
        "schema_version": SCHEMA_VERSION,
        **serialize_record(evaluation),
        "metrics": dict(evaluation.metrics),
        "scores": dict(evaluation.scores),
        "samples": [serialize_trajectory(trajectory) for trajectory in evaluation.samples],
    }


def parse_evaluation(tree: Mapping[str, Any], where: str) -> Evaluation:
    check_schema(tree.get("schema_version"), where)
    try:
        return Evaluation(
            step=tree["step"],
            policy=_require_text(tree["policy"]),
            split=_require_text(tree["split"]),  # type: ignore[arg-type]
            **{name: _parse_score(tree[name]) for name in ("mean_score", "ci_low", "ci_high")},
            metrics={name: _parse_score(value) for name, value in tree["metrics"].items()},
            scores={task: _parse_score(score) for task, score in tree["scores"].items()},
            samples=tuple(parse_trajectory(sample) for sample in tree["samples"]),
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(
            f"{where}: the evaluation of step {tree['step']} is incomplete "
            f"({type(error).__name__}: {error}). The file was changed by something else; remove "
            "that line, or restore the file from a copy"
        ) from None


def _parse_task(tree: Mapping[str, Any]) -> Task:
    lists = {name: tuple(tree[name]) for name in ("tags", "conversation")}
    return Task(**{**tree, **lists, "messages": _parse_messages(tree["messages"])})


def _parse_turn(tree: Mapping[str, Any]) -> Turn:
    return Turn(
        **{
            **tree,
            "token_ids": tuple(tree["token_ids"]),
            "completion_mask": tuple(tree["completion_mask"]),
            "sampler_logp": _parse_floats(tree["sampler_logp"]),
            "messages": _parse_messages(tree["messages"]),
            "events": tuple(Event(**event) for event in tree["events"]),
            # Files of earlier versions do not have it.
            "policy_versions": tuple(
                VersionSpan(**span) for span in tree.get("policy_versions") or ()
            ),
        }
    )


def _parse_messages(trees: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    return tuple(Message(**tree) for tree in trees)


def _parse_grade(tree: Mapping[str, Any]) -> Grade:
    return Grade(**{**tree, "score": _none_to_nan(tree["score"])})


def _none_to_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _parse_score(value: float | None) -> float:
    """JSON has no NaN: None stands for it."""
    if value is not None and not is_finite_number(value):
        raise TypeError(f"{value!r} is no number")
    return _none_to_nan(value)


def _require_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _parse_floats(values: list[float | None] | None) -> tuple[float, ...] | None:
    return None if values is None else tuple(map(_none_to_nan, values))
