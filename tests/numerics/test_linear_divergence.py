"""The fused head in torch: values, by-products and all gradients against one whole graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from support.linear_divergence_reference import (
    ENDS,
    FULL,
    ON_SUPPORT,
    TOTAL_VARIATION_ON_SUPPORT,
    WITHOUT_CLOSED_FORM,
    Case,
    differences,
    exact_case,
    expected,
    label,
    make_case,
    run_case,
    zero_gradient,
)
from support.top_k_supports import overlap
from torch import Tensor
from torch.testing import assert_close

from courtside.losses.fused.linear_divergence import (
    ChunkPlan,
    _HeadMatmuls,
    fused_linear_divergence,
)
from courtside.losses.fused.support_gradient import reverse_kl_with_tail
from courtside.losses.fused.torch_backend import TorchVocabularyPass
from courtside.losses.fused.types import (
    DivergenceSpec,
    Extrapolation,
    HeadGradient,
    Support,
    TokenStatistics,
    TopKTarget,
)
from courtside.losses.policy_gradient import SampledTokenLoss, policy_gradient, teacher_gap
from courtside.losses.top_k import support_mass, tail_logp, top_k_divergence, top_k_ids

pytestmark = pytest.mark.filterwarnings("ignore:.*without a tail")
EVERY = [*FULL, *ENDS, *ON_SUPPORT, *WITHOUT_CLOSED_FORM, *TOTAL_VARIATION_ON_SUPPORT]
SMALL = ChunkPlan(chunk=3, part=2)
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scale": 1.7, "bias": True},
    "capped": {"softcap": 2.0, "scale": 0.8, "bias": True},
    "adapted": {"ranks": (2, 0)},
    "both adapted": {"softcap": 2.0, "scale": 0.8, "bias": True, "ranks": (3, 2)},
}


run = partial(run_case, plan=SMALL)


def log_probs(case: Case) -> list[Tensor]:
    """Of student and teacher over the tokens they share."""
    sides, vocab_size = (case.student, case.teacher), len(case.student.weight_VD)
    logits = (side.hidden_ND @ side.weight_VD[:vocab_size].T for side in sides)
    return [(x_NV / case.temperature_N[:, None]).log_softmax(-1) for x_NV in logits]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("divergence", [*EVERY, None], ids=lambda d: label(d) if d else "sampled")
def test_everything_is_what_autograd_gives(divergence: DivergenceSpec | None, head: str) -> None:
    case = make_case(**HEADS[head])
    ours, into = run(case, divergence)
    off = differences(ours, into, expected(case, divergence))
    assert max(off.values()) < 1e-9, off


@pytest.mark.parametrize("divergence", EVERY, ids=label)
def test_the_losses_on_log_probs_agree(divergence: DivergenceSpec) -> None:
    """A second witness: the losses on log-probs, differentiated by autograd."""
    case = make_case(sizes=(6, 6))
    hidden_ND = case.student.hidden_ND.requires_grad_()
    logp_NV, logq_NV = log_probs(case)
    on = divergence.support
    ours, _ = run(case, divergence, sampled=False)
    assert ours.divergence is not None
    if on is None:
        value_N = divergence.value(logp_NV, logq_NV, None)
    else:
        ids_NK, keep_NK = top_k_ids(logp_NV, logq_NV, k=on.k, of=on.of)
        logp_NK, logq_NK = logp_NV.gather(-1, ids_NK), logq_NV.gather(-1, ids_NK)
        value_N = divergence.value(logp_NK, logq_NK, keep_NK)
        assert_close(ours.divergence.student_mass_N, support_mass(logp_NK, keep_NK).detach())
        assert_close(ours.divergence.teacher_mass_N, support_mass(logq_NK, keep_NK).detach())
        assert_close(ours.divergence.overlap_N, overlap(logp_NV, logq_NV, on.k).detach())
    (gradient_ND,) = torch.autograd.grad((value_N * case.weight_N).sum(), hidden_ND)
    on_N = case.weight_N > 0
    assert_close(ours.divergence.value_N[on_N], value_N[on_N].detach(), rtol=1e-9, atol=1e-12)
    assert_close(ours.hidden_gradient_ND, gradient_ND, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("form", ["tail", "stop_gradient", "renormalized", "naive"])
def test_a_cap_on_tokens_of_a_support(form: str) -> None:
    case = make_case(num_rows=4)
    on = Support(k=5, of="joint", form=form)
    spec = DivergenceSpec(name="reverse_kl", support=on, clip=0.02)
    ours, _ = run(case, spec, sampled=False)
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
    """Also where next to nothing is left for the tail, and where tokens are listed twice."""
    logp_NV, logq_NV = ((spread * torch.randn(9, 40)).double().log_softmax(-1) for _ in range(2))
    ids_NK, keep_NK = top_k_ids(logp_NV, logq_NV, k=7, of="joint")
    logp_NK, logq_NK = (x.gather(-1, ids_NK).requires_grad_() for x in (logp_NV, logq_NV))
    tails = tuple(tail_logp(x, ids_NK).requires_grad_() for x in (logp_NV, logq_NV))
    right_N = top_k_divergence(
        logp_NK, logq_NK, keep_NK, name="reverse_kl", form="tail", tails=tails
    )
    leaves = (logp_NK, tails[0])
    h_NK, h_tail_N = torch.autograd.grad(right_N.sum(), leaves)
    with torch.no_grad():
        value_N, ours_NK, ours_tail_N = reverse_kl_with_tail(logp_NK, logq_NK, keep_NK, tails)
    # By logits: the + 1 that ours leaves out of each h is a gradient of −π·1 + π = 0.
    p_NK, tail_N = logp_NK.exp().masked_fill(~keep_NK, 0.0).detach(), tails[0].exp().detach()
    assert not bool(keep_NK.all())
    assert_close(value_N, right_N.detach(), rtol=1e-9, atol=1e-12)
    assert_close(ours_NK + p_NK, h_NK, rtol=1e-9, atol=1e-12)
    assert_close(ours_tail_N + tail_N, h_tail_N, rtol=1e-9, atol=1e-12)


# ── what does not change the result ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize("divergence", [FULL[0], FULL[2], ON_SUPPORT[0], None], ids=str)
@pytest.mark.parametrize(
    "plan", [ChunkPlan(chunk=1, part=1), ChunkPlan(chunk=4, part=3), None], ids=str
)
def test_chunks_do_not_change_anything(
    divergence: DivergenceSpec | None, plan: ChunkPlan | None
) -> None:
    case = make_case(ranks=(2, 3))
    whole, whole_head = run(case, divergence, plan=ChunkPlan(chunk=99, part=99))
    ours, head = run(case, divergence, plan=plan)
    close = partial(assert_close, rtol=1e-12, atol=1e-14)
    close(ours.hidden_gradient_ND, whole.hidden_gradient_ND)
    close(head.weight_VD, whole_head.weight_VD)
    close(head.bias_V, whole_head.bias_V)
    close(head.down_RD, whole_head.down_RD)
    close(head.up_VR, whole_head.up_VR)
    for name in (field.name for field in fields(TokenStatistics)):
        close(getattr(ours.statistics, name), getattr(whole.statistics, name))
    if divergence is not None:
        assert ours.divergence is not None and whole.divergence is not None
        close(ours.divergence.value_N, whole.divergence.value_N)


def test_blocks_do_not_change_anything() -> None:
    case = make_case()
    whole, _ = run(case, FULL[0])
    row_by_row = partial(TorchVocabularyPass, block_elements=1)
    ours, _ = run(case, FULL[0], backend=row_by_row)
    assert_close(ours.hidden_gradient_ND, whole.hidden_gradient_ND, rtol=1e-12, atol=1e-14)
    assert_close(ours.statistics.reverse_kl_N, whole.statistics.reverse_kl_N)


@pytest.mark.parametrize("divergence", [*FULL, *ON_SUPPORT], ids=label)
@pytest.mark.parametrize("sampled", [False, True])
def test_a_teacher_of_nan_without_weight_does_not_leak(
    divergence: DivergenceSpec, sampled: bool
) -> None:
    case = make_case()
    right, right_head = run(case, divergence, sampled=sampled)
    off_N = case.weight_N == 0
    case.teacher.hidden_ND[off_N] = torch.nan
    ours, head = run(case, divergence, sampled=sampled)
    assert bool(ours.statistics.teacher_logp_N[off_N].isnan().all())
    assert ours.divergence is not None and right.divergence is not None
    assert torch.equal(ours.divergence.value_N, right.divergence.value_N)
    assert torch.equal(ours.hidden_gradient_ND, right.hidden_gradient_ND)
    assert torch.equal(head.weight_VD, right_head.weight_VD)
    if not sampled:
        assert not ours.hidden_gradient_ND[off_N].any()


@pytest.mark.parametrize("divergence", [FULL[0], ON_SUPPORT[0]], ids=label)
def test_a_teacher_of_nan_with_weight_gives_nan(divergence: DivergenceSpec) -> None:
    case = make_case()
    case.teacher.hidden_ND[0] = torch.nan
    ours, _ = run(case, divergence)
    assert ours.divergence is not None
    assert bool(ours.divergence.value_N[0].isnan()) and bool(
        ours.hidden_gradient_ND[0].isnan().all()
    )
    assert bool(ours.hidden_gradient_ND[1:].isfinite().all())


@pytest.mark.parametrize("divergence", EVERY, ids=label)
def test_one_head_for_both(divergence: DivergenceSpec) -> None:
    """Self-distillation: one weight, two contexts. The teacher's use of it gets no gradient."""
    case = make_case(sizes=(5, 5))
    weight_VD = case.student.weight_VD
    case = replace(case, teacher=replace(case.teacher, weight_VD=weight_VD))
    ours, into = run(case, divergence)
    off = differences(ours, into, expected(case, divergence))
    assert max(off.values()) < 1e-9, off
    case = replace(case, teacher=replace(case.student))
    ours, into = run(case, divergence, sampled=False)
    assert ours.divergence is not None
    # In float64 the tail of a support has a floor of 2e-15, which a value may show.
    assert float(ours.divergence.value_N.abs().max()) < 1e-12
    if divergence.support is None and divergence.name != "total_variation":  # has a kink there
        assert float(into.weight_VD.abs().max()) < 1e-14


def test_a_frozen_head_saves_its_gradient_and_nothing_else() -> None:
    case = make_case(bias=True)
    trained, into = run(case, FULL[0])
    frozen = fused_linear_divergence(case.student, case.teacher, case.spec(FULL[0]), plan=SMALL)
    assert torch.equal(frozen.hidden_gradient_ND, trained.hidden_gradient_ND)
    twice = HeadGradient(weight_VD=into.weight_VD.clone(), bias_V=into.bias_V.clone())
    fused_linear_divergence(
        case.student, case.teacher, case.spec(FULL[0]), head_gradient=twice, plan=SMALL
    )
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
            case.student, case.teacher, case.spec(FULL[0]), head_gradient=into, plan=SMALL
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
    ours, into = run(case, divergence)
    assert into.up_VR is not None and into.up_VR.dtype == torch.float32
    off = differences(ours, into, expected(case, divergence))
    assert max(off.values()) < 4e-2, off


def test_tokens_that_only_one_side_has_get_no_gradient() -> None:
    case = make_case(vocab_size=20)
    case = replace(case, student=case.teacher, teacher=case.student)  # a student with 3 more tokens
    ours, into = run(case, FULL[0])
    off = differences(ours, into, expected(case, FULL[0]))
    assert max(off.values()) < 1e-9, off
    assert into.weight_VD[:20].any() and not into.weight_VD[20:].any()


# ── sampled tokens ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("divergence", [None, FULL[0], ON_SUPPORT[0]], ids=str)
def test_a_coefficient_may_depend_on_the_statistics(divergence: DivergenceSpec | None) -> None:
    """Policy gradient with an importance ratio and a baseline, which need log π and KL(π‖q)."""
    case = make_case(sizes=(6, 6))
    sampler_logp_N = -torch.rand(7, dtype=torch.float64) - 2.5
    teacher_logp_N = expected(case, None).teacher_logp_N
    loss = SampledTokenLoss(
        weight_N=torch.full((7,), 1 / 7, dtype=torch.float64),
        advantage_N=teacher_gap(teacher_logp_N, sampler_logp_N),
        sampler_logp_N=sampler_logp_N,
        clip=(0.2, 0.3),
        baseline=True,
    )
    spec = replace(case.spec(divergence), sampled=(loss,))
    ours = fused_linear_divergence(case.student, case.teacher, spec, plan=SMALL)
    right = expected(case, None, sampled=False)
    logp_N = right.student_logp_N.requires_grad_()
    advantage_N = teacher_gap(teacher_logp_N, sampler_logp_N, baseline_T=-right.reverse_kl_N)
    loss_N = policy_gradient(logp_N, advantage_N, sampler_logp_T=sampler_logp_N, clip=(0.2, 0.3))
    (fixed_N,) = torch.autograd.grad(loss_N.sum() / 7, logp_N)
    assert fixed_N.any() and not fixed_N.all(), "a clip that acts on some"
    right = expected(replace(case, coefficient_N=fixed_N), divergence)
    assert_close(ours.hidden_gradient_ND, right.hidden_ND, rtol=1e-8, atol=1e-12)


def test_rows_without_weight_may_have_nan_in_a_sampled_loss() -> None:
    """No advantage, no sampler: the row adds nothing, and no NaN reaches the others."""
    case = make_case()
    sampler_logp_N = -torch.rand(7, dtype=torch.float64) - 2.5
    weight_N = torch.ones(7, dtype=torch.float64)
    weight_N[3] = 0.0
    loss = SampledTokenLoss(
        weight_N=weight_N, advantage_N=case.coefficient_N, sampler_logp_N=sampler_logp_N
    )
    right = fused_linear_divergence(
        case.student, None, replace(case.spec(None), sampled=(loss,)), plan=SMALL
    )
    loss.advantage_N[3] = sampler_logp_N[3] = torch.nan
    ours = fused_linear_divergence(
        case.student, None, replace(case.spec(None), sampled=(loss,)), plan=SMALL
    )
    assert torch.equal(ours.hidden_gradient_ND, right.hidden_gradient_ND)
    assert not ours.hidden_gradient_ND[3].any()


def test_without_a_teacher_only_the_sampled_tokens_count() -> None:
    case = make_case()
    into = zero_gradient(case)
    ours = fused_linear_divergence(
        case.student, None, case.spec(None), head_gradient=into, plan=SMALL
    )
    off = differences(ours, into, expected(case, None))
    assert max(off.values()) < 1e-9 and ours.divergence is None
    assert ours.statistics.teacher_logp_N is ours.statistics.reverse_kl_N is None
    assert "teacher_logp_N" not in off


def test_without_a_loss_the_gradient_is_zero() -> None:
    case = make_case()
    ours = fused_linear_divergence(
        case.student, case.teacher, case.spec(None, sampled=False), plan=SMALL
    )
    assert not ours.hidden_gradient_ND.any()
    assert_close(ours.statistics.reverse_kl_N, expected(case, None).reverse_kl_N)


@pytest.mark.parametrize("divergence", [None, FULL[2], ON_SUPPORT[0]], ids=str)
def test_no_rows(divergence: DivergenceSpec | None) -> None:
    case = make_case(num_rows=0)
    ours, into = run(case, divergence, plan=None)
    assert ours.hidden_gradient_ND.shape == (0, 5) and not into.weight_VD.any()
    assert ours.statistics.student_logp_N.shape == (0,)


# ── precision and extremes ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("divergence", [*EVERY, None], ids=lambda d: label(d) if d else "sampled")
def test_float32_is_close_to_float64(divergence: DivergenceSpec | None) -> None:
    case = make_case(num_rows=24, vocab_size=60, sizes=(16, 24), spread=2.0).to(torch.float32)
    ours, into = run(case, divergence, plan=ChunkPlan(chunk=8, part=4))
    off = differences(ours, into, expected(case, divergence))
    assert max(off.values()) < 1e-5, off


@pytest.mark.parametrize("divergence", [*FULL, None], ids=lambda d: label(d) if d else "sampled")
def test_bfloat16_is_as_close_as_its_logits(divergence: DivergenceSpec | None) -> None:
    """Against float64 on the same inputs: logits of three digits make gradients of about two."""
    case = make_case(num_rows=24, vocab_size=60, sizes=(16, 24), spread=2.0).to(torch.bfloat16)
    ours, into = run(case, divergence, plan=ChunkPlan(chunk=8, part=4))
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
    ours, into = run(case, divergence, plan=ChunkPlan(chunk=8, part=4))
    off = differences(ours, into, expected(case, divergence))
    assert max(off["hidden_ND"], off["weight_VD"]) < 3e-3, off
    del off["hidden_ND"], off["weight_VD"], off["bias_V"]
    assert max(off.values()) < 1e-5, off


@pytest.fixture
def nan_in_new_memory() -> Iterator[None]:
    """Every tensor that is allocated without a value is filled with NaN."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        (
            torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        ),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]  # type: ignore[attr-defined]


@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_memory_after_a_row_of_logits_reaches_no_gradient(dtype: torch.dtype) -> None:
    """Rows are padded, and matmuls with AMX multiply what lies there by zero."""
    case = make_case(num_rows=64, vocab_size=258, sizes=(32, 32)).to(dtype)
    matmuls = _HeadMatmuls(case.student, 64, 258)
    padding_NP = matmuls.buffer_NV.as_strided((64, 62), (320, 1), 258)
    assert not padding_NP.any()
    ours, into = run(case, FULL[0], plan=None)
    off = differences(ours, into, expected(case, FULL[0]))
    assert max(off.values()) < 1.5e-2, off


def test_hidden_states_may_have_another_dtype_than_the_head() -> None:
    case = make_case().to(torch.float32)
    low = replace(case.student, weight_VD=case.student.weight_VD.bfloat16())
    ours = fused_linear_divergence(low, case.teacher, case.spec(FULL[0]), plan=SMALL)
    assert ours.hidden_gradient_ND.dtype == torch.float32
    right = expected(replace(case, student=low), FULL[0])
    assert float((ours.hidden_gradient_ND - right.hidden_ND).norm() / right.hidden_ND.norm()) < 2e-2


@pytest.mark.parametrize("divergence", [*FULL, *ON_SUPPORT], ids=label)
def test_extreme_logits_stay_finite(divergence: DivergenceSpec) -> None:
    case = make_case(spread=1e4).to(torch.float32)
    ours, into = run(case, divergence)
    assert ours.divergence is not None
    for values in (ours.divergence.value_N, ours.hidden_gradient_ND, into.weight_VD,
                  ours.statistics.student_entropy_N, ours.statistics.reverse_kl_N):  # fmt: skip
        assert bool(values.isfinite().all())


# ── other targets ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("lam", [0.5, 1.5])
@pytest.mark.parametrize("divergence", [*FULL, WITHOUT_CLOSED_FORM[0]], ids=label)
@pytest.mark.parametrize("head", HEADS)
def test_an_extrapolated_target(divergence: DivergenceSpec, lam: float, head: str) -> None:
    """q^λ·ref^(1−λ), normalized: as a teacher whose logits are those of the mixture."""
    case = make_case(**HEADS[head])
    other = make_case(seed=1, **HEADS[head]).teacher
    target = Extrapolation(teacher=case.teacher, reference=other, lam=lam)
    logq_NV, reference_NV = (
        teacher_log_probs(replace(case, teacher=side)) for side in (case.teacher, other)
    )
    mixed_NV = (lam * logq_NV + (1 - lam) * reference_NV).log_softmax(-1)
    copied = replace(
        case.teacher, hidden_ND=mixed_NV * case.temperature_N[:, None], scale=1.0, softcap=None,
        weight_VD=torch.eye(mixed_NV.shape[1]).double(), bias_V=None, low_rank=None,
    )  # fmt: skip
    ours = fused_linear_divergence(case.student, target, case.spec(divergence), plan=SMALL)
    right = expected(replace(case, teacher=copied), divergence)
    off = differences(ours, None, right)
    assert max(off.values()) < 1e-9, off


def teacher_log_probs(case: Case) -> Tensor:
    """[N, V] from the statistics of one token at a time."""
    vocab_size = len(case.student.weight_VD)
    columns = []
    for token in range(vocab_size):
        at_token = replace(case, ids_N=torch.full_like(case.ids_N, token))
        columns.append(expected(at_token, None).teacher_logp_N)
    return torch.stack(columns, dim=-1)


TOP_K_FORMS = [
    ("reverse_kl", {}, ("tail", "stop_gradient", "renormalized", "naive")),
    ("forward_kl", {}, ("tail", "stop_gradient", "renormalized", "naive")),
    ("jsd", {"beta": 0.3}, ("tail", "renormalized")),
    ("skew_reverse_kl", {"alpha": 0.2}, ("tail", "renormalized")),
    ("total_variation", {}, ("tail", "renormalized")),
]


@pytest.mark.parametrize("head", ["plain", "both adapted"])
@pytest.mark.parametrize("clip", [None, 0.02])
@pytest.mark.parametrize(
    ("name", "parameters", "form"), [(n, p, f) for n, p, forms in TOP_K_FORMS for f in forms]
)
def test_a_teacher_of_which_only_the_top_k_are_known(
    name: str, parameters: dict[str, float], form: Any, clip: float | None, head: str
) -> None:
    """The value and the gradient that its hidden states give, from k of the K that it gives."""
    case = make_case(**HEADS[head])
    top = teacher_log_probs(case).topk(6, dim=-1)
    target = TopKTarget(ids_NK=top.indices, logp_NK=top.values)
    support = Support(k=4, of="teacher", form=form)
    divergence = DivergenceSpec(name=name, parameters=parameters, support=support, clip=clip)
    into = zero_gradient(case)
    ours = fused_linear_divergence(
        case.student, target, case.spec(divergence), head_gradient=into, plan=SMALL
    )
    right, right_head = run(case, divergence)
    assert ours.divergence is not None and right.divergence is not None
    for field in fields(ours.divergence):
        assert_close(getattr(ours.divergence, field.name), getattr(right.divergence, field.name))
    assert_close(ours.hidden_gradient_ND, right.hidden_gradient_ND, rtol=1e-9, atol=1e-12)
    assert_close(into.weight_VD, right_head.weight_VD, rtol=1e-9, atol=1e-12)
    assert_close(ours.statistics.student_entropy_N, right.statistics.student_entropy_N)
    assert ours.statistics.reverse_kl_N is ours.statistics.teacher_entropy_N is None


@pytest.mark.parametrize("of", ["student", "joint"])
@pytest.mark.parametrize("clip", [None, 0.02])
@pytest.mark.parametrize(
    ("name", "parameters", "form"), [(n, p, f) for n, p, forms in TOP_K_FORMS for f in forms]
)
def test_a_teacher_that_was_asked_about_the_students_tokens(
    name: str, parameters: dict[str, float], form: Any, clip: float | None, of: Any
) -> None:
    """The value and the gradient that its hidden states give, on supports that it does not choose
    alone, from its log-probs of k of 6 tokens of the student."""
    case = make_case()
    teacher_NV = teacher_log_probs(case)
    as_teacher = replace(case, teacher=replace(case.student, hidden_ND=case.student.hidden_ND))
    ids_NK = teacher_log_probs(as_teacher).topk(6, dim=-1).indices
    top = teacher_NV.topk(5, dim=-1)
    num_teacher = (
        5 if of == "joint" else 0
    )  # it need not tell its own for a support of the student's
    target = TopKTarget(
        ids_NK=torch.cat([top.indices[:, :num_teacher], ids_NK], dim=-1),
        logp_NK=torch.cat([top.values[:, :num_teacher], teacher_NV.gather(-1, ids_NK)], dim=-1),
        num_student=6,
    )
    support = Support(k=4, of=of, form=form)
    divergence = DivergenceSpec(name=name, parameters=parameters, support=support, clip=clip)
    into = zero_gradient(case)
    ours = fused_linear_divergence(
        case.student, target, case.spec(divergence), head_gradient=into, plan=SMALL
    )
    right, right_head = run(case, divergence)
    assert ours.divergence is not None and right.divergence is not None
    for field in fields(ours.divergence):
        ours_N = getattr(ours.divergence, field.name)
        if field.name == "overlap_N" and of == "student":
            assert ours_N is None, "nobody told"
        else:
            assert_close(ours_N, getattr(right.divergence, field.name))
    assert_close(ours.hidden_gradient_ND, right.hidden_gradient_ND, rtol=1e-9, atol=1e-12)
    assert_close(into.weight_VD, right_head.weight_VD, rtol=1e-9, atol=1e-12)


def test_what_a_top_k_teacher_cannot_serve_is_refused() -> None:
    case = make_case()
    top = teacher_log_probs(case).topk(6, dim=-1)
    target = TopKTarget(ids_NK=top.indices, logp_NK=top.values)

    def refused(divergence: DivergenceSpec, says: str) -> None:
        with pytest.raises(AssertionError, match=says):
            fused_linear_divergence(case.student, target, case.spec(divergence))

    refused(FULL[0], "whole vocabulary needs its hidden states")
    for of in ("student", "joint"):
        on = Support(k=4, of=of, form="tail")
        refused(DivergenceSpec(name="reverse_kl", support=on), "use of = 'teacher'")
    with_student = replace(target, num_student=3)
    for of, k, says in (("student", 4, "gives 3 of them"), ("joint", 4, "gives 3 of them"),
                        ("teacher", 4, "gives its 3 most likely")):  # fmt: skip
        divergence = DivergenceSpec(name="reverse_kl", support=Support(k=k, of=of, form="tail"))
        with pytest.raises(AssertionError, match=says):
            fused_linear_divergence(case.student, with_student, case.spec(divergence))
    on = Support(k=7, of="teacher", form="tail")
    refused(DivergenceSpec(name="reverse_kl", support=on), "support.k = 7.* 6 most likely")
    loss = replace(case.sampled_loss(), baseline=True)
    with pytest.raises(AssertionError, match="a baseline needs"):
        fused_linear_divergence(case.student, target, replace(case.spec(None), sampled=(loss,)))
