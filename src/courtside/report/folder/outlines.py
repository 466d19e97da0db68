"""Trajectories of a step without texts and tokens, to list thousands of them quickly."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from courtside.report.folder.parquet import (
    DRAFT,
    GRADE,
    PLAIN,
    StoredTrajectory,
    parse_hints,
    parse_row,
    parse_row_trajectory,
    read_table,
)
from courtside.types import Event, HintOutcome, Trajectory, Turn

TURN = "turns.list.element"
COLUMNS = [
    *PLAIN,
    *DRAFT,
    *(f"grade_{name}" for name in GRADE),
    *("task", "hints", "rewards", "num_replaced"),
    *(f"{TURN}.role", f"{TURN}.completion_mask", f"{TURN}.events.list.element.kind"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    trajectory: Trajectory
    """Its turns have roles and kinds of events only."""
    step: int
    num_tokens: int
    num_completion_tokens: int
    hints: tuple[HintOutcome, ...]


def read_outlines(path: Path, step: int) -> list[Outline]:
    """In the order of the trajectories."""
    import pyarrow.compute as pc

    table = read_table(path, COLUMNS)
    turns = table["turns"].combine_chunks()
    flat_turns = turns.flatten()
    roles = flat_turns.field("role").to_pylist()
    events = flat_turns.field("events").to_pylist()
    num_completion = _count_true(flat_turns.field("completion_mask"))
    lengths = pc.list_value_length(flat_turns.field("completion_mask")).to_pylist()
    sizes = pc.list_value_length(turns).to_pylist()
    rows = table.drop_columns(["turns"]).to_pylist()
    outlines, at = [], 0
    for row, size in zip(rows, sizes, strict=True):
        span = range(at, at + size)
        row_turns = tuple(_parse_turn(roles[i], events[i]) for i in span)
        outlines.append(
            Outline(
                trajectory=parse_row_trajectory(row, row_turns),
                step=step,
                num_tokens=sum(lengths[i] for i in span),
                num_completion_tokens=sum(num_completion[i] for i in span),
                hints=parse_hints(row),
            )
        )
        at += size
    return outlines


def read_texts(path: Path) -> dict[str, str]:
    """By id: the text of all turns, to search in."""
    rows = read_table(path, ["id", f"{TURN}.text"]).to_pylist()
    return {row["id"]: "\n".join(turn["text"] for turn in row["turns"]) for row in rows}


class StepTable:
    """The Arrow table of a step; a trajectory is parsed when it is requested."""

    def __init__(self, path: Path, step: int) -> None:
        self.step = step
        self._table = read_table(path)
        self._rows = {id: row for row, id in enumerate(self._table["id"].to_pylist())}

    def find(self, id: str) -> StoredTrajectory | None:
        row = self._rows.get(id)
        if row is None:
            return None
        return parse_row(self._table.slice(row, 1).to_pylist()[0], self.step)


def _count_true(mask: Any) -> list[int]:
    """Number of true values in each list, without a Python object per token."""
    import pyarrow as pa
    import pyarrow.compute as pc

    flat = mask.flatten().cast(pa.int64())
    cumulative = pa.concat_arrays([pa.array([0], pa.int64()), pc.cumulative_sum(flat)])
    ends = pc.cumulative_sum(pc.list_value_length(mask).cast(pa.int64()))
    sums = cumulative.take(ends).to_pylist()
    return [end - start for start, end in zip([0, *sums][:-1], sums, strict=True)]


def _parse_turn(role: Any, events: list[dict[str, str]]) -> Turn:
    kinds = tuple(Event(kind=event["kind"]) for event in events)
    return Turn(role=role, text="", token_ids=(), completion_mask=(), events=kinds)
