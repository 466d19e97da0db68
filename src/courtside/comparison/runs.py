"""A finished run, as a comparison reads it from its folder: scores by task, and what was spent."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from courtside.errors import UserError
from courtside.recipe import Recipe
from courtside.report.budget import TRAINING_PHASES, sum_spent
from courtside.report.folder.folder import RunFolder
from courtside.report.folder.locking import RECIPE, dump_recipe
from courtside.report.folder.pipeline_folder import (
    PipelineFolder,
    StageRecord,
    is_pipeline_folder,
)
from courtside.types import Split

STEPS, STUDENT_TOKENS, TEACHER_TOKENS, FLOPS, SECONDS, MONEY = (
    "steps", "student_tokens", "teacher_tokens", "flops", "seconds", "money",
)  # fmt: skip
UNITS = (STEPS, STUDENT_TOKENS, TEACHER_TOKENS, FLOPS, SECONDS, MONEY)
"""What a run spends. Evaluations and checkpoints are not part of it."""
ARMS_FILE = "arms.json"
"""In the folder of an experiment's runs: arm → the names of its final runs."""

Spent = Mapping[str, float | None]
"""By unit; None: not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """An evaluation of the student, with what the run had spent by then."""

    step: int
    scores: Mapping[str, float]
    """By task id."""
    spent: Spent

    def mean_score(self, tasks: Sequence[str]) -> float:
        return sum(self.scores[task] for task in tasks) / len(tasks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    path: Path
    arm: str | None
    """The name that an experiment gave its arm; None: it has none."""
    recipe: Recipe
    """Of a pipeline: its last stage's."""
    tree: Mapping[str, Any]
    """What makes an arm: the recipe without its seed and without what changes no number."""
    measurements: Mapping[Split, tuple[Measurement, ...]]
    """Of the student by split, by step."""
    total: Spent

    @property
    def seed(self) -> int:
        return self.recipe.seed

    def last(self, split: Split) -> Measurement | None:
        """The last evaluation after training started; None: there is none."""
        measured = [m for m in self.measurements.get(split, ()) if m.step > 0]
        return measured[-1] if measured else None

    def first(self, split: Split) -> Measurement | None:
        """That before the first step; None: there is none."""
        return next((m for m in self.measurements.get(split, ()) if m.step == 0), None)


def find_runs(paths: Sequence[str | Path]) -> Iterator[tuple[Path, str | None]]:
    """Run folders, and the arms that an experiment gave them: a path is a run folder, or a folder
    with runs such as that of an experiment."""
    for path in map(Path, paths):
        if is_run(path) or is_pipeline_folder(path):
            yield path, None
            continue
        if path.is_file():
            raise UserError(
                f"{path}: is a file. Give folders that `courtside train` wrote, or the folder of "
                "an experiment's runs, such as runs/NAME: results.json has no scores by task"
            )
        if not path.is_dir():
            raise UserError(
                f"{path}: no such folder. Give folders that `courtside train` wrote, or the folder "
                "of an experiment's runs"
            )
        inside = list(_find_inside(path))
        if not inside:
            raise UserError(
                f"{path}: has no finished run. Give folders that `courtside train` wrote, or the "
                "folder of an experiment's runs"
            )
        yield from inside


def is_run(path: Path) -> bool:
    """A recipe alone, such as a built-in one, is no run."""
    return (path / RECIPE).is_file() and (path / "environment.json").is_file()


def _find_inside(folder: Path) -> Iterator[tuple[Path, str | None]]:
    if (folder / ARMS_FILE).is_file():
        try:
            arms: dict[str, list[str]] = json.loads((folder / ARMS_FILE).read_text())
        except ValueError as error:
            raise UserError(
                f"{folder / ARMS_FILE}: not valid JSON ({error}). `courtside experiment … "
                "--summarize` writes it again"
            ) from None
        for arm, names in arms.items():
            yield from ((folder / name, arm) for name in names if is_run(folder / name))
        return
    for path in sorted(folder.iterdir()):
        if is_run(path) or is_pipeline_folder(path):
            yield path, None


def read_run(
    path: Path, arm: str | None, price_per_hour: float | None, suite: str = ""
) -> ComparedRun:
    """`suite`: of its evaluations, in place of those on the run's own kind of tasks."""
    if is_pipeline_folder(path):
        return _read_pipeline(path, arm, price_per_hour, suite)
    folder = RunFolder.read(path)
    policy = _policy(suite)
    policies = {evaluation.policy for evaluation in folder.evaluations()}
    suites = sorted(p.partition(":")[2] for p in policies if p.startswith("student:"))
    if suites and policy not in policies:
        missing = (
            f"no evaluation of the suite {suite!r}" if suite else "evaluations of suites alone"
        )
        raise UserError(f"{path}: {missing}. Name one with --suite: {', '.join(suites)}")
    return ComparedRun(
        path=path,
        arm=arm,
        recipe=folder.recipe(),
        tree=_without_seed(dump_recipe(folder.recipe())),
        measurements=_measure(folder, policy, price_per_hour),
        total=_total_spent(folder, folder.metrics(), price_per_hour),
    )


def _read_pipeline(
    path: Path, arm: str | None, price_per_hour: float | None, suite: str
) -> ComparedRun:
    """A pipeline is its last stage, after all that the stages before have spent; it starts where
    the stage starts in which its student began."""
    folder = PipelineFolder.read(path)
    records: dict[str, StageRecord] = {}
    for name in folder.stage_names:
        record = folder.read_record(name)
        if record is None or not record.is_done:
            raise UserError(
                f"{path}: its stage {name} is not done. Go on with `courtside train`, or give the "
                "folder of a stage that is"
            )
        records[name] = record
    if not records:
        raise UserError(f"{path}: no stage of this pipeline has begun")
    *earlier, last_name = records
    last = read_run(folder.stage_path(last_name), arm, price_per_hour, suite)
    spent = _zero(price_per_hour)
    for name in earlier:
        stage = RunFolder.read(folder.stage_path(name))
        spent = _add(spent, _total_spent(stage, stage.metrics(), price_per_hour))
    start = _read_start(folder, last_name, suite, price_per_hour)
    measurements: dict[Split, tuple[Measurement, ...]] = {}
    for split, series in last.measurements.items():
        later = (
            replace(m, step=m.step + int(spent[STEPS] or 0), spent=_add(spent, m.spent))
            for m in series
        )
        measurements[split] = (*start.get(split, ()), *later)
    trees = {name: _without_seed(record.recipe) for name, record in records.items()}
    return replace(
        last,
        path=path,
        tree={**trees.pop(last_name), "stages": trees},
        measurements=measurements,
        total=_add(spent, last.total),
    )


def _read_start(
    folder: PipelineFolder, stage: str, suite: str, price: float | None
) -> dict[Split, tuple[Measurement, ...]]:
    """Of the student of a stage before the first stage that trained it, if that is another."""
    record = folder.read_record(stage)
    if record is None or record.root in (None, stage):
        return {}
    begun = _measure(RunFolder.read(folder.stage_path(record.root)), _policy(suite), price)
    return {split: tuple(m for m in series if m.step == 0) for split, series in begun.items()}


def _policy(suite: str) -> str:
    return f"student:{suite}" if suite else "student"


def _measure(
    folder: RunFolder, policy: str, price: float | None
) -> dict[Split, tuple[Measurement, ...]]:
    rows = folder.metrics()
    measurements: dict[Split, tuple[Measurement, ...]] = {}
    for evaluation in sorted(folder.evaluations(), key=lambda evaluation: evaluation.step):
        if evaluation.policy == policy:
            spent = _spent_after(evaluation.step, rows, price)
            measured = Measurement(step=evaluation.step, scores=evaluation.scores, spent=spent)
            series = measurements.get(evaluation.split, ())
            measurements[evaluation.split] = (*series, measured)
    return measurements


def _zero(price: float | None) -> Spent:
    return {**dict.fromkeys(UNITS, 0.0), MONEY: None if price is None else 0.0}


def _add(first: Spent, other: Spent) -> Spent:
    pairs = {unit: (first[unit], other[unit]) for unit in UNITS}
    return {unit: None if a is None or b is None else a + b for unit, (a, b) in pairs.items()}


def _without_seed(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {name: section for name, section in tree.items() if name not in ("seed", "run")}


def _spent_after(num_steps: int, rows: Sequence[Mapping[str, Any]], price: float | None) -> Spent:
    """Sums over the rows of metrics of those steps."""
    done = [row for row in rows if row["step"] < num_steps]
    if len(done) != num_steps:  # rows are missing, so that no sum is known
        return {**dict.fromkeys(UNITS), STEPS: float(num_steps)}
    spent = sum_spent(done)
    seconds = spent[SECONDS]
    return {
        STEPS: float(num_steps),
        **spent,
        MONEY: None if price is None or seconds is None else seconds / 3600 * price,
    }


def _total_spent(
    folder: RunFolder, rows: Sequence[Mapping[str, Any]], price: float | None
) -> Spent:
    """After all steps; FLOPs of runs whose steps have none are those of costs.json."""
    total = dict(_spent_after(len(rows), rows, price))
    costs = folder.read_costs()
    if total[FLOPS] is None and rows and costs:
        total[FLOPS] = sum(c.flops for name, c in costs.items() if name in TRAINING_PHASES)
    return total


def default_arm_name(path: Path) -> str:
    """The folder's name without its seed: `hint-lr1e-05` for `hint-lr1e-05-seed3`."""
    name = path.resolve().name
    return re.sub(r"[-_.]?seed[-_=]?\d+$", "", name) or name
