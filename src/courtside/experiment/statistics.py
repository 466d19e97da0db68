"""Intervals and tests over seeds: Student's t, paired and Welch's differences, Holm's correction,
equivalence, the smallest detectable effect. Pure functions of numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

LEVEL = 0.95
POWER = 0.8


# ── Student's t ──────────────────────────────────────────────────────────────────────────────────


def student_cdf(t: float, freedom: float) -> float:
    """P(T ≤ t), also for fractional degrees of freedom."""
    tail = 0.5 * _incomplete_beta(freedom / (freedom + t * t), freedom / 2)
    return tail if t < 0 else 1 - tail


def student_quantile(probability: float, freedom: float) -> float:
    """t with P(T ≤ t) = probability, by bisection."""
    assert 0 < probability < 1
    if probability < 0.5:
        return -student_quantile(1 - probability, freedom)
    low, high = 0.0, 1.0
    while student_cdf(high, freedom) < probability:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def _incomplete_beta(x: float, a: float, b: float = 0.5) -> float:
    """The regularized incomplete beta function I_x(a, b)."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(log_front + a * math.log(x) + b * math.log1p(-x))
    # Each side's continued fraction converges fast on its side of the mean.
    if x < (a + 1) / (a + b + 2):
        return front * _beta_fraction(x, a, b) / a
    return 1 - front * _beta_fraction(1 - x, b, a) / b


def _beta_fraction(x: float, a: float, b: float) -> float:
    """The continued fraction of the incomplete beta function, by Lentz's method."""
    tiny = 1e-300
    c, d = 1.0, 1 - (a + b) * x / (a + 1)
    d = 1 / (d if abs(d) > tiny else tiny)
    value = d
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for coefficient in (even, odd):
            d, c = 1 + coefficient * d, 1 + coefficient / c
            d, c = 1 / (d if abs(d) > tiny else tiny), c if abs(c) > tiny else tiny
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            return value
    raise AssertionError(f"no convergence at x = {x}, a = {a}, b = {b}")


# ── means and differences ────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean or a difference of means, with its variance and their degrees of freedom."""

    mean: float
    variance: float
    """Of the mean."""
    freedom: float
    method: str
    num_seeds: int

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        if self.variance == 0:
            return self.mean, self.mean
        half = student_quantile((1 + level) / 2, self.freedom) * math.sqrt(self.variance)
        return self.mean - half, self.mean + half

    def p_value(self) -> float:
        """Two-sided, of a mean of 0. Seeds that do not vary at all decide nothing: 1."""
        if self.variance == 0:
            return 1.0
        return 2 * (1 - student_cdf(abs(self._t(0.0)), self.freedom))

    def p_equivalence(self, margin: float) -> float:
        """Of the larger of two one-sided tests (TOST): the mean is at most −margin, at least
        +margin. Below 0.05 where the 90% interval lies within the margin."""
        if self.variance == 0:
            return 1.0
        below = 1 - student_cdf(self._t(-margin), self.freedom)
        above = student_cdf(self._t(margin), self.freedom)
        return max(below, above)

    def _t(self, value: float) -> float:
        return (self.mean - value) / math.sqrt(self.variance)

    def widen(self, variance: float, freedom: float) -> Estimate:
        """With an independent source of variance, by Satterthwaite's degrees of freedom."""
        parts = [(self.variance, self.freedom), (variance, freedom)]
        return replace(self, variance=self.variance + variance, freedom=combine_freedom(parts))


def combine_freedom(parts: Sequence[tuple[float, float]]) -> float:
    """Satterthwaite's degrees of freedom of a sum of variances, each with its own."""
    total = sum(variance for variance, _ in parts)
    if total == 0:
        return min(freedom for _, freedom in parts)
    return total**2 / sum(variance**2 / freedom for variance, freedom in parts)


def estimate_mean(values: Sequence[float], method: str = "mean") -> Estimate:
    assert len(values) > 1, "one value has no variance"
    return Estimate(
        mean=statistics.fmean(values),
        variance=statistics.variance(values) / len(values),
        freedom=len(values) - 1,
        method=method,
        num_seeds=len(values),
    )


def estimate_paired(first: Sequence[float], other: Sequence[float]) -> Estimate:
    """Mean of first minus other, where values at a place belong to the same seed."""
    return estimate_mean([x - y for x, y in zip(first, other, strict=True)], "paired")


def estimate_welch(first: Sequence[float], other: Sequence[float]) -> Estimate:
    """Mean of first minus mean of other, for independent runs of unequal variance."""
    one_sided = [estimate_mean(values) for values in (first, other)]
    return Estimate(
        mean=one_sided[0].mean - one_sided[1].mean,
        variance=sum(part.variance for part in one_sided),
        freedom=combine_freedom([(part.variance, part.freedom) for part in one_sided]),
        method="welch",
        num_seeds=min(part.num_seeds for part in one_sided),
    )


# ── several tests, and what an experiment can detect ─────────────────────────────────────────────


def adjust_holm(p_values: Sequence[float], num_tests: int | None = None) -> list[float]:
    """Holm's step-down adjusted p-values. `num_tests`: of the whole family, where some tests are
    not there yet; those count as not significant."""
    num_tests = num_tests or len(p_values)
    assert num_tests >= len(p_values)
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (num_tests - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted


def detectable_effect(sd: float, num_seeds: int, num_tests: int = 1) -> float:
    """The smallest mean of paired differences with that standard deviation that a two-sided test
    at 5%, divided by the number of tests, finds in four of five experiments."""
    return detectable_difference(sd / math.sqrt(num_seeds), num_seeds - 1, num_tests)


def detectable_difference(error: float, freedom: float, num_tests: int = 1) -> float:
    """The same for a difference with that standard error, whatever it is made of."""
    alpha = (1 - LEVEL) / num_tests
    return _smallest(lambda shift: t_power(shift, freedom, alpha) >= POWER) * error


def t_power(shift: float, freedom: float, alpha: float) -> float:
    """Of a two-sided t test of a mean that is `shift` standard errors from 0. By integration over
    the chi distribution of the measured standard error."""
    threshold = student_quantile(1 - alpha / 2, freedom)
    log_norm = (freedom / 2 - 1) * math.log(2) + math.lgamma(freedom / 2)
    span, num_points = math.sqrt(freedom) + 10, 2000
    normal, total = statistics.NormalDist(), 0.0
    for k in range(num_points):
        chi = span * (k + 0.5) / num_points
        density = math.exp((freedom - 1) * math.log(chi) - chi * chi / 2 - log_norm)
        reach = threshold * chi / math.sqrt(freedom)
        total += density * (normal.cdf(shift - reach) + normal.cdf(-shift - reach))
    return total * span / num_points


def _smallest(is_enough: Callable[[float], bool]) -> float:
    low, high = 0.0, 1.0
    while not is_enough(high):
        high *= 2
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high
