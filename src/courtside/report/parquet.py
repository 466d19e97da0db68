"""One batch of scored trajectories as a Parquet file, and back.

Log-probs are stored as float32; everything else comes back as it went in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from courtside.errors import UserError
from courtside.report.disk import replace_file
from courtside.report.records import check_schema, floats, task_tree, trajectory_from, turn_tree
from courtside.types import SCHEMA_VERSION, Scored, Trajectory

VERSION_KEY = b"courtside.schema_version"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTrajectory:
    """A trajectory of one training step with what student and teacher said about it."""

    trajectory: Trajectory
    step: int
    """0-based: the step that trained on it."""
    student_logp: tuple[float, ...] | None
    """T log-probs of the chosen tokens just before the step; None: no loss looked at it."""
    teacher: str | None
    """None: no teacher spoke on this one."""
    teacher_logp: tuple[float, ...] | None
    context: str | None
    """What only the teacher saw."""


def write_trajectories(
    path: Path, scored: Sequence[Scored], student_logp: Mapping[str, tuple[float, ...]]
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [_row(one, student_logp.get(one.trajectory.id)) for one in scored]
    table = pa.Table.from_pylist(rows, schema=_schema())
    stream = pa.BufferOutputStream()
    pq.write_table(table, stream, compression="zstd")
    replace_file(path, stream.getvalue().to_pybytes())


def read_trajectories(path: Path, step: int) -> list[StoredTrajectory]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Not `read_table(path)`: it takes `key=value` folder names on the way for columns. Nor a
        # Python file, nor threads: one that lets go of a Python object while the process ends
        # aborts it.
        with pa.OSFile(str(path)) as file:
            table = pq.ParquetFile(file, pre_buffer=False).read(use_threads=False)
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"{path}: cannot be read as Parquet ({error})") from None
    version = (table.schema.metadata or {}).get(VERSION_KEY, b"")
    check_schema(int(version) if version.isdigit() else None, str(path))
    return [_stored(row, step) for row in table.to_pylist()]


def _schema() -> Any:
    import pyarrow as pa

    logps = pa.list_(pa.float32())
    turn = pa.struct(
        [
            ("role", pa.string()),
            ("text", pa.string()),
            ("token_ids", pa.list_(pa.int32())),
            ("chosen", pa.list_(pa.bool_())),
            ("sampler_logp", logps),
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
            ("preference", pa.string()),
            ("turns", pa.list_(turn)),
            ("teacher", pa.string()),
            ("context", pa.string()),
            ("teacher_logp", logps),
            ("student_logp", logps),
        ],
        metadata={VERSION_KEY: str(SCHEMA_VERSION)},
    )


def _row(scored: Scored, student_logp: tuple[float, ...] | None) -> dict[str, Any]:
    trajectory, target = scored.trajectory, scored.target
    grade = trajectory.grade
    return {
        "id": trajectory.id,
        "task": json.dumps(task_tree(trajectory.task)),
        "source": trajectory.source,
        "policy_version": trajectory.policy_version,
        "temperature": trajectory.temperature,
        "stop": trajectory.stop,
        "grade_score": grade and grade.score,
        "grade_passed": grade and grade.passed,
        "grade_feedback": grade and grade.feedback,
        "preference": trajectory.preference,
        "turns": [turn_tree(turn) for turn in trajectory.turns],
        "teacher": target and target.teacher,
        "context": target and target.context,
        "teacher_logp": target and target.logp_T.tolist(),
        "student_logp": student_logp,
    }


def _stored(row: dict[str, Any], step: int) -> StoredTrajectory:
    score, passed, feedback = (row[f"grade_{part}"] for part in ("score", "passed", "feedback"))
    tree = {
        "id": row["id"],
        "task": json.loads(row["task"]),
        "turns": row["turns"],
        "source": row["source"],
        "policy_version": row["policy_version"],
        "temperature": row["temperature"],
        "stop": row["stop"],
        "grade": None
        if passed is None
        else {"score": score, "passed": passed, "feedback": feedback},
        "preference": row["preference"],
    }
    return StoredTrajectory(
        trajectory=trajectory_from(tree),
        step=step,
        student_logp=floats(row["student_logp"]),
        teacher=row["teacher"],
        teacher_logp=floats(row["teacher_logp"]),
        context=row["context"],
    )
