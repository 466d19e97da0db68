"""Statistics of experiments: against published values, naive references and simulated coverage."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from courtside.experiment.statistics import (
    adjust_holm,
    detectable_effect,
    estimate_mean,
    estimate_paired,
    estimate_welch,
    student_cdf,
    student_quantile,
    t_power,
)


@pytest.mark.parametrize(
    ("probability", "freedom", "t"),
    [  # the printed tables
        (0.975, 1, 12.706), (0.975, 2, 4.303), (0.975, 4, 2.776), (0.975, 7, 2.365),
        (0.95, 7, 1.895), (0.995, 9, 3.250), (0.975, 30, 2.042), (0.9995, 3, 12.924),
    ],
)  # fmt: skip
def test_quantiles_are_those_of_the_tables(probability: float, freedom: float, t: float) -> None:
    assert student_quantile(probability, freedom) == pytest.approx(t, abs=6e-4)
    assert student_quantile(1 - probability, freedom) == pytest.approx(-t, abs=6e-4)


@pytest.mark.parametrize("freedom", [1.0, 2.0, 2.31, 4.5, 17.9, 300.0])
@pytest.mark.parametrize("t", [-3.0, -0.4, 0.0, 1.2, 6.0])
def test_the_distribution_is_the_integral_of_the_density(t: float, freedom: float) -> None:
    log_norm = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    norm = math.exp(log_norm) / math.sqrt(freedom * math.pi)
    points = np.linspace(0, t, 20_001)
    density = norm * (1 + points**2 / freedom) ** (-(freedom + 1) / 2)
    assert student_cdf(t, freedom) == pytest.approx(0.5 + np.trapezoid(density, points), abs=1e-8)


def test_a_published_paired_test() -> None:
    """Student's sleep data (1908): extra hours by two drugs in ten patients; t = −4.0621 with 9
    degrees of freedom, p = 0.002833, interval −2.4599 to −0.7001."""
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    paired = estimate_paired(first, second)
    assert paired.mean / math.sqrt(paired.variance) == pytest.approx(-4.0621, abs=5e-5)
    assert paired.p_value() == pytest.approx(0.002833, abs=5e-7)
    assert paired.interval() == pytest.approx((-2.4598858, -0.7001142), abs=5e-7)
    # The same by Welch: t = −1.8608, 17.776 degrees of freedom, p = 0.07939.
    welch = estimate_welch(first, second)
    assert welch.mean / math.sqrt(welch.variance) == pytest.approx(-1.8608, abs=5e-5)
    assert welch.freedom == pytest.approx(17.776, abs=5e-4)
    assert welch.p_value() == pytest.approx(0.07939, abs=5e-6)
    assert welch.interval() == pytest.approx((-3.3654832, 0.2054832), abs=5e-7)


def test_a_side_that_does_not_vary_has_no_degrees_of_freedom() -> None:
    welch = estimate_welch([1.0, 2.0], [0.0, 0.0])
    assert welch.freedom == 1
    assert welch.interval()[1] - 1.5 == pytest.approx(12.706 * 0.5, abs=1e-3)


def test_seeds_that_agree_to_the_last_digit_decide_nothing() -> None:
    paired = estimate_paired([0.5, 0.6], [0.25, 0.35])
    exact = estimate_paired([0.5, 0.75], [0.25, 0.5])
    assert exact.variance == 0 and exact.p_value() == exact.p_equivalence(1.0) == 1.0
    assert exact.interval() == (0.25, 0.25) and paired.mean == pytest.approx(0.25)


def test_equivalence_is_the_90_percent_interval_within_the_margin() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        values = rng.normal(0.01, 0.03, size=6).tolist()
        estimate = estimate_mean(values)
        low, high = estimate.interval(0.9)
        assert (estimate.p_equivalence(0.03) < 0.05) == (low > -0.03 and high < 0.03)
    # By hand: mean 0, standard error 1 of 5 values: P(T > 2) with 4 degrees of freedom is 0.0581.
    spread = math.sqrt(5 / 2.5)
    flat = estimate_mean([spread * x for x in (-2.0, -1.0, 0.0, 1.0, 2.0)])
    assert flat.variance == pytest.approx(1.0)
    assert flat.p_equivalence(2.0) == pytest.approx(0.05806, abs=5e-6)


def test_holm_as_in_textbooks() -> None:
    # p-values 0.01, 0.04, 0.03, 0.005: times 3, 1, 2, 4, never falling.
    assert adjust_holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert adjust_holm([0.5, 0.9]) == [1.0, 1.0]
    # Tests that are not there yet count.
    assert adjust_holm([0.01], num_tests=15) == pytest.approx([0.15])


def test_holm_keeps_the_family_wise_error() -> None:
    rng = np.random.default_rng(2)
    wrong = sum(min(adjust_holm(rng.uniform(size=5).tolist())) < 0.05 for _ in range(4000))
    assert wrong / 4000 == pytest.approx(0.05, abs=0.01)


@pytest.mark.parametrize(
    ("num_seeds", "effect", "power"),
    # Cohen's tables and G*Power for paired t tests at 5%, two-sided.
    [(34, 0.5, 0.808), (15, 0.8, 0.821), (10, 1.0, 0.803), (5, 1.0, 0.401)],
)
def test_power_is_that_of_published_tables(num_seeds: int, effect: float, power: float) -> None:
    assert t_power(effect * num_seeds**0.5, num_seeds - 1, 0.05) == pytest.approx(power, abs=2e-3)


def test_the_detectable_effect_is_detected_in_four_of_five_studies() -> None:
    rng = np.random.default_rng(3)
    for num_tests in (1, 5):
        effect = detectable_effect(0.04, 8, num_tests)
        limit = 0.05 / num_tests
        hits = sum(
            estimate_mean(rng.normal(effect, 0.04, size=8).tolist()).p_value() < limit
            for _ in range(1500)
        )
        assert hits / 1500 == pytest.approx(0.8, abs=0.03)
    assert detectable_effect(0.0, 8) == 0.0


@pytest.mark.parametrize("sizes", [(3, 3), (8, 8), (3, 8)])
def test_intervals_cover_the_truth_in_95_of_100_studies(sizes: tuple[int, int]) -> None:
    rng = np.random.default_rng(4)
    covered = {"paired": 0, "welch": 0}
    for _ in range(1500):
        shared = rng.normal(0, 0.05, size=max(sizes))
        first = (0.3 + shared + rng.normal(0, 0.01, size=max(sizes)))[: sizes[0]]
        other = (0.2 + shared + rng.normal(0, 0.02, size=max(sizes)))[: sizes[1]]
        if sizes[0] == sizes[1]:
            low, high = estimate_paired(first.tolist(), other.tolist()).interval()
            covered["paired"] += low < 0.1 < high
        independent = rng.normal(0.2, 0.1, size=sizes[1])
        low, high = estimate_welch(first.tolist(), independent.tolist()).interval()
        covered["welch"] += low < 0.1 < high
    assert sizes[0] != sizes[1] or covered["paired"] / 1500 == pytest.approx(0.95, abs=0.015)
    # Welch's is approximate: with three seeds it errs on the safe side.
    assert 0.935 < covered["welch"] / 1500 < 0.985


def test_pairing_takes_off_what_a_seed_has_in_common() -> None:
    shared = [0.0, 0.1, 0.2, 0.3]
    first, other = [x + 0.05 + 0.001 * i for i, x in enumerate(shared)], shared
    paired, welch = estimate_paired(first, other), estimate_welch(first, other)
    assert paired.mean == pytest.approx(welch.mean) and paired.variance < welch.variance / 1000
    assert statistics.fmean(first) - statistics.fmean(other) == pytest.approx(paired.mean)
