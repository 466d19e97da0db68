"""The fused head in torch: values, by-products and all gradients against one whole graph."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from linear_divergence_reference import (
    ENDS,
    FULL,
    ON_SUPPORT,
    Case,
    differences,
    exact_case,
    expected,
    label,
    make_case,
    room,
)
from torch import Tensor
from torch.testing import assert_close

from courtside.losses.divergences import divergence as full_divergence
from courtside.losses.fused import torch_backend
from courtside.losses.fused.linear_divergence import ChunkPlan, fused_linear_divergence
from courtside.losses.fused.torch_backend import reverse_kl_with_tail, select_support
from courtside.losses.fused.types import (
    DivergenceSpec,
    HeadGradient,
    HeadLoss,
    Support,
    TokenStatistics,
)
from courtside.losses.policy_gradient import policy_gradient, teacher_gap
from courtside.losses.top_k import overlap, support_mass, top_k_divergence, top_k_ids

pytestmark = pytest.mark.filterwarnings("ignore:.*without a tail")
EVERY = [*FULL, *ENDS, *ON_SUPPORT]
SMALL = ChunkPlan(chunk=3, part=2)
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scale": 1.7, "bias": True},
    "capped": {"softcap": 2.0, "scale": 0.8, "bias": True},
    "adapted": {"ranks": (2, 0)},
    "both adapted": {"softcap": 2.0, "scale": 0.8, "bias": True, "ranks": (3, 2)},
}


def through(
    case: Case, divergence: DivergenceSpec | None, *, plan: ChunkPlan | None = SMALL, **options: Any
) -> tuple[HeadLoss, HeadGradient]:
    into = room(case)
    asked = case.asked(divergence, **options)
    return fused_linear_divergence(case.student, case.teacher, asked, into=into, plan=plan), into


def log_probs(case: Case) -> list[Tensor]:
    """Of student and teacher over the words they share."""
    sides, vocab_size = (case.student, case.teacher), len(case.student.weight_VD)
    logits = (side.hidden_ND @ side.weight_VD[:vocab_size].T for side in sides)
    return [(x_NV / case.temperature_N[:, None]).log_softmax(-1) for x_NV in logits]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("divergence", [*EVERY, None], ids=lambda d: label(d) if d else "sampled")
def test_everything_is_what_autograd_gives(divergence: DivergenceSpec | None, head: str) -> None:
    case = make_case(**HEADS[head])
    ours, into = through(case, divergence)
    off = differences(ours, into, expected(case, divergence))
    assert max(off.values()) < 1e-9, off


@pytest.mark.parametrize("divergence", EVERY, ids=label)
def test_the_losses_on_log_probs_agree(divergence: DivergenceSpec) -> None:
    """A second witness: `full` and `top_k`, differentiated by autograd."""
    case = make_case(sizes=(6, 6))
    hidden_ND = case.student.hidden_ND.requires_grad_()
    logp_NV, logq_NV = log_probs(case)
    parameters = {"name": divergence.name, "beta": divergence.beta, "alpha": divergence.alpha}
    on = divergence.support
    ours, _ = through(case, divergence, sampled=False)
    assert ours.found is not None
    if on is None:
        value_N = full_divergence(logp_NV, logq_NV, **parameters)
    else:
        ids_NK, keep_NK = top_k_ids(logp_NV, logq_NV, k=on.k, of=on.of)
        logp_NK, logq_NK = logp_NV.gather(-1, ids_NK), logq_NV.gather(-1, ids_NK)
        value_N = top_k_divergence(logp_NK, logq_NK, keep_NK, form=on.form, **parameters)
        assert_close(ours.found.student_mass_N, support_mass(logp_NK, keep_NK).detach())
        assert_close(ours.found.teacher_mass_N, support_mass(logq_NK, keep_NK).detach())
        assert_close(ours.found.overlap_N, overlap(logp_NV, logq_NV, on.k).detach())
    (gradient_ND,) = torch.autograd.grad((value_N * case.weight_N).sum(), hidden_ND)
    on_N = case.weight_N > 0
    assert_close(ours.found.value_N[on_N], value_N[on_N].detach(), rtol=1e-9, atol=1e-12)
    assert_close(ours.hidden_gradient_ND, gradient_ND, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("form", ["tail", "stop_gradient", "renormalized", "naive"])
def test_a_cap_on_words_of_a_support(form: str) -> None:
    case = make_case(num_rows=4)
    on = Support(k=5, of="joint", form=form, clip=0.02)
    ours, _ = through(case, DivergenceSpec(name="reverse_kl", support=on), sampled=False)
    hidden_ND = case.student.hidden_ND.requires_grad_()
    logp_NV, logq_NV = log_probs(case)
    ids_NK, keep_NK = top_k_ids(logp_NV, logq_NV, k=5, of="joint")
    value_N = top_k_divergence(
        logp_NV.gather(-1, ids_NK), logq_NV.gather(-1, ids_NK), keep_NK,
        name="reverse_kl", form=form, clip=0.02,
    )  # fmt: skip
    (gradient_ND,) = torch.autograd.grad((value_N * case.weight_N).sum(), hidden_ND)
    assert_close(ours.hidden_gradient_ND, gradient_ND, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("spread", [1.0, 30.0], ids=["spread", "sure of few"])
def test_the_reverse_kl_with_a_tail_in_closed_form(spread: float) -> None:
    """Also where next to nothing is left for the tail, and where words are listed twice."""
    logp_NV, logq_NV = ((spread * torch.randn(9, 40)).double().log_softmax(-1) for _ in range(2))
    ids_NK, keep_NK, _ = select_support(logp_NV, logq_NV, Support(k=7, of="joint", form="tail"))
    logp_NK, logq_NK = (x.gather(-1, ids_NK).requires_grad_() for x in (logp_NV, logq_NV))
    right_N = top_k_divergence(logp_NK, logq_NK, keep_NK, name="reverse_kl", form="tail")
    (gradient_NK,) = torch.autograd.grad(right_N.sum(), logp_NK)
    value_N, found_NK = reverse_kl_with_tail(logp_NK.detach(), logq_NK.detach(), keep_NK)
    assert not bool(keep_NK.all())
    assert_close(value_N, right_N.detach(), rtol=1e-9, atol=1e-12)
    assert_close(found_NK, gradient_NK, rtol=1e-9, atol=1e-12)


# ── what does not change the result ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize("divergence", [FULL[0], FULL[2], ON_SUPPORT[0], None], ids=str)
@pytest.mark.parametrize(
    "plan", [ChunkPlan(chunk=1, part=1), ChunkPlan(chunk=4, part=3), None], ids=str
)
def test_chunks_do_not_change_anything(
    divergence: DivergenceSpec | None, plan: ChunkPlan | None
) -> None:
    case = make_case(ranks=(2, 3))
    whole, whole_head = through(case, divergence, plan=ChunkPlan(chunk=99, part=99))
    ours, head = through(case, divergence, plan=plan)
    close = partial(assert_close, rtol=1e-12, atol=1e-14)
    close(ours.hidden_gradient_ND, whole.hidden_gradient_ND)
    close(head.weight_VD, whole_head.weight_VD)
    close(head.bias_V, whole_head.bias_V)
    close(head.down_RD, whole_head.down_RD)
    close(head.up_VR, whole_head.up_VR)
    for name in (field.name for field in fields(TokenStatistics)):
        close(getattr(ours.statistics, name), getattr(whole.statistics, name))
    if divergence is not None:
        assert ours.found is not None and whole.found is not None
        close(ours.found.value_N, whole.found.value_N)


def test_blocks_do_not_change_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case()
    whole, _ = through(case, FULL[0])
    monkeypatch.setattr(torch_backend, "CPU_BLOCK", 1)  # one row at a time
    ours, _ = through(case, FULL[0])
    assert_close(ours.hidden_gradient_ND, whole.hidden_gradient_ND, rtol=1e-12, atol=1e-14)
    assert_close(ours.statistics.reverse_kl_N, whole.statistics.reverse_kl_N)


@pytest.mark.parametrize("divergence", [*FULL, *ON_SUPPORT], ids=label)
@pytest.mark.parametrize("sampled", [False, True])
def test_a_teacher_of_nan_without_weight_does_not_leak(
    divergence: DivergenceSpec, sampled: bool
) -> None:
    case = make_case()
    right, right_head = through(case, divergence, sampled=sampled)
    off_N = case.weight_N == 0
    case.teacher.hidden_ND[off_N] = torch.nan
    ours, head = through(case, divergence, sampled=sampled)
    assert bool(ours.statistics.teacher_logp_N[off_N].isnan().all())
    assert ours.found is not None and right.found is not None
    assert torch.equal(ours.found.value_N, right.found.value_N)
    assert torch.equal(ours.hidden_gradient_ND, right.hidden_gradient_ND)
    assert torch.equal(head.weight_VD, right_head.weight_VD)
    if not sampled:
        assert not ours.hidden_gradient_ND[off_N].any()


@pytest.mark.parametrize("divergence", [FULL[0], ON_SUPPORT[0]], ids=label)
def test_a_teacher_of_nan_with_weight_is_seen(divergence: DivergenceSpec) -> None:
    case = make_case()
    case.teacher.hidden_ND[0] = torch.nan
    ours, _ = through(case, divergence)
    assert ours.found is not None
    assert bool(ours.found.value_N[0].isnan()) and bool(ours.hidden_gradient_ND[0].isnan().all())
    assert bool(ours.hidden_gradient_ND[1:].isfinite().all())


@pytest.mark.parametrize("divergence", EVERY, ids=label)
def test_one_head_for_both(divergence: DivergenceSpec) -> None:
    """Self-distillation: one weight, two contexts. The teacher's use of it gets no gradient."""
    case = make_case(sizes=(5, 5))
    weight_VD = case.student.weight_VD
    case = replace(case, teacher=replace(case.teacher, weight_VD=weight_VD))
    ours, into = through(case, divergence)
    off = differences(ours, into, expected(case, divergence))
    assert max(off.values()) < 1e-9, off
    case = replace(case, teacher=replace(case.student))
    ours, into = through(case, divergence, sampled=False)
    assert ours.found is not None
    # In float64 the tail of a support has a floor of 2e-15, which a value may show.
    assert float(ours.found.value_N.abs().max()) < 1e-12
    if divergence.support is None:
        assert float(into.weight_VD.abs().max()) < 1e-14


def test_a_frozen_head_saves_its_gradient_and_nothing_else() -> None:
    case = make_case(bias=True)
    trained, into = through(case, FULL[0])
    frozen = fused_linear_divergence(case.student, case.teacher, case.asked(FULL[0]), plan=SMALL)
    assert torch.equal(frozen.hidden_gradient_ND, trained.hidden_gradient_ND)
    twice = HeadGradient(weight_VD=into.weight_VD.clone(), bias_V=into.bias_V.clone())
    fused_linear_divergence(case.student, case.teacher, case.asked(FULL[0]), into=twice, plan=SMALL)
    assert_close(twice.weight_VD, 2 * into.weight_VD)  # added, not set
    assert_close(twice.bias_V, 2 * into.bias_V)


def test_an_adapter_on_a_frozen_head_saves_the_gradient_of_the_weight() -> None:
    case = make_case(bias=True, ranks=(2, 0))
    right = expected(case, FULL[0])
    low = case.student.low_rank
    assert low is not None
    into = HeadGradient(down_RD=torch.zeros_like(low.down_RD), up_VR=torch.zeros_like(low.up_VR))
    for times in (1, 2):  # added, not set
        ours = fused_linear_divergence(
            case.student, case.teacher, case.asked(FULL[0]), into=into, plan=SMALL
        )
        assert_close(into.down_RD, times * right.down_RD)
        assert_close(into.up_VR, times * right.up_VR)
        assert_close(ours.hidden_gradient_ND, right.hidden_ND)


@pytest.mark.parametrize("divergence", [FULL[0], ON_SUPPORT[0], None], ids=str)
def test_an_adapter_in_bfloat16_is_as_close_as_bfloat16_allows(
    divergence: DivergenceSpec | None,
) -> None:
    """And gathers its gradients in float32."""
    case = make_case(num_rows=24, vocab_size=40, sizes=(16, 16), ranks=(4, 4)).to(torch.bfloat16)
    ours, into = through(case, divergence)
    assert into.up_VR is not None and into.up_VR.dtype == torch.float32
    off = differences(ours, into, expected(case, divergence))
    assert max(off.values()) < 4e-2, off


def test_words_that_only_one_side_has_get_no_gradient() -> None:
    case = make_case(vocab_size=20)
    case = replace(case, student=case.teacher, teacher=case.student)  # a student with 3 more words
    ours, into = through(case, FULL[0])
    off = differences(ours, into, expected(case, FULL[0]))
    assert max(off.values()) < 1e-9, off
    assert into.weight_VD[:20].any() and not into.weight_VD[20:].any()


# ── sampled words ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("divergence", [None, FULL[0], ON_SUPPORT[0]], ids=str)
def test_a_coefficient_may_depend_on_the_statistics(divergence: DivergenceSpec | None) -> None:
    """Policy gradient with an importance ratio and a baseline, which need log π and KL(π‖q)."""
    case = make_case(sizes=(6, 6))
    sampler_logp_N = -torch.rand(7, dtype=torch.float64) - 2.5
    seen: list[slice] = []

    def coefficient(rows: slice, found: TokenStatistics) -> Tensor:
        seen.append(rows)
        assert found.teacher_logp_N is not None and found.reverse_kl_N is not None
        with torch.enable_grad():
            logp_N = found.student_logp_N.requires_grad_()
            advantage_N = teacher_gap(
                found.teacher_logp_N, sampler_logp_N[rows], baseline_T=-found.reverse_kl_N
            )
            loss_N = policy_gradient(
                logp_N, advantage_N, sampler_logp_T=sampler_logp_N[rows], clip=(0.2, 0.3)
            )
            (gradient_N,) = torch.autograd.grad(loss_N.sum() / 7, logp_N)
        return gradient_N

    asked = replace(case.asked(divergence), sampled=coefficient)
    ours = fused_linear_divergence(case.student, case.teacher, asked, plan=SMALL)
    assert [n for rows in seen for n in range(rows.start, rows.stop)] == list(range(7))
    right = expected(case, None, sampled=False)
    fixed_N = coefficient(
        slice(0, 7),
        TokenStatistics(
            student_logp_N=right.student_logp_N,
            student_entropy_N=right.student_entropy_N,
            teacher_logp_N=right.teacher_logp_N,
            reverse_kl_N=right.reverse_kl_N,
        ),
    )
    assert fixed_N.any() and not fixed_N.all(), "a clip that acts on some"
    right = expected(replace(case, coefficient_N=fixed_N), divergence)
    assert_close(ours.hidden_gradient_ND, right.hidden_ND, rtol=1e-8, atol=1e-12)


def test_without_a_teacher_only_the_sampled_words_count() -> None:
    case = make_case()
    into = room(case)
    ours = fused_linear_divergence(case.student, None, case.asked(None), into=into, plan=SMALL)
    off = differences(ours, into, expected(case, None))
    assert max(off.values()) < 1e-9 and ours.found is None
    assert ours.statistics.teacher_logp_N is ours.statistics.reverse_kl_N is None
    assert "teacher_logp_N" not in off


def test_nothing_asked_is_a_gradient_of_zero() -> None:
    case = make_case()
    ours = fused_linear_divergence(
        case.student, case.teacher, case.asked(None, sampled=False), plan=SMALL
    )
    assert not ours.hidden_gradient_ND.any()
    assert_close(ours.statistics.reverse_kl_N, expected(case, None).reverse_kl_N)


@pytest.mark.parametrize("divergence", [None, FULL[2], ON_SUPPORT[0]], ids=str)
def test_no_rows(divergence: DivergenceSpec | None) -> None:
    case = make_case(num_rows=0)
    ours, into = through(case, divergence, plan=None)
    assert ours.hidden_gradient_ND.shape == (0, 5) and not into.weight_VD.any()
    assert ours.statistics.student_logp_N.shape == (0,)


# ── precision and extremes ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("divergence", [*EVERY, None], ids=lambda d: label(d) if d else "sampled")
def test_float32_is_close_to_float64(divergence: DivergenceSpec | None) -> None:
    case = make_case(num_rows=24, vocab_size=60, sizes=(16, 24), spread=2.0).to(torch.float32)
    ours, into = through(case, divergence, plan=ChunkPlan(chunk=8, part=4))
    off = differences(ours, into, expected(case, divergence))
    assert max(off.values()) < 1e-5, off


@pytest.mark.parametrize("divergence", [*FULL, None], ids=lambda d: label(d) if d else "sampled")
def test_bfloat16_is_as_close_as_its_logits(divergence: DivergenceSpec | None) -> None:
    """Against float64 on the same inputs: logits of three digits make gradients of about two."""
    case = make_case(num_rows=24, vocab_size=60, sizes=(16, 24), spread=2.0).to(torch.bfloat16)
    ours, into = through(case, divergence, plan=ChunkPlan(chunk=8, part=4))
    off = differences(ours, into, expected(case, divergence))
    assert ours.hidden_gradient_ND.dtype == torch.bfloat16
    assert into.weight_VD.dtype == ours.statistics.student_logp_N.dtype == torch.float32
    assert max(off.values()) < 1.5e-2, off


@pytest.mark.parametrize("divergence", [*EVERY, None], ids=lambda d: label(d) if d else "sampled")
def test_from_exact_logits_bfloat16_rounds_only_the_gradients(
    divergence: DivergenceSpec | None,
) -> None:
    """Heads that copy: logits are the hidden states, with the many ties that bfloat16 makes."""
    case = exact_case().to(torch.bfloat16)
    ours, into = through(case, divergence, plan=ChunkPlan(chunk=8, part=4))
    off = differences(ours, into, expected(case, divergence))
    assert max(off["hidden_ND"], off["weight_VD"]) < 3e-3, off
    del off["hidden_ND"], off["weight_VD"], off["bias_V"]
    assert max(off.values()) < 1e-5, off


def test_hidden_states_may_have_another_dtype_than_the_head() -> None:
    case = make_case().to(torch.float32)
    low = replace(case.student, weight_VD=case.student.weight_VD.bfloat16())
    ours = fused_linear_divergence(low, case.teacher, case.asked(FULL[0]), plan=SMALL)
    assert ours.hidden_gradient_ND.dtype == torch.float32
    right = expected(replace(case, student=low), FULL[0])
    assert float((ours.hidden_gradient_ND - right.hidden_ND).norm() / right.hidden_ND.norm()) < 2e-2


@pytest.mark.parametrize("divergence", [*FULL, *ON_SUPPORT], ids=label)
def test_extreme_logits_stay_finite(divergence: DivergenceSpec) -> None:
    case = make_case(spread=1e4).to(torch.float32)
    ours, into = through(case, divergence)
    assert ours.found is not None
    for found in (ours.found.value_N, ours.hidden_gradient_ND, into.weight_VD,
                  ours.statistics.student_entropy_N, ours.statistics.reverse_kl_N):  # fmt: skip
        assert bool(found.isfinite().all())


def test_ties_are_broken_as_in_top_k() -> None:
    torch.manual_seed(0)
    student_NV, teacher_NV = (torch.randint(4, (50, 40)).double().log_softmax(-1) for _ in range(2))
    for of in ("teacher", "student", "joint"):
        right = top_k_ids(student_NV, teacher_NV, k=6, of=of)
        ids_NK, keep_NK, share_N = select_support(
            student_NV, teacher_NV, Support(k=6, of=of, form="tail")
        )
        assert torch.equal(ids_NK, right[0]) and torch.equal(keep_NK, right[1])
        assert_close(share_N.double(), overlap(student_NV, teacher_NV, 6), rtol=1e-6, atol=0)
