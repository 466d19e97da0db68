"""Bias and variance of every estimator of ∇KL(π‖q) at a fixed student, exactly, by enumeration."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from references import sampled_reverse_kl
from torch import Tensor

from courtside.losses.full_vocabulary import divergence
from courtside.losses.policy_gradient import policy_gradient, teacher_gap
from courtside.losses.top_k import top_k_divergence, top_k_ids

pytestmark = pytest.mark.filterwarnings("ignore:.*without a tail")


def checkpoint(seed: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """A student's logits and the log-probabilities of a diffuse teacher."""
    generator = torch.Generator().manual_seed(seed)
    teacher_V = 1.5 * torch.randn(vocab_size, generator=generator, dtype=torch.float64)
    student_V = teacher_V + torch.randn(vocab_size, generator=generator, dtype=torch.float64)
    return student_V, teacher_V.log_softmax(-1)


def exact_gradient(student_V: Tensor, teacher_V: Tensor) -> Tensor:
    """∂KL/∂logit_v = π_v·(log(π_v/q_v) − KL), from paper."""
    p_V = student_V.softmax(-1)
    log_ratio_V = p_V.log() - teacher_V
    return p_V * (log_ratio_V - (p_V * log_ratio_V).sum())


def on_top_k(student_V: Tensor, teacher_V: Tensor, k: int, form: str) -> Tensor:
    logits_V = student_V.clone().requires_grad_()
    logp_TV = logits_V.log_softmax(-1)[None]
    ids_TK, keep_TK = top_k_ids(logp_TV, teacher_V[None], k=k, of="teacher")
    loss_T = top_k_divergence(
        logp_TV.gather(-1, ids_TK), teacher_V[None].gather(-1, ids_TK), keep_TK,
        name="reverse_kl", form=form,
    )  # fmt: skip
    return torch.autograd.grad(loss_T.sum(), logits_V)[0]


def sampled_moments(
    loss: Callable[[Tensor], Tensor], student_V: Tensor, exact_V: Tensor
) -> tuple[float, float]:
    """(norm of the bias, total variance) over one token drawn from the student."""
    logits_V = student_V.clone().requires_grad_()
    loss_V = loss(logits_V.log_softmax(-1))
    rows = [torch.autograd.grad(x, logits_V, retain_graph=True)[0] for x in loss_V]
    gradient_VV, p_V = torch.stack(rows), student_V.softmax(-1)
    mean_V = p_V @ gradient_VV
    variance = float(p_V @ (gradient_VV - mean_V).square().sum(-1))
    return float((mean_V - exact_V).norm()), variance


def moments_of_sampled_forms(
    student_V: Tensor, teacher_V: Tensor
) -> dict[str, tuple[float, float]]:
    student_logp_V = student_V.log_softmax(-1)
    kl_V = divergence(student_logp_V[None], teacher_V[None], name="reverse_kl").expand(
        len(student_V)
    )
    gap_V = teacher_gap(teacher_V, student_logp_V)
    centred_V = teacher_gap(teacher_V, student_logp_V, baseline_T=-kl_V)
    exact_V = exact_gradient(student_V, teacher_V)
    losses: dict[str, Callable[[Tensor], Tensor]] = {
        "sampled": lambda logp_V: sampled_reverse_kl(logp_V, teacher_V),
        "gap": lambda logp_V: policy_gradient(logp_V, gap_V),
        "baseline": lambda logp_V: policy_gradient(logp_V, centred_V),
    }
    return {name: sampled_moments(loss, student_V, exact_V) for name, loss in losses.items()}


def test_sampled_forms_are_unbiased_and_a_baseline_calms_diffuse_students() -> None:
    plain = centred = signal = 0.0
    for seed in range(6):
        student_V, teacher_V = checkpoint(seed, vocab_size=120)
        moments = moments_of_sampled_forms(student_V, teacher_V)
        assert max(bias for bias, _ in moments.values()) < 1e-12
        assert abs(moments["sampled"][1] - moments["gap"][1]) < 1e-12
        plain += moments["sampled"][1]
        centred += moments["baseline"][1]
        signal += float(exact_gradient(student_V, teacher_V).square().sum())
    assert 0.7 < centred / plain < 0.95
    assert plain > 5 * signal  # One token is mostly noise: why batches are large.


def test_the_baseline_can_raise_the_variance_of_a_nearly_certain_student() -> None:
    """As documented: −KL centres the advantage, but a near-certain token has almost no gradient, so
    the variance hangs on the others, and the advantage of those is not centred by it."""
    student_V = torch.tensor([0.9, 0.1], dtype=torch.float64).log()
    teacher_V = torch.tensor([0.8, 0.2], dtype=torch.float64).log()
    moments = moments_of_sampled_forms(student_V, teacher_V)
    assert max(bias for bias, _ in moments.values()) < 1e-12
    assert moments["baseline"][1] > moments["sampled"][1]


@pytest.mark.parametrize("seed", range(8))
def test_top_k_trades_variance_for_a_bias_that_the_tail_keeps_below_naive(seed: int) -> None:
    student_V, teacher_V = checkpoint(seed, vocab_size=40)
    exact_V = exact_gradient(student_V, teacher_V)

    def bias(k: int, form: str) -> float:
        return float((on_top_k(student_V, teacher_V, k, form) - exact_V).norm())

    assert bias(1, "tail") > bias(20, "tail") > 1e-3
    for form in ("tail", "stop_gradient"):
        for k in (1, 5, 20):
            assert bias(k, form) < bias(k, "naive")
    for form in ("tail", "stop_gradient", "renormalized", "naive"):
        assert bias(40, form) < 1e-9  # Over the whole vocabulary even the +1 cancels.
