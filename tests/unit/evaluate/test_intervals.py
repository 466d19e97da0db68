import math
import random
from statistics import NormalDist, mean, stdev
from time import perf_counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from courtside.errors import UserError
from courtside.evaluate.intervals import _student_quantile, mean_interval, paired_difference

scores_01 = st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=40)
scores_any = st.lists(st.floats(0, 1), min_size=1, max_size=40)


@pytest.mark.parametrize(
    ("passed", "count", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (1, 2, 0.0945, 0.9055),
     (50, 100, 0.4038, 0.5962)],
)  # fmt: skip
def test_wilson(passed: int, count: int, low: float, high: float) -> None:
    interval = mean_interval([1.0] * passed + [0.0] * (count - passed))
    assert interval == pytest.approx((passed / count, low, high), abs=5e-5)


@pytest.mark.parametrize(
    ("level", "degrees", "expected"),
    [(0.95, 1, 12.7062), (0.95, 2, 4.3027), (0.95, 3, 3.1824), (0.95, 9, 2.2622),
     (0.95, 10, 2.2281), (0.99, 5, 4.0321), (0.9, 30, 1.6973), (0.95, 120, 1.9799),
     (0.95, 1000, 1.9623), (0.95, 5000, 1.9600)],
)  # fmt: skip
def test_student_quantiles_of_the_tables(level: float, degrees: int, expected: float) -> None:
    assert _student_quantile(level, degrees) == pytest.approx(expected, abs=5e-5)


def test_fractional_scores_use_student() -> None:
    scores = [0.25, 0.5, 0.75, 0.5, 0.25]
    reach = 2.7764 * stdev(scores) / math.sqrt(5)
    centre = mean(scores)
    expected = (centre, centre - reach, centre + reach)
    assert mean_interval(scores) == pytest.approx(expected, abs=1e-4)


def test_clusters_of_equal_size_are_their_means() -> None:
    rng = random.Random(0)
    tasks = {f"task {i}": [rng.random() for _ in range(4)] for i in range(12)}
    flat = [score for scores in tasks.values() for score in scores]
    labels = [name for name, scores in tasks.items() for _ in scores]
    means = [mean(scores) for scores in tasks.values()]
    assert mean_interval(flat, clusters=labels) == pytest.approx(mean_interval(means))


def test_copies_of_a_sample_add_no_certainty() -> None:
    scores = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0]
    labels = [i for i in range(6) for _ in range(50)]
    _, low, high = mean_interval([s for s in scores for _ in range(50)], clusters=labels)
    _, narrow_low, narrow_high = mean_interval([s for s in scores for _ in range(50)])
    assert low < narrow_low and high > narrow_high


def test_where_nothing_varies_the_interval_still_has_width() -> None:
    assert mean_interval([0.5] * 4) == mean_interval([0.0, 1.0, 0.0, 1.0])
    _, low, high = mean_interval([0.3])
    assert low < 0.1 and high > 0.8
    labels = [0, 0, 1, 1]
    assert mean_interval([1.0] * 4, clusters=labels) == mean_interval([1.0, 1.0])


@given(st.one_of(scores_01, scores_any), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_the_mean_is_inside(scores: list[float], level: float) -> None:
    centre, low, high = mean_interval(scores, level=level)
    assert 0 <= low <= centre <= high <= 1


def test_wilson_covers_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    for rate in (0.05, 0.5, 0.9):
        inside = 0
        for passed in rng.binomial(30, rate, 2000):
            _, low, high = mean_interval([1.0] * int(passed) + [0.0] * (30 - int(passed)))
            inside += low <= rate <= high
        assert 0.92 < inside / 2000 < 0.99


def test_no_scores() -> None:
    with pytest.raises(UserError, match="no scores"):
        mean_interval([])
    with pytest.raises(UserError, match="no tasks"):
        paired_difference({}, {})


# ── two evaluations ──────────────────────────────────────────────────────────────────────────────


def evaluation(scores: list[float]) -> dict[str, float]:
    return {f"task {i}": score for i, score in enumerate(scores)}


def test_sign_test_of_the_tables() -> None:
    # 1 task got worse, 9 better: 2 · (1 + 10) / 2¹⁰.
    before = evaluation([1.0] + [0.0] * 9 + [1.0] * 20)
    after = evaluation([0.0] + [1.0] * 9 + [1.0] * 20)
    difference, low, high, p_value = paired_difference(before, after)
    assert difference == pytest.approx(8 / 30)
    assert p_value == pytest.approx(22 / 1024)
    assert 0 < low < difference < high


def test_paired_interval_is_the_normal_one_for_many_tasks() -> None:
    rng = np.random.default_rng(0)
    before, after = rng.random(800), rng.random(800)
    gaps = after - before
    reach = NormalDist().inv_cdf(0.975) * gaps.std() / math.sqrt(800)
    difference, low, high, _ = paired_difference(evaluation(list(before)), evaluation(list(after)))
    assert difference == pytest.approx(gaps.mean())
    assert (low, high) == pytest.approx((difference - reach, difference + reach), abs=0.003)


def test_flips_are_exact_for_few_tasks() -> None:
    # All five better: only the two patterns of equal signs are as extreme.
    before, after = evaluation([0.1] * 5), evaluation([0.3, 0.4, 0.5, 0.6, 0.7])
    assert paired_difference(before, after)[3] == pytest.approx(2 / 32)


def test_flips_at_random_agree_with_the_exact_ones() -> None:
    rng = np.random.default_rng(3)
    before, after = evaluation(list(rng.random(12))), evaluation(list(rng.random(12)))
    exact = paired_difference(before, after)[3]
    assert paired_difference(before, after, max_exact_flips=3)[3] == pytest.approx(exact, abs=0.02)


@pytest.mark.parametrize("binary", [True, False])
def test_p_values_of_no_effect_are_small_as_rarely_as_they_say(
    binary: bool,
) -> None:
    rng = np.random.default_rng(0)
    small = 0
    for _ in range(400):
        before, after = rng.random((2, 25))
        if binary:
            before, after = before.round(), after.round()
        scores = evaluation(list(before)), evaluation(list(after))
        small += paired_difference(*scores, resamples=200)[3] <= 0.05
    assert small / 400 < 0.08


def test_nothing_changed() -> None:
    for scores in ([1.0, 0.0, 1.0], [0.5, 0.25, 1.0]):
        same = evaluation(scores)
        assert paired_difference(same, same) == (0.0, 0.0, 0.0, 1.0)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=8))
def test_swapping_the_two_mirrors_the_result(pairs: list[tuple[float, float]]) -> None:
    before, after = (evaluation([pair[side] for pair in pairs]) for side in (0, 1))
    difference, low, high, p_value = paired_difference(before, after)
    mirrored, _, _, same_p = paired_difference(after, before)
    assert mirrored == pytest.approx(-difference)
    assert same_p == pytest.approx(p_value)
    assert low - 1e-9 <= high and 0 < p_value <= 1


def test_the_order_of_tasks_does_not_matter() -> None:
    before, after = evaluation([0.1, 0.5, 0.9]), evaluation([0.4, 0.4, 1.0])
    backwards = dict(reversed(after.items()))
    assert paired_difference(before, after) == paired_difference(before, backwards)


def test_different_tasks_are_refused() -> None:
    with pytest.raises(UserError, match=r"2 are in only one of them, such as 'a'"):
        paired_difference({"a": 1.0, "b": 1.0}, {"b": 1.0, "c": 0.0})


def test_a_thousand_tasks_are_fast() -> None:
    rng = np.random.default_rng(0)
    before, after = (evaluation(list(rng.random(1000))) for _ in range(2))
    start = perf_counter()
    paired_difference(before, after)
    assert perf_counter() - start < 3
