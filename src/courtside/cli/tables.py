"""What verbs print on standard output: tables for people, JSON for programs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from courtside.report.folder.files import replace_non_finite
from courtside.report.summary import format_number

if TYPE_CHECKING:
    from courtside.types import Evaluation

PIPE_WIDTH = 200
"""Columns where no terminal says how many there are."""


def print_json(tree: Any) -> None:
    print(json.dumps(replace_non_finite(tree), indent=2, ensure_ascii=False, allow_nan=False))


def print_table(table: Table) -> None:
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    Console(width=None if known else PIPE_WIDTH).print(table)


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    # Text objects: a name with square brackets in it is not markup.
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 3, 0, 0))
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def evaluation_table(evaluations: Sequence[Evaluation]) -> Table:
    rows = [
        (
            one.policy,
            str(one.step),
            one.split,
            str(len(one.scores)),
            f"{one.mean_score:.1%}",
            f"{one.ci_low:.1%} to {one.ci_high:.1%}",
        )
        for one in evaluations
    ]
    return text_table(("policy", "step", "split", "tasks", "rate", "95% interval"), rows)


def number_table(rows: Sequence[Mapping[str, float | int | None]]) -> Table:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_number(row.get(column)) for column in columns] for row in rows]
    return text_table(columns, cells)


def _number(value: float | int | None) -> str:
    return str(value) if isinstance(value, int) else format_number(value)
