"""The trajectories of a step without their texts and tokens: to list thousands of them quickly."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from courtside.report.folder.parquet import StoredTrajectory, parse_row, read_table
from courtside.report.folder.serialize import parse_hint_outcome, parse_task
from courtside.types import Event, Grade, HintOutcome, Trajectory, Turn

TURN = "turns.list.element"
COLUMNS = [
    *("id", "task", "source", "policy_version", "temperature", "stop"),
    *("grade_score", "grade_passed", "grade_feedback", "grade_error", "preference"),
    "hints",
    *(f"{TURN}.role", f"{TURN}.completion_mask", f"{TURN}.events.list.element.kind"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    trajectory: Trajectory
    """Its turns say who spoke and which events there were; texts and tokens are left out."""
    step: int
    num_tokens: int
    num_completion_tokens: int
    hints: tuple[HintOutcome, ...]


def read_outlines(path: Path, step: int) -> list[Outline]:
    """In the order of the trajectories."""
    import pyarrow.compute as pc

    table = read_table(path, COLUMNS)
    turns = table["turns"].combine_chunks()
    each = turns.flatten()
    roles = each.field("role").to_pylist()
    events = each.field("events").to_pylist()
    mask = _counts(each.field("completion_mask"))
    lengths = pc.list_value_length(each.field("completion_mask")).to_pylist()
    sizes = pc.list_value_length(turns).to_pylist()
    rows = table.drop_columns(["turns"]).to_pylist()
    outlines, at = [], 0
    for row, size in zip(rows, sizes, strict=True):
        span = range(at, at + size)
        own = tuple(_turn(roles[i], events[i]) for i in span)
        outlines.append(
            Outline(
                trajectory=_trajectory(row, own),
                step=step,
                num_tokens=sum(lengths[i] for i in span),
                num_completion_tokens=sum(mask[i] for i in span),
                hints=tuple(parse_hint_outcome(tree, row["id"]) for tree in row["hints"]),
            )
        )
        at += size
    return outlines


def read_texts(path: Path) -> dict[str, str]:
    """By id: all that was said in a trajectory, to search in."""
    rows = read_table(path, ["id", f"{TURN}.text"]).to_pylist()
    return {row["id"]: "\n".join(turn["text"] for turn in row["turns"]) for row in rows}


class StepTable:
    """A step as it lies in its file; a trajectory becomes records only when it is asked for."""

    def __init__(self, path: Path, step: int) -> None:
        self.step = step
        self._table = read_table(path)
        self._rows = {id: row for row, id in enumerate(self._table["id"].to_pylist())}

    def one(self, id: str) -> StoredTrajectory | None:
        row = self._rows.get(id)
        if row is None:
            return None
        return parse_row(self._table.slice(row, 1).to_pylist()[0], self.step)


def _counts(mask: Any) -> list[int]:
    """How many are true in each list, without an object for each token."""
    import pyarrow as pa
    import pyarrow.compute as pc

    flat = mask.flatten().cast(pa.int64())
    until = pa.concat_arrays([pa.array([0], pa.int64()), pc.cumulative_sum(flat)])
    ends = pc.cumulative_sum(pc.list_value_length(mask).cast(pa.int64()))
    sums = until.take(ends).to_pylist()
    return [end - start for start, end in zip([0, *sums][:-1], sums, strict=True)]


def _turn(role: Any, events: list[dict[str, str]]) -> Turn:
    kinds = tuple(Event(kind=event["kind"]) for event in events)
    return Turn(role=role, text="", token_ids=(), completion_mask=(), events=kinds)


def _trajectory(row: dict[str, Any], turns: tuple[Turn, ...]) -> Trajectory:
    score, passed, feedback = (row[f"grade_{part}"] for part in ("score", "passed", "feedback"))
    grade = None
    if passed is not None:
        grade = Grade(score=score, passed=passed, feedback=feedback, error=row.get("grade_error"))
    return Trajectory(
        id=row["id"],
        task=parse_task(json.loads(row["task"])),
        turns=turns,
        source=row["source"],
        policy_version=row["policy_version"],
        temperature=row["temperature"],
        stop=row["stop"],
        grade=grade,
        preference=row["preference"],
    )
