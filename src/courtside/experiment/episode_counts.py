"""Counts of errors in each test episode of a run, and the variance that the test set adds to a
difference between arms.

All runs of an experiment are tested on the same episodes, so that an interval over seeds alone
takes the test set for the whole world. Resampling its episodes tells how much of a difference is
theirs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from courtside.report.folder.evaluation_names import EvaluationName
from courtside.report.folder.parquet import read_table

Counts = Mapping[str, Any]
"""Of the episodes of one test suite, in the order of their tasks: `tasks`, a digest of their ids,
and by measure a string of errors and a string of chances for them, episode by episode."""
Floats = NDArray[np.float64]

NUM_RESAMPLES = 2000
COLUMNS = [
    "task",
    "stop",
    "grade_score",
    *(f"turns.list.element.{name}" for name in ("role", "decision", "events.list.element.kind")),
]


def read_counts(run: Path) -> dict[str, Counts]:
    """By suite, "" for the test tasks themselves; empty where a run stored no episodes."""
    last: dict[str, EvaluationName] = {}
    for path in sorted((run / "evaluations").glob("*.parquet")):
        name = EvaluationName.parse(path.name)
        if name is not None and name.split == "test" and name.policy.startswith("student"):
            last[name.policy.partition(":")[2]] = name  # sorted: the last step's stays
    return {
        suite: count_errors(_read_rows(run / "evaluations" / name.file_name))
        for suite, name in last.items()
    }


def _read_rows(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read_table(path, COLUMNS).to_pylist()
    return rows


def count_errors(episodes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By decision (`decisions/KIND`): errors and decisions of each episode; `error_rate`: turns
    with an error and turns; `score`: its score, of 1."""
    whole = [episode for episode in episodes if episode["stop"] != "fault"]
    errors: dict[str, list[float]] = {"score": [e["grade_score"] or 0 for e in whole]}
    totals: dict[str, list[float]] = {"score": [1] * len(whole)}
    for index, episode in enumerate(whole):
        for turn in episode["turns"]:
            if turn["role"] != "assistant":
                continue
            decision = turn["decision"]
            for name in ("error_rate", *([f"decisions/{decision}"] if decision else ())):
                for counts, count in ((errors, bool(turn["events"])), (totals, True)):
                    counts.setdefault(name, [0] * len(whole))[index] += count
    ids = json.dumps([episode["task"] for episode in whole], sort_keys=True)
    return {
        "tasks": hashlib.sha256(ids.encode()).hexdigest()[:12],
        **{name: [_join(errors[name]), _join(totals[name])] for name in sorted(errors)},
    }


def _join(counts: Sequence[float]) -> str:
    return " ".join(f"{count:.4g}" for count in counts)


# ── the variance of a test set ───────────────────────────────────────────────────────────────────


def has_counts(episodes: Mapping[str, Counts], measure: str) -> bool:
    suite, name = split_measure(measure)
    return suite in episodes and bool(_selected(episodes[suite], name))


def split_measure(measure: str) -> tuple[str, str]:
    """`held_out/decisions/habit_wrong` is `decisions/habit_wrong` of the suite `held_out`."""
    for start in ("decisions/", "error_rate", "score"):
        suite, separator, name = measure.partition(start)
        if separator and (not suite or suite.endswith("/")):
            return suite.rstrip("/"), separator + name
    return "", measure


def _selected(counts: Counts, name: str) -> list[str]:
    """The stored measures that a measure is the mean of: one, all kinds of a side, or all kinds of
    both sides."""
    if name in counts:
        return [name]
    kinds = [stored for stored in counts if stored.count("/") == 2]
    side = name.removeprefix("decisions/")
    if side == "both_sides":
        return kinds
    return [stored for stored in kinds if stored.endswith(f"/{side}")]


def resampled_rates(counts: Counts, name: str, weights_RE: Floats) -> Floats:
    """The measure in test sets in which each episode occurs as often as its weight says."""
    rates_R = []
    for stored in _selected(counts, name):
        errors_E, totals_E = (np.array(text.split(), dtype=np.float64) for text in counts[stored])
        if name == "error_rate":  # the mean of the episodes' rates
            errors_E, totals_E = errors_E / totals_E, np.ones_like(totals_E)
        rates_R.append((weights_RE @ errors_E) / np.maximum(weights_RE @ totals_E, 1e-9))
    mean_R: Floats = np.mean(rates_R, axis=0)
    return mean_R


@cache
def resample_weights(num_episodes: int, num_resamples: int = NUM_RESAMPLES) -> Floats:
    """How often each episode occurs in a bootstrap sample of the episodes."""
    rng = np.random.default_rng(0)
    shares = np.full(num_episodes, 1 / num_episodes)
    return rng.multinomial(num_episodes, shares, size=num_resamples).astype(np.float64)


def variance_of_test_set(
    first: Sequence[Mapping[str, Counts]],
    other: Sequence[Mapping[str, Counts]],
    measure: str,
    *,
    is_paired: bool,
) -> tuple[float, int] | None:
    """Variance that the choice of test episodes adds to the difference of two arms' means beyond
    what seeds show, and its degrees of freedom; None where runs had other episodes or no counts.

    With the same episodes for all seeds, resampled means vary by the episodes' own effect and by
    noise within seeds; the latter is in the variance over seeds already and is taken off.
    """
    suite, name = split_measure(measure)
    runs = [*first, *other]
    if not all(has_counts(run, measure) for run in runs):
        return None
    if len({run[suite]["tasks"] for run in runs}) > 1:
        return None
    num_episodes = len(runs[0][suite][_selected(runs[0][suite], name)[0]][0].split())
    weights_RE = resample_weights(num_episodes)
    first_SR, other_SR = (
        np.stack([resampled_rates(run[suite], name, weights_RE) for run in arm])
        for arm in (first, other)
    )
    joint = float((first_SR.mean(0) - other_SR.mean(0)).var(ddof=1))
    if is_paired:
        within = float((first_SR - other_SR).var(axis=1, ddof=1).sum()) / len(first) ** 2
    else:
        within = sum(
            float(rates_SR.var(axis=1, ddof=1).sum()) / len(rates_SR) ** 2
            for rates_SR in (first_SR, other_SR)
        )
    num_seeds = min(len(first), len(other))
    shared = max(0.0, joint - within) * num_seeds / (num_seeds - 1)
    return shared, num_episodes - 1
