"""What a run has spent, step by step, and whether its budget is spent.

Sums over the rows of `metrics.jsonl`, so that a resumed run stops where an uninterrupted one does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from courtside.recipe.train import TrainConfig

TRAINING_PHASES = ("rollout", "reader", "teacher", "update")
"""Evaluations and checkpoints are not part of a budget."""
COSTS = ("student_tokens", "teacher_tokens", "flops")

Spent = dict[str, float | None]
"""By unit; None: not measured."""


def sum_spent(rows: Iterable[Mapping[str, Any]]) -> Spent:
    """Student tokens, teacher tokens, FLOPs and seconds of training over rows of metrics."""
    total: Spent = dict.fromkeys((*COSTS, "seconds"), 0.0)
    for row in rows:
        for unit, value in _spent_in(row).items():
            before = total[unit]
            total[unit] = None if before is None or value is None else before + value
    return total


def _spent_in(row: Mapping[str, Any]) -> Spent:
    seconds = [row.get(f"seconds/{phase}") for phase in TRAINING_PHASES]
    measured = [value for value in seconds if value is not None]
    return {
        **{unit: row.get(f"cost/{unit}") for unit in COSTS},
        "seconds": sum(measured) if measured else None,
    }


class BudgetMeter:
    """The limits of a run, and what its steps have spent of them."""

    def __init__(self, train: TrainConfig, rows: Iterable[Mapping[str, Any]]) -> None:
        self._limits = train.budget
        self._spent = sum_spent(rows) if self._limits else {}

    def add(self, row: Mapping[str, Any]) -> None:
        """The row of metrics of a further step."""
        if self._limits:
            for unit, value in sum_spent([row]).items():
                before = self._spent[unit]
                self._spent[unit] = None if before is None or value is None else before + value

    @property
    def end(self) -> str | None:
        """`train.max_flops: 1.2e+15 of 1e+15 are spent`; None: there is budget left, or none is
        set."""
        for unit, limit in self._limits.items():
            value = self._spent[unit]
            if value is not None and value >= limit:
                return f"train.max_{unit}: {value:.7g} of {limit:.7g} are spent"
        return None
