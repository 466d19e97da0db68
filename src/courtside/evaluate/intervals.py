"""Confidence intervals of mean scores, and paired tests of two evaluations of the same tasks.

Pure functions of numbers; resampling is seeded, so that reports are reproducible.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from itertools import product
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from courtside.errors import UserError

RESAMPLES = 10_000
MAX_EXACT_FLIPS = 12
"""Up to this many changed tasks, all 2ⁿ sign patterns are enumerated instead of sampled."""

Floats = NDArray[np.float64]


def mean_interval(
    scores: Sequence[float],
    *,
    clusters: Sequence[Hashable] | None = None,
    level: float = 0.95,
) -> tuple[float, float, float]:
    """(mean, low, high) of scores in [0, 1].

    Scores of 0 and 1: Wilson's interval, which is accurate near 0 and 1 and for few tasks.
    Others, and scores that come in clusters (samples of one task are not independent): Student's t
    with the variance between tasks or clusters, clipped to [0, 1]. Where nothing varies, t would
    have no width; Wilson's interval for that many tasks or clusters is taken instead, whose
    variance is the largest that scores with that mean can have.
    """
    assert 0 < level < 1
    if len(scores) == 0:
        raise UserError("no scores: an interval needs at least one graded answer")
    assert all(0 <= score <= 1 for score in scores)
    mean = math.fsum(scores) / len(scores)
    sums = _cluster_sums(scores, clusters, mean)
    if len(sums) == len(scores) and all(score in (0, 1) for score in scores):
        return (mean, *_wilson(mean, len(sums), level))
    squares = math.fsum(value * value for value in sums)
    if len(sums) < 2 or math.isclose(squares, 0, abs_tol=1e-18):
        return (mean, *_wilson(mean, len(sums), level))
    error = math.sqrt(squares * len(sums) / (len(sums) - 1)) / len(scores)
    half_width = _student_quantile(level, len(sums) - 1) * error
    return mean, max(0.0, mean - half_width), min(1.0, mean + half_width)


def paired_difference(
    before: Mapping[str, float],
    after: Mapping[str, float],
    *,
    resamples: int = RESAMPLES,
    max_exact_flips: int = MAX_EXACT_FLIPS,
) -> tuple[float, float, float, float]:
    """(difference, low, high, p_value) of the mean score, by task id.

    The 95% interval is a paired bootstrap over tasks; below some 30 tasks it is too narrow (with
    one task, or none that changed, it has no width), so trust the p-value there. That one is
    two-sided, and exact for scores of 0 and 1 (a sign test on the tasks that changed); otherwise
    signs of the differences are flipped, all ways where tasks are few, else at random.
    """
    if before.keys() != after.keys():
        unmatched = sorted(before.keys() ^ after.keys())
        raise UserError(
            f"the two evaluations are not of the same tasks: {len(unmatched)} are in only one of "
            f"them, such as {unmatched[0]!r}. Evaluate both with the same tasks, split and number"
        )
    if not before:
        raise UserError("no tasks to compare: both evaluations are empty")
    ids = sorted(before)
    gaps_N = np.array([after[id] - before[id] for id in ids], dtype=np.float64)
    low, high = _bootstrap(gaps_N, resamples)
    binary = all(scores[id] in (0, 1) for scores in (before, after) for id in ids)
    p_value = _sign_test(gaps_N) if binary else _flip_test(gaps_N, resamples, max_exact_flips)
    return float(gaps_N.mean()), low, high, p_value


# ── one rate ─────────────────────────────────────────────────────────────────────────────────────


def _wilson(mean: float, count: int, level: float) -> tuple[float, float]:
    z = NormalDist().inv_cdf((1 + level) / 2)
    centre = (mean + z * z / (2 * count)) / (1 + z * z / count)
    reach = z / (1 + z * z / count) * math.sqrt(mean * (1 - mean) / count + (z / count / 2) ** 2)
    # The mean is inside by algebra; rounding must not put it outside.
    return max(0.0, min(mean, centre - reach)), min(1.0, max(mean, centre + reach))


def _cluster_sums(
    scores: Sequence[float], clusters: Sequence[Hashable] | None, mean: float
) -> list[float]:
    """Deviations from the mean, added up within each cluster."""
    sums: dict[Hashable, float] = {}
    labels = range(len(scores)) if clusters is None else clusters
    for label, score in zip(labels, scores, strict=True):
        sums[label] = sums.get(label, 0.0) + score - mean
    return list(sums.values())


def _student_quantile(level: float, degrees: int) -> float:
    """t with P(|T| ≤ t) = level, by bisection on the angle atan(t / √degrees)."""
    if degrees > 1000:  # within 0.2% of the normal one
        return NormalDist().inv_cdf((1 + level) / 2)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_inside(middle, degrees) < level else (low, middle)
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _student_inside(angle: float, degrees: int) -> float:
    """P(|T| ≤ √degrees · tan(angle)): for whole degrees of freedom a finite sum of cosines."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = 0.0
    for k in range(1 + odd, degrees, 2):
        total += term
        term *= cosine * cosine * k / (k + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


# ── two evaluations ──────────────────────────────────────────────────────────────────────────────


def _bootstrap(gaps_N: Floats, resamples: int) -> tuple[float, float]:
    rng = np.random.default_rng(0)
    block = max(1, 1_000_000 // len(gaps_N))  # bounds the memory, not the result's accuracy
    means = [
        gaps_N[rng.integers(0, len(gaps_N), (min(block, resamples - done), len(gaps_N)))].mean(1)
        for done in range(0, resamples, block)
    ]
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return float(low), float(high)


def _sign_test(gaps_N: Floats) -> float:
    better, worse = int((gaps_N > 0).sum()), int((gaps_N < 0).sum())
    changed = better + worse
    ways, tail = 1, 0
    for k in range(min(better, worse) + 1):
        tail += ways
        ways = ways * (changed - k) // (k + 1)
    return min(1.0, 2 * tail / (1 << changed))


def _flip_test(gaps_N: Floats, resamples: int, max_exact_flips: int) -> float:
    changed_M = gaps_N[gaps_N != 0]
    observed = abs(changed_M.sum()) - 1e-9  # sums of the same numbers differ by rounding
    if len(changed_M) <= max_exact_flips:
        signs = np.array(list(product((-1.0, 1.0), repeat=len(changed_M))))
        return float((np.abs(signs @ changed_M) >= observed).mean())
    rng = np.random.default_rng(0)
    block = max(1, 1_000_000 // len(changed_M))
    extreme = 0
    for done in range(0, resamples, block):
        shape = (min(block, resamples - done), len(changed_M))
        signs = rng.integers(0, 2, shape) * 2.0 - 1.0
        extreme += int((abs(signs @ changed_M) >= observed).sum())
    return (extreme + 1) / (resamples + 1)  # the observed signs count as one of them
