"""Losses on sampled tokens: expectations by enumerating every token that could have been drawn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import references as textbook
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import logit_pairs
from torch import Tensor
from torch.testing import assert_close

from courtside.losses.policy_gradient import (
    SampledTokenLoss,
    gap_gate,
    group_advantage,
    hint_contrast,
    policy_gradient,
    reference_penalty,
    sampled_token_coefficients,
    teacher_gap,
    unlikely_advantage,
)
from courtside.losses.top_k import top_k_divergence, top_k_ids

close = partial(assert_close, rtol=1e-9, atol=1e-12)


def three_policies() -> tuple[Tensor, Tensor, Tensor]:
    """Logits of a student, log-probabilities of a teacher and of an older student."""
    student_V, teacher_V, drift_V = torch.randn(3, 7, dtype=torch.float64).unbind()
    sampler_V = (student_V + 0.4 * drift_V).log_softmax(-1)
    return student_V, teacher_V.log_softmax(-1), sampler_V


def gradients_by_token(loss: Callable[[Tensor], Tensor], student_V: Tensor) -> Tensor:
    """[V, V]: row y is the gradient of the loss by the logits, had token y been sampled."""
    logits_V = student_V.clone().requires_grad_()
    loss_V = loss(logits_V.log_softmax(-1))  # V positions; the token sampled at position y is y.
    rows = [torch.autograd.grad(x, logits_V, retain_graph=True)[0] for x in loss_V]
    return torch.stack(rows)


def expected(gradient_VV: Tensor, logp_V: Tensor) -> Tensor:
    return logp_V.exp() @ gradient_VV


def gradient_of(value: Callable[[list[Tensor]], Tensor], student_V: Tensor) -> Tensor:
    """Of a textbook function of the student's probabilities."""
    logits_V = student_V.clone().requires_grad_()
    return torch.autograd.grad(value(textbook.softmax_by_hand(logits_V)), logits_V)[0]


def kl_gradient(student_V: Tensor, teacher_logp_V: Tensor) -> Tensor:
    teacher = list(teacher_logp_V.exp())
    return gradient_of(lambda student: textbook.reverse_kl(student, teacher), student_V)


# ── sampled reverse KL ───────────────────────────────────────────────────────────────────────────


@given(logit_pairs(max_scale=5.0))
def test_expected_gradient_of_the_sampled_forms_is_that_of_the_kl(
    pair: tuple[Tensor, Tensor],
) -> None:
    for student_V, teacher_logits_V in zip(*pair, strict=True):
        teacher_V, student_logp_V = teacher_logits_V.log_softmax(-1), student_V.log_softmax(-1)
        gap_V = teacher_gap(teacher_V, student_logp_V)
        exact_V = kl_gradient(student_V, teacher_V)
        for loss in (
            lambda logp_V, q=teacher_V: textbook.sampled_reverse_kl(logp_V, q),
            lambda logp_V, a=gap_V: policy_gradient(logp_V, a),
            lambda logp_V, a=gap_V, mu=student_logp_V: policy_gradient(
                logp_V, a, sampler_logp_T=mu
            ),
        ):
            close(expected(gradients_by_token(loss, student_V), student_logp_V), exact_V)


def test_the_mean_of_the_estimate_is_the_kl_of_the_sampler() -> None:
    _, teacher_V, sampler_V = three_policies()
    mean = (sampler_V.exp() * -teacher_gap(teacher_V, sampler_V)).sum()
    close(mean, textbook.reverse_kl(list(sampler_V.exp()), list(teacher_V.exp())))


def test_differentiating_the_sampled_log_ratio_itself_teaches_nothing() -> None:
    """Why that form does not exist here: its expected gradient is zero for any teacher."""
    student_V, teacher_V, _ = three_policies()
    gradient_VV = gradients_by_token(lambda logp_V: logp_V - teacher_V, student_V)
    close(expected(gradient_VV, student_V.log_softmax(-1)), torch.zeros_like(student_V))
    assert float(kl_gradient(student_V, teacher_V).abs().max()) > 0.01


def test_a_divergence_as_an_advantage_teaches_nothing() -> None:
    """Why it is refused: it is the same for every token that could have been sampled."""
    student_V, teacher_V, _ = three_policies()
    student_logp_V = student_V.log_softmax(-1)
    ids, keep = top_k_ids(student_logp_V[None], teacher_V[None], k=3, of="teacher")
    value = top_k_divergence(
        student_logp_V[ids], teacher_V[ids], keep, name="reverse_kl", form="tail"
    )
    advantage_V = -value.expand(len(student_V))
    gradient_VV = gradients_by_token(lambda logp_V: policy_gradient(logp_V, advantage_V), student_V)
    close(expected(gradient_VV, student_logp_V), torch.zeros_like(student_V))


def test_imitating_own_samples_teaches_nothing_on_average() -> None:
    """Why it must be asked for: cross-entropy on samples of the student itself, A = 1."""
    student_V, _, _ = three_policies()
    ones_V = torch.ones_like(student_V)
    loss = SampledTokenLoss(weight_N=ones_V, advantage_N=ones_V)
    gradient_VV = gradients_by_token(lambda logp_V: loss.per_token(logp_V, None), student_V)
    close(expected(gradient_VV, student_V.log_softmax(-1)), torch.zeros_like(student_V))
    assert float(gradient_VV.abs().max()) > 0.1


# ── advantages ───────────────────────────────────────────────────────────────────────────────────


def test_teacher_gap_by_hand() -> None:
    inputs = [torch.tensor([x], dtype=torch.float64, requires_grad=True) for x in (-1, -2.5, -4, 7)]
    teacher, sampler, reference, baseline = inputs
    gap = teacher_gap(teacher, sampler, reference_logp_T=reference, lam=1.5, baseline_T=baseline)
    assert not gap.requires_grad
    close(gap, torch.tensor([1.5 * -1 + -0.5 * -4 + 2.5 - 7], dtype=torch.float64))
    close(teacher_gap(teacher, sampler), torch.tensor([1.5], dtype=torch.float64))
    with pytest.raises(ValueError, match="reference_logp_T"):
        teacher_gap(teacher, sampler, lam=1.5)


def test_the_contrast_of_two_hints_is_a_difference_of_kls() -> None:
    student_V, hinted_V, wrong_V = three_policies()
    contrast_V = hint_contrast(hinted_V.clone().requires_grad_(), wrong_V)
    assert not contrast_V.requires_grad
    close(contrast_V, hinted_V - wrong_V)
    student_logp_V = student_V.log_softmax(-1)

    def gradient(advantage_V: Tensor) -> Tensor:
        gradient_VV = gradients_by_token(
            lambda logp_V: policy_gradient(logp_V, advantage_V), student_V
        )
        return expected(gradient_VV, student_logp_V)

    difference_V = kl_gradient(student_V, hinted_V) - kl_gradient(student_V, wrong_V)
    close(gradient(contrast_V), difference_V)
    # With the gap in addition: the KL to q(hint)·(q(hint)/q(wrong))^γ.
    target_V = (hinted_V + 0.7 * (hinted_V - wrong_V)).log_softmax(-1)
    gap_V = teacher_gap(hinted_V, student_logp_V)
    close(gradient(gap_V + 0.7 * contrast_V), kl_gradient(student_V, target_V))


def test_the_penalty_of_a_reference_has_the_gradient_of_the_kl_to_it() -> None:
    student_V, _, reference_V = three_policies()
    student_logp_V = student_V.log_softmax(-1).requires_grad_()
    advantage_V = reference_penalty(student_logp_V, reference_V, weight=0.3)
    assert not advantage_V.requires_grad
    close(advantage_V, -0.3 * (student_logp_V - reference_V).detach())
    rewards_V = torch.randn(7, dtype=torch.float64)
    gradient_VV = gradients_by_token(
        lambda logp_V: policy_gradient(logp_V, rewards_V + advantage_V), student_V
    )

    def objective(student: list[Tensor]) -> Tensor:
        reward = sum((p * r for p, r in zip(student, rewards_V, strict=True)), torch.zeros(()))
        return 0.3 * textbook.reverse_kl(student, list(reference_V.exp())) - reward

    close(expected(gradient_VV, student_logp_V.detach()), gradient_of(objective, student_V))
    # k1: unbiased over what the policy samples.
    kl = textbook.reverse_kl(list(student_logp_V.detach().exp()), list(reference_V.exp()))
    close(student_logp_V.detach().exp() @ advantage_V, -0.3 * kl)


@pytest.mark.parametrize("direction", ["endorsed", "rejected"])
def test_the_gate_of_the_gap_by_hand(direction: str) -> None:
    teacher_T, sampler_T = torch.tensor(
        [[-1.0, -3.0, -2.0], [-3.0, -1.0, -2.0]], dtype=torch.float64, requires_grad=True
    )
    gate_T = gap_gate(teacher_T, sampler_T, temperature=0.5, direction=direction)
    assert not gate_T.requires_grad
    high, low = 1 / (1 + math.exp(-4)), 1 / (1 + math.exp(4))
    ends = [high, low] if direction == "endorsed" else [low, high]
    close(gate_T, torch.tensor([*ends, 0.5], dtype=torch.float64))


def test_pushing_unlikely_tokens_down_has_the_gradient_of_their_mass() -> None:
    student_V, _, sampler_V = three_policies()
    for below in (0.05, 0.2, 0.6):
        for mu_V, ratio_mu_V in ((student_V.log_softmax(-1), None), (sampler_V, sampler_V)):
            advantage_V = unlikely_advantage(mu_V, below=below)
            is_unlikely_V = mu_V.exp() < below
            assert advantage_V.tolist() == [-1.0 if low else 0.0 for low in is_unlikely_V]
            gradient_VV = gradients_by_token(
                lambda logp_V, a=advantage_V, mu=ratio_mu_V: policy_gradient(
                    logp_V, a, sampler_logp_T=mu
                ),
                student_V,
            )
            mass_gradient_V = gradient_of(
                lambda student, low=is_unlikely_V: sum(
                    (p for p, is_low in zip(student, low, strict=True) if is_low),
                    start=torch.zeros(()),
                ),
                student_V,
            )
            close(expected(gradient_VV, mu_V), mass_gradient_V)
    assert bool((unlikely_advantage(sampler_V, below=0.2) < 0).any())


def test_extrapolation_has_the_gradient_of_the_kl_to_the_extrapolated_teacher() -> None:
    student_V, teacher_V, reference_V = three_policies()
    student_logp_V = student_V.log_softmax(-1)
    target_V = (1.25 * teacher_V - 0.25 * reference_V).log_softmax(-1)
    gap_V = teacher_gap(teacher_V, student_logp_V, reference_logp_T=reference_V, lam=1.25)
    gradient_VV = gradients_by_token(lambda logp_V: policy_gradient(logp_V, gap_V), student_V)
    close(expected(gradient_VV, student_logp_V), kl_gradient(student_V, target_V))


def test_the_baseline_keeps_the_expected_gradient_and_centres_the_advantage() -> None:
    for _ in range(20):
        student_V, teacher_V, _ = three_policies()
        student_logp_V = student_V.log_softmax(-1)
        p_V = student_logp_V.exp()
        kl = textbook.reverse_kl(list(p_V), list(teacher_V.exp()))
        plain_V = teacher_gap(teacher_V, student_logp_V)
        centred_V = teacher_gap(teacher_V, student_logp_V, baseline_T=-kl.expand(len(p_V)))
        close(p_V @ plain_V, -kl)
        close(p_V @ centred_V, torch.zeros((), dtype=torch.float64))
        close(p_V @ centred_V.square(), p_V @ plain_V.square() - kl**2)
        gradient_VV = gradients_by_token(
            lambda logp_V, a=centred_V: policy_gradient(logp_V, a), student_V
        )
        close(expected(gradient_VV, student_logp_V), kl_gradient(student_V, teacher_V))


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=6), st.booleans())
def test_leave_one_out_compares_with_the_others(rewards: list[float], scale_by_std: bool) -> None:
    rewards_N = torch.tensor([*rewards, 9.0, 8.0], dtype=torch.float64)
    group_N = torch.tensor([0] * len(rewards) + [1, 1])
    ours_N = group_advantage(
        rewards_N, group_N, scale_by_std=scale_by_std, baseline="leave_one_out"
    )
    mean = math.fsum(rewards) / len(rewards)
    spread = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards))
    if len(set(rewards)) == 1 or spread < 1e-6:
        return
    for i, reward in enumerate(rewards):
        other_rewards = rewards[:i] + rewards[i + 1 :]
        expected_value = reward - math.fsum(other_rewards) / len(other_rewards)
        expected_value /= spread if scale_by_std else 1.0
        assert ours_N[i].item() == pytest.approx(expected_value, rel=1e-6, abs=1e-9)
    assert ours_N[-2:].tolist() == ([2.0, -2.0] if scale_by_std else [1.0, -1.0])


def test_leave_one_out_has_the_whole_gradient_of_the_reward_and_the_mean_a_part() -> None:
    """By enumerating all groups of n samples of one token: (n − 1)/n with the group's mean."""
    student_V, rewards_V = torch.randn(2, 3, dtype=torch.float64).unbind()
    logits_V = student_V.clone().requires_grad_()
    logp_V = logits_V.log_softmax(-1)
    (exact_V,) = torch.autograd.grad(-(logp_V.exp() @ rewards_V), logits_V, retain_graph=True)
    n = 3
    for baseline, share in (("leave_one_out", 1.0), ("mean", (n - 1) / n)):
        total_V = torch.zeros_like(student_V)
        for group in torch.cartesian_prod(*[torch.arange(3)] * n):
            advantage_N = group_advantage(
                rewards_V[group], torch.zeros(n), scale_by_std=False, baseline=baseline
            )
            surrogate = policy_gradient(logp_V[group], advantage_N).mean()
            (gradient_V,) = torch.autograd.grad(surrogate, logits_V, retain_graph=True)
            total_V += logp_V[group].sum().exp().detach() * gradient_V
        close(total_V, share * exact_V)


@pytest.mark.parametrize("scale_by_std", [False, True])
def test_group_advantage_by_hand(scale_by_std: bool) -> None:
    rewards_N = torch.tensor([1.0, 0.1, 0.0, 0.1, 5.0, 0.1, 0.5], dtype=torch.float64)
    group_N = torch.tensor([7, 3, 7, 3, 90, 3, 7])
    rewards_N.requires_grad_()
    ours_N = group_advantage(rewards_N, group_N, scale_by_std=scale_by_std)
    assert not ours_N.requires_grad
    spread = math.sqrt((0.25 + 0.25 + 0) / 3) if scale_by_std else 1.0
    expected_N = torch.tensor([0.5 / spread, 0, -0.5 / spread, 0, 0, 0, 0], dtype=torch.float64)
    close(ours_N, expected_N)
    # Exactly zero where a group says nothing, although the mean of three 0.1 is not quite 0.1.
    assert ours_N[[1, 3, 4, 5]].tolist() == [0.0] * 4


def test_group_advantage_of_no_samples_is_empty() -> None:
    empty = torch.zeros(0, dtype=torch.float64)
    assert group_advantage(empty, empty.long(), scale_by_std=True).shape == (0,)


# ── the ratio ────────────────────────────────────────────────────────────────────────────────────


def test_importance_ratios_give_the_students_gradient_from_another_samplers_tokens() -> None:
    student_V, _, sampler_V = three_policies()
    advantage_V = torch.randn(7, dtype=torch.float64)
    gradient_VV = gradients_by_token(
        lambda logp_V: policy_gradient(logp_V, advantage_V, sampler_logp_T=sampler_V), student_V
    )

    def objective(student: list[Tensor]) -> Tensor:
        return -sum((p * a for p, a in zip(student, advantage_V, strict=True)), torch.zeros(()))

    close(expected(gradient_VV, sampler_V), gradient_of(objective, student_V))
    # Without the ratio it is the gradient of something else.
    without_VV = gradients_by_token(lambda logp_V: policy_gradient(logp_V, advantage_V), student_V)
    difference_V = expected(without_VV, sampler_V) - expected(gradient_VV, sampler_V)
    assert float(difference_V.abs().max()) > 1e-3


def test_the_gap_of_an_older_sampler_differs_by_its_own_kl() -> None:
    """As documented: ∇[KL(π‖q) − KL(π‖μ)]; with the student's own log-probs, ∇KL(π‖q)."""
    student_V, teacher_V, sampler_V = three_policies()
    stale_V = teacher_gap(teacher_V, sampler_V)
    fresh_V = teacher_gap(teacher_V, student_V.log_softmax(-1))
    exact_V = kl_gradient(student_V, teacher_V)
    for gap_V, expected_V in (
        (stale_V, exact_V - kl_gradient(student_V, sampler_V)),
        (fresh_V, exact_V),
    ):
        gradient_VV = gradients_by_token(
            lambda logp_V, a=gap_V: policy_gradient(logp_V, a, sampler_logp_T=sampler_V), student_V
        )
        close(expected(gradient_VV, sampler_V), expected_V)


@given(st.integers(0, 2**20), st.sampled_from([None, 0.5, 1.0, 2.0]))
def test_ratio_and_truncation_against_the_textbook(seed: int, limit: float | None) -> None:
    generator = torch.Generator().manual_seed(seed)
    student_T, sampler_T, advantage_T = torch.randn(
        3, 5, generator=generator, dtype=torch.float64
    ).unbind()
    for x in (student_T, sampler_T, advantage_T):
        x.requires_grad_()
    loss_T = policy_gradient(student_T, advantage_T, sampler_logp_T=sampler_T, truncate=limit)
    gradient_T, *unwanted = torch.autograd.grad(
        loss_T.sum(), (student_T, sampler_T, advantage_T), allow_unused=True
    )
    assert unwanted == [None, None]
    for t in range(5):
        ratio = math.exp(student_T[t].item() - sampler_T[t].item())
        retained = ratio if limit is None else min(ratio, limit)
        # d(r·A)/d(log π) = r·A: a truncated token still carries gradient, c·A.
        close(gradient_T[t].item(), -retained * advantage_T[t].item())
        close(loss_T[t].item(), -retained * advantage_T[t].item() * student_T[t].item())


@given(st.integers(0, 2**20), st.sampled_from([(0.5, 2.0), (0.9, 1.1), (0.01, 1.5)]))
def test_a_gate_on_the_ratio_against_the_textbook(seed: int, gate: tuple[float, float]) -> None:
    generator = torch.Generator().manual_seed(seed)
    student_T, sampler_T, advantage_T = torch.randn(
        3, 7, generator=generator, dtype=torch.float64
    ).unbind()
    student_T.requires_grad_()
    loss_T = policy_gradient(student_T, advantage_T, sampler_logp_T=sampler_T, ratio_gate=gate)
    (gradient_T,) = torch.autograd.grad(loss_T.sum(), student_T)
    for t in range(7):
        ratio = math.exp(student_T[t].item() - sampler_T[t].item())
        weight = ratio if gate[0] <= ratio <= gate[1] else 0.0
        close(gradient_T[t].item(), -weight * advantage_T[t].item())
        close(loss_T[t].item(), -weight * advantage_T[t].item() * student_T[t].item())


def test_a_gate_takes_tokens_at_its_ends() -> None:
    """Ratios that float64 has exactly."""
    student_T = torch.tensor([0.0, 0.0], dtype=torch.float64)
    sampler_T = torch.zeros(2, dtype=torch.float64)
    ones_T = torch.ones(2, dtype=torch.float64)
    student_T.requires_grad_()
    for gate, weight in (((1.0, 2.0), 1.0), ((0.5, 1.0), 1.0), ((1.1, 2.0), 0.0)):
        loss_T = policy_gradient(student_T, ones_T, sampler_logp_T=sampler_T, ratio_gate=gate)
        (gradient_T,) = torch.autograd.grad(loss_T.sum(), student_T)
        close(gradient_T, -weight * ones_T)


@given(st.integers(0, 2**20))
def test_the_clipped_surrogate_against_the_textbook(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    low, high = 0.2, 0.3
    student_T, drift_T, advantage_T = torch.randn(
        3, 6, generator=generator, dtype=torch.float64
    ).unbind()
    sampler_T = (student_T + 0.4 * drift_T).requires_grad_()
    student_T.requires_grad_()
    advantage_T.requires_grad_()
    loss_T = policy_gradient(student_T, advantage_T, sampler_logp_T=sampler_T, clip=(low, high))
    gradient_T, *unwanted = torch.autograd.grad(
        loss_T.sum(), (student_T, sampler_T, advantage_T), allow_unused=True
    )
    assert unwanted == [None, None]
    for t in range(6):
        ratio = math.exp(student_T[t].item() - sampler_T[t].item())
        advantage = advantage_T[t].item()
        stopped = ratio > 1 + high if advantage > 0 else ratio < 1 - low
        limit = 1 + high if advantage > 0 else 1 - low
        close(loss_T[t].item(), -(limit if stopped else ratio) * advantage)
        close(gradient_T[t].item(), 0.0 if stopped else -ratio * advantage)


@given(st.integers(0, 2**20), st.sampled_from([1.1, 1.5, 3.0]))
def test_the_dual_clip_against_the_textbook(seed: int, bound: float) -> None:
    """Value and gradient: where A < 0 and r > c the loss is −c·A, and moves nothing."""
    generator = torch.Generator().manual_seed(seed)
    low, high = 0.2, 0.3
    student_T, drift_T, advantage_T = torch.randn(
        3, 8, generator=generator, dtype=torch.float64
    ).unbind()
    sampler_T = (student_T + 0.8 * drift_T).requires_grad_()
    student_T.requires_grad_()
    advantage_T.requires_grad_()
    loss_T = policy_gradient(
        student_T, advantage_T, sampler_logp_T=sampler_T, clip=(low, high), dual_clip=bound
    )
    gradient_T, *unwanted = torch.autograd.grad(
        loss_T.sum(), (student_T, sampler_T, advantage_T), allow_unused=True
    )
    assert unwanted == [None, None]
    for t in range(8):
        ratio = math.exp(student_T[t].item() - sampler_T[t].item())
        advantage = advantage_T[t].item()
        if advantage > 0:
            value, slope = min(ratio, 1 + high), 0.0 if ratio > 1 + high else ratio
        else:
            value = min(max(ratio, 1 - low), bound)
            slope = 0.0 if ratio < 1 - low or ratio > bound else ratio
        close(loss_T[t].item(), -value * advantage)
        close(gradient_T[t].item(), -slope * advantage)


def test_ratio_options_that_would_be_ignored_are_refused() -> None:
    x = torch.zeros(1, dtype=torch.float64)
    with pytest.raises(ValueError, match="give clip, too"):
        policy_gradient(x, x, sampler_logp_T=x, dual_clip=2.0)
    bounds: tuple[dict[str, Any], ...] = (
        {"truncate": 2.0}, {"ratio_gate": (0.5, 2.0)}, {"clip": (0.2, 0.2)}, {"dual_clip": 2.0},
    )  # fmt: skip
    for options in bounds:
        with pytest.raises(ValueError, match="sampler_logp_T"):
            policy_gradient(x, x, **options)
    for first, second in itertools.combinations(bounds[:3], 2):
        with pytest.raises(ValueError, match="exclude"):
            policy_gradient(x, x, sampler_logp_T=x, **first, **second)


def test_cross_entropy_of_a_text_by_hand() -> None:
    logits_TV = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    text_T = torch.tensor([3, 0, 0, 4])
    logp_T = logits_TV.log_softmax(-1).gather(-1, text_T[:, None])[:, 0]
    ones_T = torch.ones(4, dtype=torch.float64)
    loss_T = SampledTokenLoss(weight_N=ones_T, advantage_N=ones_T).per_token(logp_T, None)
    (gradient_TV,) = torch.autograd.grad(loss_T.sum(), logits_TV, retain_graph=True)
    probabilities = [textbook.softmax_by_hand(row) for row in logits_TV]
    expected_T = -torch.stack([torch.log(p[y]) for p, y in zip(probabilities, text_T, strict=True)])
    close(loss_T, expected_T)
    close(gradient_TV, torch.autograd.grad(expected_T.sum(), logits_TV)[0])


@pytest.mark.parametrize(
    ("options", "ratio"),
    [
        ({}, False),
        ({}, True),
        ({"truncate": 0.9}, True),
        ({"ratio_gate": (0.7, 1.4)}, True),
        ({"clip": (0.1, 0.2)}, True),
        ({"clip": (0.1, 0.2), "dual_clip": 1.05}, True),
    ],
)
@pytest.mark.parametrize("baseline", [False, True])
def test_coefficients_are_the_gradient_of_all_losses_together(
    options: dict[str, Any], ratio: bool, baseline: bool
) -> None:
    logp_N, sampler_N = (-torch.rand(60, dtype=torch.float64) - 1 for _ in range(2))
    advantage_N, kl_N = torch.randn(60, dtype=torch.float64), torch.rand(60, dtype=torch.float64)
    weight_N = torch.tensor([0.5, 0.0, 2.0] * 20, dtype=torch.float64)
    loss = SampledTokenLoss(
        weight_N=weight_N, advantage_N=advantage_N, sampler_logp_N=sampler_N if ratio else None,
        baseline=baseline, **options,
    )  # fmt: skip
    ones_N = torch.ones(60, dtype=torch.float64)
    other = SampledTokenLoss(weight_N=ones_N, advantage_N=ones_N)
    assert loss.needs_statistics == (ratio or baseline) and not other.needs_statistics
    ours_N = sampled_token_coefficients([loss, other], logp_N, kl_N)
    centered_N = advantage_N + kl_N if baseline else advantage_N
    ratio_N = (logp_N - sampler_N).exp() if ratio else ones_N
    moves_N = ones_N
    if "clip" in options:
        clipped_N = ratio_N.clamp(0.9, 1.2)
        moves_N = (ratio_N * centered_N <= clipped_N * centered_N).double()
        assert 0 < float(moves_N.sum()) < 60, "a clip that acts on some"
    if "dual_clip" in options:
        is_bounded_N = (centered_N < 0) & (ratio_N > options["dual_clip"])
        assert 0 < float((is_bounded_N & (weight_N > 0)).sum()) < 60, "a bound that acts on some"
        moves_N = moves_N * ~is_bounded_N
    if "ratio_gate" in options:
        moves_N = ((ratio_N > 0.7) & (ratio_N < 1.4)).double()
        assert 0 < float(moves_N.sum()) < 60, "a gate that acts on some"
    ratio_N = ratio_N.clamp(max=options.get("truncate", math.inf))
    close(ours_N, -weight_N * moves_N * ratio_N * centered_N - 1)
    rows = slice(3, 7)
    part_N = sampled_token_coefficients([loss.select_rows(rows)], logp_N[rows], kl_N[rows])
    close(part_N, ours_N[rows] + 1)
