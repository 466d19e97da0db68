"""Differences between arms by the rules that a plan fixes before its runs.

Arms of a seed share tasks and random numbers, so differences are paired by seed, and by Welch only
where arms have no two seeds in common or other tasks. Holm's correction goes over all contrasts
and variants of the plan, finished or not, for each outcome by itself. The first outcome decides;
the others are questions of their own. Every other difference is exploratory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from courtside.experiment.episode_counts import Counts, variance_of_test_set
from courtside.experiment.statistics import (
    Estimate,
    adjust_holm,
    detectable_difference,
    estimate_paired,
    estimate_welch,
)

ALPHA = 0.05
MAX_DEPTH = 2
"""Slashes in a measure that is compared beyond the fixed ones; the rows of arms have all."""
SCORES = ("score", "rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """What is compared; written down before the runs."""

    pairs: tuple[tuple[str, str], ...] = ()
    outcomes: Mapping[str, float] | None = None
    """Measure → the standard deviation of a paired difference that is expected."""
    margin: float = 0.03
    """Differences within it count as none in a test of equivalence."""
    unpaired: tuple[str, ...] = ()
    """Arms whose runs had other tasks than those of the same seed in other arms."""

    def num_tests(self, variants_of: Mapping[str, Sequence[str]]) -> int:
        """Of the whole plan, for each outcome; `variants_of`: each arm's."""
        return sum(len(set(variants_of[a]) & set(variants_of[b])) for a, b in self.pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRuns:
    """The finished runs of an arm, by seed."""

    measures: Mapping[int, Mapping[str, float]]
    episodes: Mapping[int, Mapping[str, Counts]]
    """Without those of results that stored none."""
    is_pairable: bool = True
    """Whether a seed's tasks and random numbers are those of other arms."""

    def values(self, measure: str, seeds: Sequence[int]) -> list[float]:
        return [self.measures[seed][measure] for seed in seeds]

    def seeds_with(self, measure: str) -> list[int]:
        return [seed for seed, measures in self.measures.items() if measure in measures]


def measure_of(outcome: str) -> str:
    """The measure of a run that an outcome is: `score` after training is called `after`."""
    suite, _, last = outcome.rpartition("/")
    if last in SCORES:
        return f"{suite}/after" if suite else "after"
    return f"{outcome}_after"


def is_better(outcome: str, difference: float) -> bool:
    """Of scores more is better, of errors and divergences less."""
    return (difference > 0) == (outcome.rpartition("/")[2] in SCORES)


# ── one difference ───────────────────────────────────────────────────────────────────────────────


def compare_arms(first: ArmRuns, other: ArmRuns, outcome: str) -> dict[str, Any] | None:
    """Mean of first minus other with its interval; None where there are too few seeds."""
    measure = measure_of(outcome)
    seeds = [arm.seeds_with(measure) for arm in (first, other)]
    common = [seed for seed in seeds[0] if seed in seeds[1]]
    if len(common) >= 2 and can_pair(first, other, common):
        seeds = [common, common]
        estimate = estimate_paired(first.values(measure, common), other.values(measure, common))
    elif min(map(len, seeds)) >= 2:
        values = [
            arm.values(measure, arm_seeds)
            for arm, arm_seeds in zip((first, other), seeds, strict=True)
        ]
        estimate = estimate_welch(values[0], values[1])
    else:
        return None
    # The episodes of training are other ones in every seed: seeds show their variance.
    variance = "seeds"
    if not outcome.startswith("training/"):
        estimate, variance = _add_test_set(estimate, first, other, outcome, seeds)
    low, high = estimate.interval()
    return {
        "mean": estimate.mean,
        "low": low,
        "high": high,
        "seeds": estimate.num_seeds,
        "method": estimate.method,
        "variance": variance,
        "estimate": estimate,
    }


def can_pair(first: ArmRuns, other: ArmRuns, seeds: Sequence[int]) -> bool:
    """Not where the plan says so, nor where a seed's runs are known to have had other tasks."""
    if not (first.is_pairable and other.is_pairable):
        return False
    digests = (
        {
            counts["tasks"]
            for arm in (first, other)
            if (counts := arm.episodes.get(seed, {}).get(""))
        }
        for seed in seeds
    )
    return all(len(tasks) < 2 for tasks in digests)


def _add_test_set(
    estimate: Estimate,
    first: ArmRuns,
    other: ArmRuns,
    outcome: str,
    seeds: Sequence[Sequence[int]],
) -> tuple[Estimate, str]:
    counts = [
        [arm.episodes.get(seed, {}) for seed in arm_seeds]
        for arm, arm_seeds in zip((first, other), seeds, strict=True)
    ]
    added = variance_of_test_set(
        counts[0], counts[1], outcome, is_paired=estimate.method == "paired"
    )
    return (estimate, "seeds only") if added is None else (estimate.widen(*added), "with episodes")


# ── those of a plan ──────────────────────────────────────────────────────────────────────────────


def compare_fixed(arms: Mapping[str, ArmRuns], design: Design) -> list[dict[str, Any]]:
    """A row for each contrast and outcome that can be computed yet; `judge` adds verdicts."""
    rows = []
    for first, other in design.pairs:
        for outcome in design.outcomes or ():
            if first in arms and other in arms:
                row = compare_arms(arms[first], arms[other], outcome)
                if row is not None:
                    rows.append({"contrast": f"{first} minus {other}", "outcome": outcome, **row})
    return rows


def judge(rows: Sequence[dict[str, Any]], design: Design, num_tests: int) -> None:
    """Add p-values, corrected over the whole plan, and verdicts on the first arm of each row."""
    for outcome in design.outcomes or ():
        _judge_outcome([row for row in rows if row["outcome"] == outcome], design, num_tests)


def _judge_outcome(rows: Sequence[dict[str, Any]], design: Design, num_tests: int) -> None:
    estimates: list[Estimate] = [row.pop("estimate") for row in rows]
    p_values = [estimate.p_value() for estimate in estimates]
    p_margins = [estimate.p_equivalence(design.margin) for estimate in estimates]
    adjusted, adjusted_margins = (adjust_holm(p, num_tests) for p in (p_values, p_margins))
    for place, (row, estimate) in enumerate(zip(rows, estimates, strict=True)):
        error = estimate.variance**0.5
        row |= {
            "p": p_values[place],
            "p_holm": adjusted[place],
            "p_equivalent": p_margins[place],
            "p_equivalent_holm": adjusted_margins[place],
            "detectable": detectable_difference(error, estimate.freedom, num_tests),
            "verdict": verdict(row, adjusted[place], adjusted_margins[place]),
        }


def verdict(row: Mapping[str, Any], p_holm: float, p_equivalent_holm: float) -> str:
    """On the first arm of a contrast. An interval over seeds alone is too narrow where all
    runs share a test set, so it never shows equivalence."""
    if p_holm < ALPHA:
        return "better" if is_better(row["outcome"], row["mean"]) else "worse"
    is_equivalent = p_equivalent_holm < ALPHA and row["variance"] != "seeds only"
    return "equivalent" if is_equivalent else "not decided"


def explore(arms: Mapping[str, ArmRuns], design: Design) -> dict[str, dict[str, Any]]:
    """Of every two arms, or of the first arms of contrasts against all others: each measure after
    training that both have. Nothing is corrected: these suggest, and decide nothing."""
    references = {first for first, _ in design.pairs} or set(arms)
    result: dict[str, dict[str, Any]] = {}
    for first, other in combinations(arms, 2):
        if other in references and first not in references:
            first, other = other, first
        if first not in references:
            continue
        measures = [
            name
            for name in next(iter(arms[first].measures.values()))
            if name.endswith("after") and "events/" not in name and name.count("/") <= MAX_DEPTH
        ]
        rows = {}
        for name in measures:
            outcome = name.removesuffix("after").removesuffix("_")
            outcome = f"{outcome}score" if outcome.endswith("/") or not outcome else outcome
            is_fixed = (first, other) in design.pairs and outcome in (design.outcomes or ())
            row = None if is_fixed else compare_arms(arms[first], arms[other], outcome)
            if row is not None:
                del row["estimate"]
                rows[outcome] = row
        if rows:
            result[f"{first} minus {other}"] = rows
    return result
