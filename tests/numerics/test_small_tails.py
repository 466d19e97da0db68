"""A student that gives next to nothing to the tokens outside the support, on both backends.

1 − Σ_S p has no digits below a mass of 1e-6 in float32: there a forward KL would lose the gradient
that brings the student back.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.linear_divergence_reference import (
    Case,
    differences,
    exact_case,
    expected,
    label,
    run_case,
)
from torch import Tensor
from torch.testing import assert_close

from courtside.losses.fused.linear_divergence import ChunkPlan
from courtside.losses.fused.torch_backend import TorchVocabularyPass
from courtside.losses.fused.types import DivergenceSpec, Support
from courtside.losses.top_k import tail_logp, top_k_divergence, top_k_ids

triton_backend = pytest.importorskip("courtside.losses.fused.triton_backend")
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
K, VOCAB_SIZE = 4, 70
BACKENDS: dict[str, Any] = {
    "torch": TorchVocabularyPass,
    "triton": partial(
        triton_backend.TritonVocabularyPass, tiling=triton_backend.Tiling(num_warps=1)
    ),
}
DIVERGENCES = [
    DivergenceSpec(name=name, parameters=parameters, support=Support(k=K, of=of, form="tail"))
    for of in ("teacher", "student", "joint")
    for name, parameters in (
        ("forward_kl", {}),
        ("reverse_kl", {}),
        ("jsd", {"beta": 0.3}),
        ("skew_forward_kl", {"alpha": 0.2}),
    )
]


def confident_case(gap: float, *, of: str = "student", vocab_size: int = VOCAB_SIZE) -> Case:
    """Heads that copy their logits; the likeliest tokens of one side are `gap` above all others."""
    case = exact_case(num_rows=5, vocab_size=vocab_size)
    ones_N = torch.ones_like(case.temperature_N)
    case = replace(case, temperature_N=ones_N, student=_same(case.student))
    side = case.student if of == "student" else case.teacher
    logits_NV = side.hidden_ND.clone()
    top_NK = case.teacher.hidden_ND.topk(K, dim=-1).indices
    if of == "student":
        logits_NV.scatter_(-1, top_NK, logits_NV.gather(-1, top_NK) + 12 + gap)
    else:
        logits_NV.scatter_(-1, top_NK, logits_NV.gather(-1, top_NK) + gap)
    side = replace(side, hidden_ND=logits_NV)
    return replace(case, student=side) if of == "student" else replace(case, teacher=side)


def _same(side: Any) -> Any:
    return replace(side, hidden_ND=side.hidden_ND - side.hidden_ND.mean(-1, keepdim=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gap", [25.0, 300.0])
@pytest.mark.parametrize("divergence", DIVERGENCES[:5], ids=label)
def test_value_and_gradient_of_a_student_that_is_sure(
    divergence: DivergenceSpec, gap: float, backend: str
) -> None:
    case = confident_case(gap).to(torch.float32)
    right = expected(case, divergence)
    ours, into = run_case(
        case, divergence, plan=ChunkPlan(chunk=4, part=3), backend=BACKENDS[backend]
    )
    off = differences(ours, into, right)
    assert max(off.values()) < 5e-5, off


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("divergence", [*DIVERGENCES[:4], DIVERGENCES[-2]], ids=label)
def test_value_and_gradient_against_a_teacher_that_is_sure(
    divergence: DivergenceSpec, backend: str
) -> None:
    case = confident_case(40.0, of="teacher").to(torch.float32)
    right = expected(case, divergence)
    ours, into = run_case(case, divergence, backend=BACKENDS[backend])
    off = differences(ours, into, right)
    assert max(off.values()) < 2e-5, off


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gap", [5.0, 300.0])
def test_the_forward_kl_pulls_the_tail_up_by_the_teachers_mass(gap: float, backend: str) -> None:
    """Its gradient outside S adds up to π_tail − q_tail, by the textbook."""
    case = confident_case(gap).to(torch.float32)
    ones_N = torch.ones_like(case.weight_N)
    case = replace(case, weight_N=ones_N)
    ours, _ = run_case(case, DIVERGENCES[0], sampled=False, backend=BACKENDS[backend])
    assert ours.divergence is not None
    inside_NK = case.teacher.hidden_ND.topk(K, dim=-1).indices
    outside_NV = ours.hidden_gradient_ND.scatter(-1, inside_NK, 0.0)
    q_tail_N = 1 - ours.divergence.teacher_mass_N
    assert bool((q_tail_N > 0.05).all())
    tail_N = tail_logp(case.student.hidden_ND.double().log_softmax(-1), inside_NK).exp()
    assert_close(outside_NV.sum(-1), (tail_N - q_tail_N).float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("of", ["teacher", "joint"])
def test_the_plain_loss_with_exact_tails(of: Any) -> None:
    """In float32 by autograd, whose gradient comes through the tail's own log-sum-exp."""
    case = confident_case(25.0).to(torch.float32)
    divergence = DivergenceSpec(name="forward_kl", support=Support(k=K, of=of, form="tail"))
    right = expected(case, divergence, sampled=False)
    logits_NV = case.student.hidden_ND.clone().requires_grad_()
    logp_NV = logits_NV.log_softmax(-1)
    logq_NV = case.teacher.hidden_ND[:, :VOCAB_SIZE].log_softmax(-1)
    ids_NK, keep_NK = top_k_ids(logp_NV, logq_NV, k=K, of=of)
    value_N = top_k_divergence(
        logp_NV.gather(-1, ids_NK), logq_NV.gather(-1, ids_NK), keep_NK,
        name="forward_kl", form="tail", tails=_tails(logp_NV, logq_NV, ids_NK),
    )  # fmt: skip
    (gradient_NV,) = torch.autograd.grad((value_N * case.weight_N).sum(), logits_NV)
    assert_close(gradient_NV.double(), right.hidden_ND, rtol=1e-4, atol=1e-7)
    on_N = case.weight_N > 0
    assert_close(value_N[on_N].detach().double(), right.value_N[on_N], rtol=1e-5, atol=1e-6)


def _tails(logp_NV: Tensor, logq_NV: Tensor, ids_NK: Tensor) -> tuple[Tensor, Tensor]:
    return tail_logp(logp_NV, ids_NK), tail_logp(logq_NV, ids_NK)


def test_a_tail_without_tokens_has_no_mass_and_no_gradient() -> None:
    logits_TV = torch.randn(3, 5, requires_grad=True)
    teacher_TV = torch.randn(3, 5).log_softmax(-1)
    logp_TV, ids_TK = logits_TV.log_softmax(-1), torch.arange(5).expand(3, -1)
    tails = _tails(logp_TV, teacher_TV, ids_TK)
    assert bool((tails[0] == -torch.inf).all())
    value_T = top_k_divergence(
        logp_TV, teacher_TV, torch.ones_like(ids_TK, dtype=torch.bool), name="forward_kl",
        form="tail", tails=tails,
    )  # fmt: skip
    (gradient_TV,) = torch.autograd.grad(value_T.sum(), logits_TV)
    assert_close(gradient_TV, logp_TV.detach().exp() - teacher_TV.exp())
    assert_close(value_T, (teacher_TV.exp() * (teacher_TV - logp_TV)).sum(-1))
