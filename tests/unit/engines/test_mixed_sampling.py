"""Mixed sampling: tokens have the probability that is reported, and both models see them."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.tiny_model import tiny_model, tiny_tokenizer
from torch import Tensor

from courtside.engines.base import SampleRequest, Sampling
from courtside.engines.generation.sampler import uniforms_for
from courtside.engines.local import LocalEngine
from courtside.engines.mixed_sampling import (
    MixedRequest,
    MixedSampler,
    mix_distributions,
    sample_mixed_tokens,
)
from courtside.errors import ModelError
from courtside.losses.policy_gradient import policy_gradient

V, K = 9, 4
CASES = [(seed, temperature) for seed in range(3) for temperature in (0.7, 1.0)]


def make_logits(seed: int) -> tuple[Tensor, Tensor]:
    """Of a student and a teacher that disagree, in float64."""
    draw = torch.Generator().manual_seed(seed)
    student_V, teacher_V = 2 * torch.randn(2, V, dtype=torch.float64, generator=draw)
    return student_V, teacher_V


def naive_mixture(student_V: Tensor, teacher_V: Tensor, temperature: float) -> tuple[Any, Any]:
    """P by the definition, token by token; and S."""
    pi = [math.exp(x / temperature) for x in student_V.tolist()]
    q = [math.exp(x / temperature) for x in teacher_V.tolist()]
    pi, q = [x / sum(pi) for x in pi], [x / sum(q) for x in q]
    support = sorted(range(V), key=lambda y: -q[y])[:K]
    mass, lost = sum(q[y] for y in support), 1 - sum(pi[y] for y in support)
    return [pi[y] + lost * q[y] / mass if y in support else 0.0 for y in range(V)], support


@pytest.mark.parametrize(("seed", "temperature"), CASES)
def test_the_mixture_is_a_distribution_on_the_teachers_top_k(seed: int, temperature: float) -> None:
    student_V, teacher_V = make_logits(seed)
    expected, support = naive_mixture(student_V, teacher_V, temperature)
    ids_BK, logp_BK, teacher_BK = mix_distributions(
        student_V[None], teacher_V[None], temperature=temperature, top_k=K
    )
    assert ids_BK[0].tolist() == support
    torch.testing.assert_close(
        logp_BK[0].exp(), torch.tensor([expected[y] for y in support], dtype=torch.float64)
    )
    assert float(logp_BK.exp().sum()) == pytest.approx(1, abs=1e-12) == sum(expected)
    assert float(teacher_BK.exp().sum()) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(("seed", "temperature"), CASES)
def test_frequencies_are_the_reported_probabilities(seed: int, temperature: float) -> None:
    """A test of proportions: each of the tokens within 4.5 standard errors."""
    student_V, teacher_V = make_logits(seed)
    expected, support = naive_mixture(student_V, teacher_V, temperature)
    num = 200_000
    uniform_B2 = torch.rand(num, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    ids_B, logp_B, replaced_B = sample_mixed_tokens(
        student_V.expand(num, V), teacher_V.expand(num, V), uniform_B2,
        Sampling(max_new_tokens=1, temperature=temperature), top_k=K,
    )  # fmt: skip
    counts = torch.bincount(ids_B, minlength=V).tolist()
    for token, probability in enumerate(expected):
        error = math.sqrt(probability * (1 - probability) / num)
        assert abs(counts[token] / num - probability) <= 4.5 * error
        if counts[token]:
            logp = logp_B[ids_B == token]
            assert float((logp - math.log(probability)).abs().max()) < 1e-9
    pi_V = (student_V / temperature).softmax(-1)
    lost = 1 - float(pi_V[support].sum())
    error = math.sqrt(lost * (1 - lost) / num)
    assert 0.05 < lost < 0.95 and abs(float(replaced_B.double().mean()) - lost) <= 4.5 * error


@pytest.mark.parametrize("seed", range(3))
def test_importance_weights_give_the_gradient_on_the_support(seed: int) -> None:
    """Σ_y P(y)·∇(−π/P·A) over all tokens is ∇(−Σ_S π·A): the on-policy gradient without what π
    gives to tokens outside S, where P is 0."""
    student_V, teacher_V = make_logits(seed)
    student_V.requires_grad_()
    advantage_V = torch.randn(V, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    ids_BK, logp_BK, _ = mix_distributions(
        student_V[None].detach(), teacher_V[None], temperature=1.0, top_k=K
    )
    support_K, sampler_logp_K = ids_BK[0], logp_BK[0]
    student_logp_K = student_V.log_softmax(-1)[support_K]
    surrogate_K = policy_gradient(
        student_logp_K, advantage_V[support_K], sampler_logp_T=sampler_logp_K
    )
    (ours_V,) = torch.autograd.grad((sampler_logp_K.exp() * surrogate_K).sum(), student_V)
    on_support = -(student_V.softmax(-1) * advantage_V)[support_K].sum()
    (expected_V,) = torch.autograd.grad(on_support, student_V)
    torch.testing.assert_close(ours_V, expected_V, rtol=1e-10, atol=1e-12)
    whole = -(student_V.softmax(-1) * advantage_V).sum()
    (whole_V,) = torch.autograd.grad(whole, student_V)
    assert float((whole_V - expected_V).abs().max()) > 1e-3, "something is lost outside S"


def test_a_proposal_that_almost_never_leaves_the_support_keeps_its_digits() -> None:
    student_V = torch.tensor([[0.0, -200.0, -1.0]])
    teacher_V = torch.tensor([[1.0, -5.0, -6.0]])
    _, logp_BK, _ = mix_distributions(student_V, teacher_V, temperature=1.0, top_k=2)
    # P of token 1 is its own π, e^-200, and the share of token 2's mass that q_S gives it.
    expected = math.log(math.exp(-1) / (1 + math.exp(-1)) * math.exp(-6) / (1 + math.exp(-6)))
    assert float(logp_BK[0, 1]) == pytest.approx(expected, rel=1e-5)


# ── two models ───────────────────────────────────────────────────────────────────────────────────

STUDENT = LocalEngine(tiny_model(), tiny_tokenizer(), name="student")
TEACHER = LocalEngine(tiny_model(seed=1, layers=3), tiny_tokenizer(), name="teacher")
SAMPLING = Sampling(max_new_tokens=8, temperature=0.8)


def make_requests(num: int = 6) -> list[MixedRequest]:
    """Prompts of different lengths; the teacher's are longer by different amounts."""
    draw = torch.Generator().manual_seed(2)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(2, 258, (count,), generator=draw).tolist())

    requests = []
    for n in range(num):
        prompt = ids(5 + n // 2)
        requests.append(
            MixedRequest(prompt_ids=prompt, teacher_prompt_ids=ids(7 - n) + prompt, seed=100 + n)
        )
    return requests


def naive_logits(model: Any, ids: tuple[int, ...]) -> Tensor:
    logits_V: Tensor = model(input_ids=torch.tensor([ids])).logits[0, -1]
    return logits_V


@torch.no_grad()
def naive_sample(request: MixedRequest, top_k: int, teacher: Any) -> tuple[list[int], Any, int]:
    """Token by token, each with a whole forward pass of both models."""
    uniform_N2 = uniforms_for(request.seed, 2 * SAMPLING.max_new_tokens).view(-1, 2)
    ids: list[int] = []
    logps, num_replaced = [], 0
    for uniform_2 in uniform_N2:
        token, logp, replaced = sample_mixed_tokens(
            naive_logits(STUDENT.model, (*request.prompt_ids, *ids))[None],
            naive_logits(teacher, (*request.teacher_prompt_ids, *ids))[None],
            uniform_2[None], SAMPLING, top_k=top_k,
        )  # fmt: skip
        ids.append(int(token))
        logps.append(float(logp))
        num_replaced += bool(replaced)
        if ids[-1] in STUDENT.eos_ids:
            break
    return ids, logps, num_replaced


@pytest.mark.parametrize("budget", [1, 65536])
@pytest.mark.parametrize("top_k", [1, 20, 258])
def test_both_models_continue_the_same_tokens(top_k: int, budget: int) -> None:
    student = LocalEngine(STUDENT.model, tiny_tokenizer(), name="student", max_batch_tokens=budget)
    requests = make_requests()
    sampler = MixedSampler(student=student, teacher=TEACHER, top_k=top_k)
    samples = sampler.sample(requests, SAMPLING)
    total = 0
    for request, (sample, num_replaced) in zip(requests, samples, strict=True):
        ids, logps, expected = naive_sample(request, top_k, TEACHER.model)
        assert list(sample.token_ids) == ids and num_replaced == expected
        assert list(sample.logp) == pytest.approx(logps, abs=1e-4)
        total += num_replaced
    if top_k == 258:
        assert total == 0
    else:
        assert total > 0


def test_with_the_whole_vocabulary_it_is_the_students_own_sample() -> None:
    requests = make_requests()
    sampler = MixedSampler(student=STUDENT, teacher=TEACHER, top_k=258)
    for request, (sample, _) in zip(requests, sampler.sample(requests, SAMPLING), strict=True):
        prompt = request.prompt_ids
        (plain,) = STUDENT.sample([SampleRequest(prompt_ids=prompt, seed=request.seed)], SAMPLING)
        # The first random number is the same; later ones are two a token.
        assert sample.token_ids[0] == plain.token_ids[0]
        assert sample.logp[0] == pytest.approx(plain.logp[0], abs=1e-4)


def test_the_teachers_weights_are_in_place_for_its_passes_alone() -> None:
    """As of a frozen self-teacher: one module, whose weights change from pass to pass."""
    weight = STUDENT.model.model.layers[0].mlp.down_proj.weight
    original = weight.detach().clone()

    @contextmanager
    def double_weights() -> Any:
        weight.data = 3 * original
        try:
            yield
        finally:
            weight.data = original

    other = tiny_model()
    other.model.layers[0].mlp.down_proj.weight.data = 3 * original
    sampler = MixedSampler(
        student=STUDENT, teacher=STUDENT, top_k=5, teacher_weights=double_weights
    )
    requests = make_requests()
    samples = sampler.sample(requests, SAMPLING)
    assert any(num_replaced for _, num_replaced in samples)
    for request, (sample, num_replaced) in zip(requests, samples, strict=True):
        ids, _, expected = naive_sample(request, 5, other)
        assert (list(sample.token_ids), num_replaced) == (ids, expected)


def test_prompts_that_do_not_fit_are_refused() -> None:
    sampler = MixedSampler(student=STUDENT, teacher=TEACHER, top_k=5)
    request = MixedRequest(prompt_ids=(5,), teacher_prompt_ids=(5,) * 505, seed=0)
    with pytest.raises(ModelError, match="513 tokens do not fit the context of teacher"):
        sampler.sample([request], SAMPLING)
