"""Standard output of commands: tables for people, JSON for programs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from courtside.report.folder.files import replace_non_finite
from courtside.report.summary import format_number

if TYPE_CHECKING:
    from courtside.types import Evaluation

PIPE_WIDTH = 200
"""Columns without a terminal."""


def print_json(tree: Any) -> None:
    print(json.dumps(replace_non_finite(tree), indent=2, ensure_ascii=False, allow_nan=False))


def print_table(table: Table) -> None:
    has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    Console(width=None if has_width else PIPE_WIDTH).print(table)


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    # Text objects: square brackets in a name are not markup.
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 3, 0, 0))
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def evaluation_table(evaluations: Sequence[Evaluation]) -> Table:
    rows = [
        (
            e.policy,
            str(e.step),
            e.split,
            str(len(e.scores)),
            f"{e.mean_score:.1%}",
            f"{e.ci_low:.1%} to {e.ci_high:.1%}",
        )
        for e in evaluations
    ]
    return text_table(("policy", "step", "split", "tasks", "score", "95% interval"), rows)


def evaluation_summary(evaluation: Evaluation) -> dict[str, Any]:
    """For programs: all numbers, and the texts of the sampled answers without token ids."""
    samples = [
        {
            "task": sample.task.id,
            "turns": [{"role": turn.role, "text": turn.text} for turn in sample.turns],
            "stop": sample.stop,
            "score": None if sample.grade is None else sample.grade.score,
            "feedback": None if sample.grade is None else sample.grade.feedback,
        }
        for sample in evaluation.samples
    ]
    return {
        **{f.name: getattr(evaluation, f.name) for f in fields(evaluation)},
        "samples": samples,
    }


def number_table(rows: Sequence[Mapping[str, float | int | None]]) -> Table:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_format_cell(row.get(column)) for column in columns] for row in rows]
    return text_table(columns, cells)


def _format_cell(value: float | int | None) -> str:
    return str(value) if isinstance(value, int) else format_number(value)
