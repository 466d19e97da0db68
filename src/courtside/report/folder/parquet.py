"""One batch of scored trajectories as a Parquet file, and back.

Log-probs are stored as float32; everything else comes back as it went in.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from courtside.errors import UserError
from courtside.report.folder.files import replace_file
from courtside.report.folder.serialize import (
    Tree,
    check_schema,
    parse_floats,
    parse_hint_outcome,
    parse_trajectory,
    serialize_hint_outcome,
    serialize_task,
    serialize_turn,
)
from courtside.types import SCHEMA_VERSION, HintOutcome, Scored, Trajectory, Turn

VERSION_KEY = b"courtside.schema_version"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTrajectory:
    """A trajectory of one training step with what student and teacher said about it."""

    trajectory: Trajectory
    step: int
    """0-based: the step that trained on it."""
    student_logp: tuple[float, ...] | None
    """T log-probs of the completion tokens just before the step; None: no loss looked at it."""
    teacher: str | None
    """None: no teacher spoke on this one."""
    teacher_logp: tuple[float, ...] | None
    """Of the completion tokens that `teacher_token_indices` names."""
    context: str | None
    """What only the teacher saw."""
    teacher_token_indices: tuple[int, ...] | None = None
    """Indices into the T completion tokens that the teacher scored, ascending; None: all."""
    hints: tuple[HintOutcome, ...] = ()
    """Also those that were dropped."""

    @property
    def teacher_logp_by_token(self) -> tuple[float | None, ...]:
        """T values in the order of the completion tokens; None where the teacher said nothing."""
        size = self.trajectory.num_completion_tokens
        if self.teacher_logp is None:
            return (None,) * size
        positions = (
            range(size) if self.teacher_token_indices is None else self.teacher_token_indices
        )
        logp = dict(zip(positions, self.teacher_logp, strict=True))
        return tuple(logp.get(position) for position in range(size))


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


def read_trajectories(
    path: Path, step: int, only: Collection[str] | None = None
) -> list[StoredTrajectory]:
    """In their order. `only`: those with these ids; of the others no record is made."""
    return [parse_row(row, step) for row in _filter_ids(read_table(path), only).to_pylist()]


def read_hints(path: Path) -> list[HintOutcome]:
    """Of all trajectories of a step, without reading the trajectories."""
    rows = read_table(path, ["id", "hints"]).to_pylist()
    return [hint_outcomes for row in rows for hint_outcomes in _parse_hints(row)]


def _filter_ids(table: Any, only: Collection[str] | None) -> Any:
    """Rows of trajectories with these ids."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if only is None:
        return table
    return table.filter(pc.is_in(table.column("id"), pa.array(sorted(only), pa.string())))


def read_table(path: Path, columns: list[str] | None = None) -> Any:
    """An Arrow table with a row for each trajectory; `parse_row` makes a record of a row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Not `read_table(path)`: it takes `key=value` folder names on the way for columns. Nor a
        # Python file, nor threads: one that lets go of a Python object while the process ends
        # aborts it.
        with pa.OSFile(str(path)) as file:
            parquet = pq.ParquetFile(file, pre_buffer=False)
            # Before the rows: those of a newer schema may be of types that cannot be read here.
            version = (parquet.schema_arrow.metadata or {}).get(VERSION_KEY, b"")
            check_schema(int(version) if version.isdigit() else None, str(path))
            return parquet.read(columns=columns, use_threads=False)
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"{path}: cannot be read as Parquet ({error})") from None


def _schema() -> Any:
    import pyarrow as pa

    logps = pa.list_(pa.float32())
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    event = pa.struct([("kind", pa.string()), ("details", pa.string())])
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
            ("preference", pa.string()),
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


def _row(scored: Scored, student_logp: tuple[float, ...] | None) -> Tree:
    trajectory, target = scored.trajectory, scored.target
    grade = trajectory.grade
    assert all(hint_outcomes.hint.trajectory == trajectory.id for hint_outcomes in scored.hints)
    return {
        "id": trajectory.id,
        "task": json.dumps(serialize_task(trajectory.task)),
        "source": trajectory.source,
        "policy_version": trajectory.policy_version,
        "temperature": trajectory.temperature,
        "stop": trajectory.stop,
        "grade_score": grade and grade.score,
        "grade_passed": grade and grade.passed,
        "grade_feedback": grade and grade.feedback,
        "grade_error": grade and grade.error,
        "preference": trajectory.preference,
        "turns": [_turn_row(turn) for turn in trajectory.turns],
        "teacher": target and target.teacher,
        "context": target and target.context,
        "teacher_logp": target and target.logp_T.tolist(),
        "teacher_token_indices": target and target.token_indices,
        "student_logp": student_logp,
        "hints": [serialize_hint_outcome(hint_outcomes) for hint_outcomes in scored.hints],
    }


def _turn_row(turn: Turn) -> Tree:
    """Details as JSON, like the task: their names differ from kind to kind."""
    tree = serialize_turn(turn)
    for event in tree["events"]:
        event["details"] = json.dumps(event["details"])
    return tree


def _turn_tree(row: Tree) -> Tree:
    for event in row["events"]:
        event["details"] = json.loads(event["details"])
    return row


def _parse_hints(row: Tree) -> tuple[HintOutcome, ...]:
    return tuple(parse_hint_outcome(tree, row["id"]) for tree in row["hints"])


def parse_row(row: Tree, step: int) -> StoredTrajectory:
    score, passed, feedback = (row[f"grade_{part}"] for part in ("score", "passed", "feedback"))
    tree = {
        "id": row["id"],
        "task": json.loads(row["task"]),
        "turns": [_turn_tree(turn) for turn in row["turns"]],
        "source": row["source"],
        "policy_version": row["policy_version"],
        "temperature": row["temperature"],
        "stop": row["stop"],
        "grade": None
        if passed is None
        else {
            "score": score,
            "passed": passed,
            "feedback": feedback,
            "error": row.get("grade_error"),
        },
        "preference": row["preference"],
    }
    return StoredTrajectory(
        trajectory=parse_trajectory(tree),
        step=step,
        student_logp=parse_floats(row["student_logp"]),
        teacher=row["teacher"],
        teacher_logp=parse_floats(row["teacher_logp"]),
        context=row["context"],
        teacher_token_indices=_optional_tuple(row["teacher_token_indices"]),
        hints=_parse_hints(row),
    )


def _optional_tuple(values: list[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(values)
