"""Scores at equal budgets: curves over what was spent, and linear interpolation between evaluations
inside the measured range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from courtside.comparison.arms import Arm, SharedTasks
from courtside.comparison.differences import (
    Interval,
    clip_score,
    compare_values,
    mean_score,
    over_seeds,
)
from courtside.comparison.runs import UNITS, ComparedRun

FRACTIONS = (0.25, 0.5, 0.75, 1.0)
"""Of the largest budget that every run has spent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    arm: str
    step: int
    spent: dict[str, float | None]
    """Mean over the arm's seeds, by unit; None: not measured."""
    score: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualBudget:
    """Scores of all arms when each has spent the same."""

    unit: str
    budget: float
    scores: dict[str, Interval | None]
    """By arm; None: its measured range does not reach it."""
    differences: dict[str, Interval | None]
    """`A minus B`, paired by seed; None: fewer than two shared seeds."""


def interpolate(points: Sequence[tuple[float, float]], x: float) -> float | None:
    """y at x on the line between the points around it; None outside of them. `points`: by x."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= x <= x1:
            return y1 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[0][1] if points and points[0][0] == x else None


def make_curve(arm: Arm, tasks: SharedTasks) -> list[CurvePoint]:
    """At the steps at which all seeds of the arm were evaluated."""
    by_step = [{m.step: m for m in run.measurements[tasks.split]} for run in arm.runs]
    steps = sorted(set[int].intersection(*(set(series) for series in by_step)))
    points = []
    for step in steps:
        measurements = [series[step] for series in by_step]
        points.append(
            CurvePoint(
                arm=arm.name,
                step=step,
                spent={
                    unit: mean_if_measured([m.spent[unit] for m in measurements]) for unit in UNITS
                },
                score=mean_score(measurements, tasks),
            )
        )
    return points


def equal_budgets(arms: Sequence[Arm], tasks: SharedTasks) -> list[EqualBudget]:
    """For every unit that all runs measured and that all spent some of."""
    runs = [run for arm in arms for run in arm.runs]
    budgets = []
    for unit in UNITS:
        ends = [_largest(run, tasks, unit) for run in runs]
        if any(end is None or end == 0 for end in ends):
            continue
        common = min(end for end in ends if end is not None)
        budgets += [_at_budget(arms, tasks, unit, common * fraction) for fraction in FRACTIONS]
    return budgets


def _at_budget(arms: Sequence[Arm], tasks: SharedTasks, unit: str, budget: float) -> EqualBudget:
    def score_at(run: ComparedRun) -> float | None:
        return interpolate(curve_of(run, tasks, unit), budget)

    return EqualBudget(
        unit=unit,
        budget=budget,
        scores={arm.name: _score_of([score_at(run) for run in arm.runs]) for arm in arms},
        differences={
            f"{first.name} minus {other.name}": compare_values(first, other, score_at)
            for first, other in combinations(arms, 2)
        },
    )


def curve_of(run: ComparedRun, tasks: SharedTasks, unit: str) -> list[tuple[float, float]]:
    """Spent and score at each evaluation; empty where what was spent is not measured."""
    points = [(m.spent[unit], m.mean_score(tasks.ids)) for m in run.measurements[tasks.split]]
    if any(spent is None for spent, _ in points):
        return []
    return [(spent, score) for spent, score in points if spent is not None]


def _largest(run: ComparedRun, tasks: SharedTasks, unit: str) -> float | None:
    curve = curve_of(run, tasks, unit)
    return curve[-1][0] if curve else None


def _score_of(values: Sequence[float | None]) -> Interval | None:
    measured = [value for value in values if value is not None]
    return clip_score(over_seeds(measured)) if len(measured) == len(values) else None


def mean_if_measured(values: Sequence[float | None]) -> float | None:
    """None where a value is not measured."""
    measured = [value for value in values if value is not None]
    return sum(measured) / len(measured) if len(measured) == len(values) else None
