"""Sampling: frequencies, truncation and log-probs, against naive references."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from courtside.engines.base import Sampling
from courtside.engines.generation.sampler import (
    CPU_CHUNK,
    sample_tokens,
    truncate_logits,
    uniforms_for,
)

GRID = 20_000


def sampling(**options: float) -> Sampling:
    return Sampling(max_new_tokens=1, **options)  # type: ignore[arg-type]


def measure(logits_V: Tensor, config: Sampling) -> tuple[Tensor, Tensor]:
    """Frequency of each token, to 1/GRID, and the log-prob that is returned with it."""
    uniform_B = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    ids_B, logp_B = sample_tokens(logits_V.expand(GRID, -1), uniform_B, config)
    logp_V = torch.full_like(logits_V, -torch.inf)
    logp_V[ids_B] = logp_B
    return torch.bincount(ids_B, minlength=len(logits_V)) / GRID, logp_V


def naive(logits: list[float], config: Sampling) -> list[float]:
    """Probabilities after temperature, top-k, top-p and min-p, token by token in Python."""
    weights = [math.exp((x - max(logits)) / config.temperature) for x in logits]
    by_rank = sorted(range(len(logits)), key=lambda i: -weights[i])
    retained = by_rank[: config.top_k] if config.top_k else by_rank
    total, before, nucleus = sum(weights[i] for i in retained), 0.0, []
    for token in retained:
        if before / total < config.top_p:
            nucleus.append(token)
        before += weights[token]
    retained = [i for i in nucleus if weights[i] >= config.min_p * weights[by_rank[0]]]
    total = sum(weights[i] for i in retained)
    return [weights[i] / total if i in retained else 0.0 for i in range(len(logits))]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.7, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_each_token_is_sampled_as_often_as_it_is_likely(options: dict[str, float]) -> None:
    logits_V = torch.randn(12, generator=torch.Generator().manual_seed(3)) * 1.5
    config = sampling(**options)
    expected_V = torch.tensor(naive(logits_V.tolist(), config))
    frequency_V, logp_V = measure(logits_V, config)
    # Both boundaries of a token lie anywhere within their grid cells.
    torch.testing.assert_close(frequency_V, expected_V, rtol=0, atol=1.01 / GRID)
    torch.testing.assert_close(logp_V.exp(), expected_V, rtol=1e-5, atol=1e-7)


distinct = st.lists(st.integers(-40, 40), min_size=1, max_size=12, unique=True).map(
    lambda integers: [n / 7 for n in integers]
)


@settings(deadline=None)
@given(
    logits=distinct,
    temperature=st.floats(0.3, 3),
    top_k=st.integers(0, 14),
    top_p=st.floats(0.01, 1),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 0.99)),
)
def test_truncation_matches_the_naive_loop(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    config = sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    # A token within rounding of a limit may go either way in float32.
    for epsilon in (-1e-4, 1e-4):
        near = sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p if top_p == 1 else min(1.0, top_p + epsilon),
            min_p=min_p and min_p * (1 + epsilon),
        )
        assume([p > 0 for p in naive(logits, near)] == [p > 0 for p in naive(logits, config)])
    logp_1V = torch.log_softmax(torch.tensor([logits]) / temperature, -1)
    got_V = truncate_logits(logp_1V, config)[0].exp()
    torch.testing.assert_close(got_V, torch.tensor(naive(logits, config)), rtol=1e-4, atol=1e-6)


@settings(deadline=None)
@given(
    logits=st.lists(st.sampled_from([-2.0, -1.0, 0.0, 1.0]), min_size=1, max_size=10),
    top_p=st.floats(0.02, 0.98),
    top_k=st.integers(1, 10),
)
def test_truncation_among_equally_likely_tokens(
    logits: list[float], top_p: float, top_k: int
) -> None:
    """Which of two equal tokens stays is open; config many, and config much mass, is not."""
    probs_V = torch.softmax(torch.tensor(logits, dtype=torch.float64), -1)
    logp_1V = probs_V.log().float()[None]

    retained_V = truncate_logits(logp_1V, sampling(top_p=top_p))[0] > -torch.inf
    mass, smallest = float(probs_V[retained_V].sum()), float(probs_V[retained_V].min())
    assert mass >= top_p - 1e-6, "the nucleus reaches top_p"
    assert mass - smallest < top_p + 1e-6, "and is the smallest that does"
    assert retained_V.all() or float(probs_V[~retained_V].max()) <= smallest + 1e-9

    retained_V = truncate_logits(logp_1V, sampling(top_k=top_k))[0] > -torch.inf
    assert int(retained_V.sum()) >= min(top_k, len(logits))
    assert retained_V.all() or float(probs_V[~retained_V].max()) < float(probs_V[retained_V].min())


def test_no_truncation_changes_nothing() -> None:
    logp_BV = torch.log_softmax(torch.randn(3, 7, generator=torch.Generator().manual_seed(0)), -1)
    assert truncate_logits(logp_BV, sampling()) is logp_BV
    assert torch.equal(truncate_logits(logp_BV, sampling(top_k=7)).argmax(-1), logp_BV.argmax(-1))


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.9}])
@pytest.mark.parametrize("uniform", [0.0, 2.0**-53, 0.5, 1 - 2.0**-53])
def test_a_truncated_token_is_never_sampled(options: dict[str, float], uniform: float) -> None:
    """Not even at the ends of the unit interval, with truncated tokens at both ends."""
    logits_1V = torch.tensor([[-3.0, -3.0, 2.0, -2.0, 2.1, -3.0, -3.0]])
    ids_1, logp_1 = sample_tokens(
        logits_1V, torch.tensor([uniform], dtype=torch.float64), sampling(**options)
    )
    assert int(ids_1) in (2, 4)
    assert math.isfinite(float(logp_1))


def test_the_end_of_a_large_vocabulary_is_sampled_at_its_rate() -> None:
    vocab_size = 150_000
    logits_V = torch.zeros(vocab_size)
    uniform_B = 1 - (torch.arange(60, dtype=torch.float64) + 0.5) / vocab_size
    ids_B, _ = sample_tokens(logits_V.expand(60, -1), uniform_B, sampling())
    assert ids_B.tolist() == list(range(vocab_size - 1, vocab_size - 61, -1))


def test_tokens_below_float32_resolution_are_sampled_at_their_rate() -> None:
    """After a near-certain token: 2e-9 each, where a float32 sum near 1 moves in steps of 6e-8."""
    for count in (40, 700, 1151):  # one block, a padded one, several blocks
        logits_V = torch.tensor([0.0, *[-20.0] * count])
        rare = math.exp(-20)
        share = rare / (1 + count * rare)
        uniform_B = 1 - (torch.arange(count, dtype=torch.float64) + 0.5) * share
        ids_B, logp_B = sample_tokens(logits_V.expand(count, -1), uniform_B, sampling())
        assert ids_B.tolist() == list(range(count, 0, -1))
        torch.testing.assert_close(logp_B, torch.full((count,), math.log(share)))


@settings(deadline=None, max_examples=200)
@given(
    logits=st.lists(
        st.one_of(st.floats(-30, 5, width=32), st.just(-math.inf)), min_size=1, max_size=300
    ),
    uniform=st.one_of(st.floats(0, 1, exclude_max=True), st.just(0.0), st.just(1 - 2**-53)),
    times=st.integers(1, 4),
)
def test_sampling_by_blocks_equals_one_cumulative_sum(
    logits: list[float], uniform: float, times: int
) -> None:
    """Up to rounding at the boundary between two tokens; never a token of weight 0."""
    assume(max(logits) > -math.inf)
    logits_V = torch.tensor(logits * times)
    uniform_1 = torch.tensor([uniform], dtype=torch.float64)
    ids_1, logp_1 = sample_tokens(logits_V[None], uniform_1, sampling())
    exact_V = torch.softmax(logits_V.double(), -1)
    token = int(ids_1)
    assert token < len(logits_V) and exact_V[token] > 0
    torch.testing.assert_close(logp_1[0].double(), exact_V[token].log(), rtol=1e-5, atol=2e-6)
    end = float(exact_V[: token + 1].sum())
    assert end - float(exact_V[token]) - 1e-6 <= uniform <= end + 1e-6


@pytest.mark.parametrize("vocab_size", [1, 63, 64, 300])
def test_nan_logits_sample_some_token(vocab_size: int) -> None:
    """The loss check reports them; nothing is indexed out of bounds before."""
    ids_B, logp_B = sample_tokens(
        torch.full((2, vocab_size), math.nan), torch.tensor([0.0, 0.9]), sampling()
    )
    assert ((ids_B >= 0) & (ids_B < vocab_size)).all() and logp_B.isnan().all()


def test_greedy_sampling_takes_the_argmax_with_log_prob_0() -> None:
    logits_BV = torch.tensor([[0.0, 3.0, 1.0], [2.0, -1.0, 1.9]])
    ids_B, logp_B = sample_tokens(
        logits_BV, torch.tensor([0.999, 0.999]), sampling(temperature=0.0)
    )
    assert ids_B.tolist() == [1, 0]
    assert logp_B.tolist() == [0.0, 0.0]


@settings(deadline=None)
@given(seed=st.integers(0, 2**63 - 1))
def test_random_numbers_depend_on_the_seed_alone(seed: int) -> None:
    uniforms = uniforms_for(seed, 9)
    assert torch.equal(uniforms, uniforms_for(seed, 9))
    assert not torch.equal(uniforms, uniforms_for(seed ^ 1, 9))
    assert ((uniforms >= 0) & (uniforms < 1)).all()


def test_a_shorter_budget_uses_the_same_random_numbers() -> None:
    """So that raising max_new_tokens only makes truncated samples longer."""
    for count in (1, 5, 15, 16, 17, 40):
        assert torch.equal(uniforms_for(11, count), uniforms_for(11, 60)[:count]), count


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}])
def test_many_rows_are_sampled_in_chunks_as_each_alone(options: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(0)
    logits_BV = torch.randn(7, CPU_CHUNK // 3, generator=generator)  # three rows a chunk
    uniform_B = torch.rand(7, dtype=torch.float64, generator=generator)
    ids_B, logp_B = sample_tokens(logits_BV, uniform_B, sampling(**options))
    for row in range(7):
        alone = sample_tokens(logits_BV[row][None], uniform_B[row][None], sampling(**options))
        assert torch.equal(alone[0], ids_B[row][None]) and torch.equal(alone[1], logp_B[row][None])
