"""Old weights on a server are told from rounding."""

from __future__ import annotations

import random

import pytest

from courtside.engines.served.weight_check import ProbeLogps, find_weight_problem


def probe(logps: list[float], *, noise: float, seed: int) -> ProbeLogps:
    draw = random.Random(seed)
    return ProbeLogps(trainer=tuple(logps), server=tuple(x + draw.gauss(0, noise) for x in logps))


def draw_change(size: float, seed: int) -> tuple[list[float], list[float]]:
    draw = random.Random(seed)
    before = [-draw.expovariate(0.5) for _ in range(256)]
    return before, [x + draw.gauss(0, size) for x in before]


@pytest.mark.parametrize(("noise", "size"), [(1e-5, 1e-3), (2e-2, 0.1)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("seed", range(5))
def test_a_change_that_arrived_passes_and_a_stale_one_does_not(
    noise: float, size: float, seed: int
) -> None:
    before, after = draw_change(size, seed)
    start = probe(before, noise=noise, seed=seed)
    arrived = probe(after, noise=noise, seed=seed + 100)
    assert find_weight_problem(arrived, [start], max_difference=0.2) is None
    stale = ProbeLogps(trainer=tuple(after), server=start.server)
    problem = find_weight_problem(stale, [start], max_difference=0.2)
    assert problem is not None and "changed by 0%" in problem


def test_a_change_below_the_rounding_says_nothing() -> None:
    """A step that is too small to see cannot be told from none; later ones add up."""
    before, after = draw_change(1e-4, 0)
    start = probe(before, noise=2e-2, seed=0)
    stale = ProbeLogps(trainer=tuple(after), server=start.server)
    assert find_weight_problem(stale, [start], max_difference=0.2) is None


def test_the_previous_version_is_compared_too() -> None:
    """A server that is one version behind has nearly all of the change since the start."""
    start, later = draw_change(0.1, 1)
    latest = [x + 0.01 for x in later]
    earlier = [probe(start, noise=2e-3, seed=1), probe(later, noise=2e-3, seed=2)]
    behind = ProbeLogps(trainer=tuple(latest), server=earlier[1].server)
    assert find_weight_problem(behind, earlier[:1], max_difference=0.2) is None
    assert "changed by 0%" in str(find_weight_problem(behind, earlier, max_difference=0.2))


def test_a_part_that_stays_behind_is_seen_by_the_difference() -> None:
    """Nearly all of the change arrived, as where all layers were replaced but the LM head."""
    before, after = draw_change(0.1, 2)
    start = probe(before, noise=1e-5, seed=1)
    partial = [b + 0.9 * (a - b) for b, a in zip(before, after, strict=True)]
    current = ProbeLogps(trainer=tuple(after), server=tuple(partial))
    problem = find_weight_problem(current, [start], max_difference=0.2)
    assert problem is not None and "a part of the weights did not arrive" in problem
    rounded = probe(after, noise=9e-4, seed=3)
    assert find_weight_problem(rounded, [start], max_difference=0.2) is None


@pytest.mark.parametrize("wrong", [0.3, float("nan")])
def test_a_large_difference_is_a_problem_at_once(wrong: float) -> None:
    logps = ProbeLogps(trainer=(-1.0, -2.0), server=(-1.0 + wrong, -2.0))
    assert "nats a token" in str(find_weight_problem(logps, [], max_difference=0.05))
