"""`courtside.compare`: finished runs side by side."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from courtside.comparison.arms import (
    Arm,
    SharedTasks,
    describe_settings,
    find_shared_tasks,
    group_arms,
    select_curve,
)
from courtside.comparison.budgets import (
    CurvePoint,
    EqualBudget,
    equal_budgets,
    make_curve,
    mean_if_measured,
)
from courtside.comparison.differences import (
    ArmDifference,
    Interval,
    compare_pair,
    gain_of,
    mean_score,
)
from courtside.comparison.runs import UNITS, find_runs, read_run
from courtside.errors import UserError
from courtside.sanitize import truncate

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSummary:
    name: str
    seeds: tuple[int, ...]
    runs: tuple[str, ...]
    """Their folders, by seed."""
    before: Interval | None
    """Mean score before training; None: not measured."""
    after: Interval
    gain: Interval | None
    """After minus before, paired."""
    spent: dict[str, float | None]
    """Mean over runs, by unit; None: not measured."""
    per_point: dict[str, float | None]
    """Spent for each percentage point gained; None: not measured, or nothing was gained."""
    settings: tuple[str, ...]
    """What its recipe has other than the first arm's: `field: old → new`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Arms with their scores and costs, the differences between them, and scores at equal budgets.

    Scores are fractions; `differences` are of the same tasks. `None` means never measured.
    """

    arms: tuple[ArmSummary, ...]
    differences: tuple[ArmDifference, ...]
    curves: tuple[CurvePoint, ...]
    budgets: tuple[EqualBudget, ...]
    tasks: SharedTasks
    """Of the scores and differences."""
    curve_tasks: SharedTasks | None
    """Of curves and budgets; None: no run was evaluated twice."""
    price_per_hour: float | None
    notes: tuple[str, ...]
    """What a reader must know: tasks that were left out, what is not measured."""

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain lists, dicts and numbers, as `--json` prints it."""
        return asdict(self)

    def arms_frame(self) -> DataFrame:
        """A row for each arm: score before, after, gain, what was spent in all and per point."""
        return _make_frame(
            {
                "arm": arm.name,
                "num_seeds": len(arm.seeds),
                **_columns("before", arm.before),
                **_columns("after", arm.after),
                **_columns("gain", arm.gain),
                **arm.spent,
                **{f"{unit}_per_point": value for unit, value in arm.per_point.items()},
            }
            for arm in self.arms
        )

    def differences_frame(self) -> DataFrame:
        """A row for each pair of arms."""
        return _make_frame(
            {
                "first": d.first,
                "other": d.other,
                **_columns("", d.interval),
                "p_value": d.p_value,
                "pairing": d.pairing,
                "covers": d.interval.method,
                "num_seeds": d.interval.num_seeds,
            }
            for d in self.differences
        )

    def curves_frame(self) -> DataFrame:
        """A row for each arm and evaluation: score, and what was spent by then."""
        return _make_frame(
            {"arm": point.arm, "step": point.step, **_columns("score", point.score), **point.spent}
            for point in self.curves
        )

    def budgets_frame(self) -> DataFrame:
        """A row for each unit, budget and arm: the score at that budget."""
        return _make_frame(
            {"unit": b.unit, "budget": b.budget, "arm": arm, **_columns("score", interval)}
            for b in self.budgets
            for arm, interval in b.scores.items()
        )

    def write_html(self, path: str | Path) -> Path:
        """One self-contained page: tables, curves, scores at equal budgets."""
        from courtside.comparison.page import write_page

        return write_page(self, Path(path))


def compare(
    runs: Sequence[str | Path],
    *,
    price_per_hour: float | None = None,
    only: str = "",
    suite: str = "",
) -> Comparison:
    """Compare finished runs: scores, paired differences, costs and scores at equal budgets.

    `runs`: run folders, or folders with runs such as that of an experiment. Runs of one recipe with
    other seeds are one arm. `price_per_hour`: of the machine, for costs in money. `only`: a regular
    expression for the names of arms. `suite`: of evaluations, whose scores are compared in place of
    those on the runs' own tasks. Runs without a task in common are refused; where they share
    some of their tasks, those are compared, and `notes` say so.
    """
    if isinstance(runs, str | Path) or not isinstance(runs, Sequence) or not runs:
        raise UserError(
            f"compare: runs = {truncate(repr(runs), 60)}; give a list of run folders, or of "
            "folders with runs"
        )
    if price_per_hour is not None and not price_per_hour > 0:
        raise UserError(f"compare: price_per_hour = {price_per_hour!r}; give a number above 0")
    arms = group_arms([read_run(path, arm, price_per_hour, suite) for path, arm in find_runs(runs)])
    arms = _select_arms(arms, only)
    tasks = find_shared_tasks(arms)
    curve_tasks = select_curve(arms, tasks)
    settings = describe_settings(arms)
    summaries = tuple(_summarize(arm, tasks, settings.get(arm.name, ())) for arm in arms)
    budgets = () if curve_tasks is None else tuple(equal_budgets(arms, curve_tasks))
    curves = (
        () if curve_tasks is None else [p for arm in arms for p in make_curve(arm, curve_tasks)]
    )
    return Comparison(
        arms=summaries,
        differences=tuple(compare_pair(a, b, tasks) for a, b in combinations(arms, 2)),
        curves=tuple(curves),
        budgets=budgets,
        tasks=tasks,
        curve_tasks=curve_tasks,
        price_per_hour=price_per_hour,
        notes=(
            *([f"Scores are those of the suite {suite!r}."] if suite else []),
            *_find_notes(summaries, tasks, curve_tasks),
        ),
    )


def _select_arms(arms: tuple[Arm, ...], only: str) -> tuple[Arm, ...]:
    try:
        selected = tuple(arm for arm in arms if re.search(only, arm.name))
    except re.error as error:
        raise UserError(f"only = {only!r}: no regular expression ({error})") from None
    if not selected:
        names = ", ".join(arm.name for arm in arms)
        raise UserError(f"only = {only!r}: matches none of {names}")
    return selected


def _summarize(arm: Arm, tasks: SharedTasks, settings: tuple[str, ...]) -> ArmSummary:
    before = [run.first(tasks.split) for run in arm.runs]
    measured = [m for m in before if m is not None and m.scores.keys() >= set(tasks.ids)]
    last = [m for run in arm.runs if (m := run.last(tasks.split)) is not None]
    gain = gain_of(arm, tasks)
    spent = {unit: mean_if_measured([run.total[unit] for run in arm.runs]) for unit in UNITS}
    return ArmSummary(
        name=arm.name,
        seeds=tuple(run.seed for run in arm.runs),
        runs=tuple(str(run.path) for run in arm.runs),
        before=mean_score(measured, tasks) if len(measured) == len(before) else None,
        after=mean_score(last, tasks),
        gain=gain,
        spent=spent,
        per_point={
            unit: None
            if value is None or gain is None or gain.mean <= 0
            else value / (100 * gain.mean)
            for unit, value in spent.items()
        },
        settings=settings,
    )


def _find_notes(
    arms: Sequence[ArmSummary], tasks: SharedTasks, curve_tasks: SharedTasks | None
) -> Iterator[str]:
    if tasks.num_dropped:
        yield (
            f"The runs were evaluated on different {tasks.split} tasks. Scores are those of the "
            f"{len(tasks.ids)} tasks that all of them answered; {tasks.num_dropped} others are "
            "left out."
        )
    if tasks.split == "validation":
        yield (
            "Not every run was tested after training, so scores are of validation tasks, which "
            "settings may have been chosen on."
        )
    if curve_tasks is None:
        yield "No curve: a run was not evaluated at two steps on tasks that all runs share."
    elif curve_tasks.num_dropped:
        yield (
            f"Curves are of the {len(curve_tasks.ids)} {curve_tasks.split} tasks that all runs "
            f"answered; {curve_tasks.num_dropped} others are left out."
        )
    if any(len(arm.seeds) == 1 for arm in arms):
        yield (
            "Arms with one seed have intervals over tasks: they say how other tasks would score, "
            "and nothing about other seeds."
        )
    for arm in arms:
        changed = [line for line in arm.settings if line.startswith("evaluate.")]
        if changed:
            yield f"{arm.name} was evaluated with other settings: {'; '.join(changed)}."


def _columns(prefix: str, interval: Interval | None) -> dict[str, float | None]:
    names = (prefix or "mean", *(f"{prefix}_{end}".strip("_") for end in ("low", "high")))
    values = (
        (None, None, None) if interval is None else (interval.mean, interval.low, interval.high)
    )
    return dict(zip(names, values, strict=True))


def _make_frame(rows: Iterator[dict[str, Any]]) -> DataFrame:
    try:
        pandas = import_module("pandas")
    except ModuleNotFoundError as error:
        if error.name != "pandas":
            raise
        raise UserError(
            "a DataFrame needs pandas, which is not installed: pip install -e '.[notebook]' in the "
            "clone of courtside. Without it, to_dict() has the same values"
        ) from None
    frame: DataFrame = pandas.DataFrame(list(rows))
    return frame
