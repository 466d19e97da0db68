"""Means of arms and paired differences between them, over seeds and over tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from courtside.comparison.arms import Arm, SharedTasks
from courtside.comparison.runs import ComparedRun, Measurement
from courtside.evaluate.intervals import mean_interval, paired_difference
from courtside.experiment.contrasts import ArmRuns, compare_arms
from courtside.experiment.statistics import Estimate, estimate_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    mean: float
    low: float
    high: float
    method: str
    """What the 95% interval covers: `seeds`, `tasks`, or `seeds and tasks`; empty: it is not known,
    and has no width."""
    num_seeds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmDifference:
    """Score of `first` minus that of `other` after training."""

    first: str
    other: str
    interval: Interval
    p_value: float
    """Of no difference, two-sided, not corrected for the number of pairs."""
    pairing: str
    """`seeds`: runs of a seed share tasks and random numbers; `tasks`: seeds are not repeated, or
    not shared; `none`: by Welch's test."""


def over_seeds(values: Sequence[float]) -> Interval:
    """Student's t over seeds; seeds that do not vary at all, or one alone, say nothing of its
    width."""
    if len(values) > 1 and (estimate := estimate_mean(values)).variance > 0:
        return _interval(estimate, "seeds")
    mean = sum(values) / len(values)
    return Interval(mean=mean, low=mean, high=mean, method="", num_seeds=len(values))


def clip_score(interval: Interval) -> Interval:
    """A score is in [0, 1], which Student's t does not know."""
    return replace(interval, low=max(0.0, interval.low), high=min(1.0, interval.high))


def mean_score(measurements: Sequence[Measurement], tasks: SharedTasks) -> Interval:
    """Over the seeds of an arm; over the tasks of one run alone, or of seeds that do not vary."""
    interval = over_seeds([m.mean_score(tasks.ids) for m in measurements])
    if interval.method:
        return clip_score(interval)
    num_seeds = len(measurements)
    scores = [sum(m.scores[task] for m in measurements) / num_seeds for task in tasks.ids]
    mean, low, high = mean_interval(scores)
    return Interval(mean=mean, low=low, high=high, method="tasks", num_seeds=num_seeds)


def gain_of(arm: Arm, tasks: SharedTasks) -> Interval | None:
    """After minus before, paired; None: the scores before training are not measured."""
    pairs = [(run.first(tasks.split), run.last(tasks.split)) for run in arm.runs]
    measured = [
        (before, after)
        for before, after in pairs
        if before is not None and after is not None and before.scores.keys() >= set(tasks.ids)
    ]
    if len(measured) < len(pairs):
        return None
    if len(measured) > 1:
        return over_seeds([a.mean_score(tasks.ids) - b.mean_score(tasks.ids) for b, a in measured])
    before, after = (_select(m.scores, tasks) for m in measured[0])
    mean, low, high, _ = paired_difference(before, after)
    return Interval(mean=mean, low=low, high=high, method="tasks", num_seeds=1)


def compare_pair(first: Arm, other: Arm, tasks: SharedTasks) -> ArmDifference:
    """By seed where two seeds are shared, with the variance of the tasks; by Welch's test where
    both have other seeds; by task otherwise, which says nothing about other seeds."""
    row = compare_arms(_to_runs(first, tasks), _to_runs(other, tasks), "score")
    if row is not None:
        estimate: Estimate = row["estimate"]
        with_tasks = row["variance"] == "with episodes"
        return ArmDifference(
            first=first.name,
            other=other.name,
            interval=_interval(estimate, "seeds and tasks" if with_tasks else "seeds"),
            p_value=estimate.p_value(),
            pairing="seeds" if estimate.method == "paired" else "none",
        )
    mean, low, high, p_value = paired_difference(
        _mean_by_task(other, first, tasks), _mean_by_task(first, other, tasks)
    )
    return ArmDifference(
        first=first.name,
        other=other.name,
        interval=Interval(mean=mean, low=low, high=high, method="tasks", num_seeds=1),
        p_value=p_value,
        pairing="tasks",
    )


def compare_values(
    first: Arm, other: Arm, value_of: Callable[[ComparedRun], float | None]
) -> Interval | None:
    """The mean of first minus other of a number that runs have, paired by seed; None where fewer
    than two seeds have it in both."""
    values = [
        {seed: value for seed, run in arm.by_seed().items() if (value := value_of(run)) is not None}
        for arm in (first, other)
    ]
    seeds = [seed for seed in values[0] if seed in values[1]]
    return over_seeds([values[0][s] - values[1][s] for s in seeds]) if len(seeds) > 1 else None


def _to_runs(arm: Arm, tasks: SharedTasks) -> ArmRuns:
    """The arm as experiments compare it: mean scores and scores by task, by seed."""
    scores = {run.seed: _last_scores(run, tasks) for run in arm.runs}
    return ArmRuns(
        measures={seed: {"after": sum(s.values()) / len(s)} for seed, s in scores.items()},
        episodes={seed: {"": _to_counts(s)} for seed, s in scores.items()},
    )


def _to_counts(scores: Mapping[str, float]) -> dict[str, Any]:
    return {
        "tasks": "shared",
        "score": [" ".join(map(repr, scores.values())), " ".join("1" for _ in scores)],
    }


def _mean_by_task(arm: Arm, partner: Arm, tasks: SharedTasks) -> dict[str, float]:
    """Over the seeds that both arms have, or over all where they share none."""
    shared = set(arm.by_seed()) & set(partner.by_seed())
    runs = [run for run in arm.runs if run.seed in shared or not shared]
    scores = [_last_scores(run, tasks) for run in runs]
    return {task: sum(s[task] for s in scores) / len(scores) for task in tasks.ids}


def _last_scores(run: ComparedRun, tasks: SharedTasks) -> dict[str, float]:
    last = run.last(tasks.split)
    assert last is not None, "a run without it is refused"
    return _select(last.scores, tasks)


def _select(scores: Mapping[str, float], tasks: SharedTasks) -> dict[str, float]:
    return {task: float(scores[task]) for task in tasks.ids}


def _interval(estimate: Estimate, method: str) -> Interval:
    low, high = estimate.interval()
    return Interval(
        mean=estimate.mean, low=low, high=high, method=method, num_seeds=estimate.num_seeds
    )
