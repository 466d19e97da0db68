"""Runs grouped into arms: the same recipe with other seeds. Which tasks all of them answered."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from courtside.comparison.runs import ComparedRun, Measurement, default_arm_name
from courtside.errors import UserError
from courtside.report.folder.locking import find_differences
from courtside.types import Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    name: str
    runs: tuple[ComparedRun, ...]
    """By seed."""

    def by_seed(self) -> dict[int, ComparedRun]:
        return {run.seed: run for run in self.runs}


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTasks:
    """The held-out tasks that every run answered."""

    split: Split
    ids: tuple[str, ...]
    num_dropped: int
    """Tasks that only some runs answered."""


def group_arms(runs: Sequence[ComparedRun]) -> tuple[Arm, ...]:
    """Arms in the order of their first run; refuses two runs of one arm with the same seed."""
    groups: dict[str, list[ComparedRun]] = {}
    for run in runs:
        identity = run.arm or json.dumps(run.tree, sort_keys=True)
        groups.setdefault(identity, []).append(run)
    arms: list[Arm] = []
    for group in groups.values():
        by_seed: dict[int, ComparedRun] = {}
        for run in group:
            if run.seed in by_seed:
                raise UserError(
                    f"{run.path} and {by_seed[run.seed].path}: the same recipe with the same seed "
                    f"{run.seed}. Give one of them"
                )
            by_seed[run.seed] = run
        name = _make_unique(group[0].arm or default_arm_name(group[0].path), arms)
        arms.append(Arm(name=name, runs=tuple(by_seed[seed] for seed in sorted(by_seed))))
    return tuple(arms)


def _make_unique(name: str, arms: Sequence[Arm]) -> str:
    names = {arm.name for arm in arms}
    candidates = [name, *(f"{name} ({number})" for number in range(2, len(arms) + 2))]
    return next(candidate for candidate in candidates if candidate not in names)


def describe_settings(arms: Sequence[Arm]) -> dict[str, tuple[str, ...]]:
    """By arm: `field: old → new` for what differs from the first arm's recipe."""
    first = arms[0].runs[0].tree
    return {arm.name: tuple(find_differences(first, arm.runs[0].tree)) for arm in arms[1:]}


def find_shared_tasks(arms: Sequence[Arm]) -> SharedTasks:
    """Of test tasks, or of validation tasks where not every run was tested after training. Refuses
    runs without a task in common."""
    runs = [run for arm in arms for run in arm.runs]
    splits: tuple[Split, ...] = ("test", "validation")
    for split in splits:
        last = [run.last(split) for run in runs]
        if all(measurement is not None for measurement in last):
            return _share(split, runs, [m for m in last if m is not None])
    unmeasured = [run.path for run in runs if all(run.last(split) is None for split in splits)]
    if unmeasured:
        raise UserError(
            f"{unmeasured[0]}: no evaluation of the student after training, so there is nothing to "
            "compare. Finish the run with the same `courtside train`"
        )
    raise UserError(
        "some runs were evaluated on test tasks and others on validation tasks only, so nothing "
        "was measured in all of them. Finish the runs with the same `courtside train`"
    )


def _share(
    split: Split, runs: Sequence[ComparedRun], measurements: Sequence[Measurement]
) -> SharedTasks:
    ids = set(measurements[0].scores)
    everything = set(ids)
    for run, measurement in zip(runs, measurements, strict=True):
        everything |= measurement.scores.keys()
        remaining = ids & measurement.scores.keys()
        if not remaining:
            raise UserError(
                f"{run.path} and {runs[0].path}: no {split} task in common (such as "
                f"{min(measurement.scores)!r} and {min(ids)!r}), so their scores say nothing about "
                "each other. Give runs with the same [tasks] and evaluate.num_tasks"
            )
        ids = remaining
    return SharedTasks(split=split, ids=tuple(sorted(ids)), num_dropped=len(everything) - len(ids))


def select_curve(arms: Sequence[Arm], shared: SharedTasks) -> SharedTasks | None:
    """Tasks of the curve over training: validation tasks where all runs have them at two steps or
    more, which test tasks have before and after training alone. None: no run has a curve."""
    runs = [run for arm in arms for run in arm.runs]
    splits: tuple[Split, ...] = ("validation", "test")
    for split in splits:
        series = [run.measurements.get(split, ()) for run in runs]
        if all(len(measurements) >= 2 for measurements in series):
            tasks = set[str].intersection(*(set(m.scores) for ms in series for m in ms))
            if tasks:
                everything = set[str].union(*(set(m.scores) for ms in series for m in ms))
                return SharedTasks(
                    split=split, ids=tuple(sorted(tasks)), num_dropped=len(everything - tasks)
                )
    return None
