"""The fused head's kernels on the device: values and all gradients against one graph in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.float64 import relative_error
from support.linear_divergence_reference import (
    ENDS,
    FULL,
    ON_SUPPORT,
    Case,
    differences,
    exact_case,
    expected,
    label,
    make_case,
    run_case,
)
from torch import Tensor

from courtside.losses.fused.linear_divergence import (
    ChunkPlan,
    choose_backend,
    fused_linear_divergence,
)
from courtside.losses.fused.topk_kernels import allocate_group_maxima, allocate_top_k, select_top_k
from courtside.losses.fused.types import DivergenceSpec, Support

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*without a tail"),
    # Of tokens past the end of a row, in Triton's interpreter; they are never stored.
    pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning"),
]
SEAMS = ChunkPlan(chunk=16, part=6)
"""Chunks and parts that do not divide the rows."""
TOP_64 = [
    DivergenceSpec(name="reverse_kl", support=Support(k=64, of=of, form="tail"))
    for of in ("teacher", "joint")
]
KINDS = [
    divergence
    for divergence in (*FULL, *ENDS, ON_SUPPORT[0], ON_SUPPORT[-1], *TOP_64)
    if divergence.support is not None or divergence.closed_form is not None
]
FEW = [FULL[0], FULL[1], FULL[2], TOP_64[0]]
HEADS: dict[str, dict[str, Any]] = {
    "scaled": {"scale": 1.7, "bias": True},
    "capped": {"softcap": 2.0, "scale": 0.8, "bias": True},
    "adapted": {"ranks": (16, 0)},
    "both adapted": {"ranks": (5, 16), "scale": 1.7, "bias": True},
}


def name(divergence: DivergenceSpec | None) -> str:
    if divergence is None:
        return "sampled"
    k = f"-{divergence.support.k}" if divergence.support else ""
    return label(divergence) + k


run = partial(run_case, plan=SEAMS, backend="triton")


def some(device: torch.device, dtype: torch.dtype = torch.float32, **options: Any) -> Case:
    """One vocabulary for all: every other would be compiled anew."""
    large = device.type == "cuda"
    settings = {"num_rows": 37 if large else 9, "vocab_size": 4999 if large else 299,
                "sizes": (96, 160), "spread": 2.0}  # fmt: skip
    return make_case(**{**settings, **options}).to(dtype, str(device))


@pytest.mark.parametrize("divergence", [*KINDS, None], ids=name)
def test_float32_is_float64_to_seven_digits(
    divergence: DivergenceSpec | None, device: torch.device
) -> None:
    case = some(device)
    ours, into = run(case, divergence)
    errors = differences(ours, into, expected(case, divergence))
    assert max(errors.values()) < 5e-5, errors


@pytest.mark.parametrize("divergence", [*FEW, None], ids=name)
@pytest.mark.parametrize("head", HEADS)
def test_scale_bias_cap_and_adapter(
    divergence: DivergenceSpec | None, head: str, device: torch.device
) -> None:
    case = some(device, spread=1.0, **HEADS[head])
    ours, into = run(case, divergence)
    errors = differences(ours, into, expected(case, divergence))
    assert max(errors.values()) < 5e-5, errors


@pytest.mark.parametrize("divergence", [*FULL, None], ids=name)
def test_bfloat16_is_as_close_as_its_logits(
    divergence: DivergenceSpec | None, device: torch.device
) -> None:
    """Against float64 on the same inputs. Which tokens are most likely differs with the logits, so
    the tokens of a support do, too: those are compared where logits are exact, below."""
    case = some(device, torch.bfloat16)
    ours, into = run(case, divergence)
    errors = differences(ours, into, expected(case, divergence))
    assert ours.hidden_gradient_ND.dtype == torch.bfloat16
    assert into.weight_VD.dtype == ours.statistics.student_logp_N.dtype == torch.float32
    assert max(errors.values()) < 2e-2, errors


@pytest.mark.parametrize("divergence", [FULL[0], None], ids=name)
def test_an_adapter_in_bfloat16_is_as_close_as_its_logits(
    divergence: DivergenceSpec | None, device: torch.device
) -> None:
    """Its gradients, gathered over chunks in float32, too."""
    case = some(device, torch.bfloat16, ranks=(16, 8))
    ours, into = run(case, divergence)
    assert into.up_VR is not None and into.up_VR.dtype == torch.float32
    errors = differences(ours, into, expected(case, divergence))
    assert max(errors.values()) < 4e-2, errors


@pytest.mark.parametrize("divergence", [*FULL, *ENDS[:2], *ON_SUPPORT[::7], None], ids=name)
def test_from_exact_logits_bfloat16_rounds_only_the_gradients(
    divergence: DivergenceSpec | None, device: torch.device
) -> None:
    large = device.type == "cuda"
    case = exact_case(num_rows=40 if large else 12, vocab_size=1003 if large else 299)
    k = 0 if divergence is None or divergence.support is None else divergence.support.k
    case = untied(case, k).to(torch.bfloat16, str(device))
    ours, into = run(case, divergence)
    errors = differences(ours, into, expected(case, divergence))
    # Half a unit of bfloat16's last place; Triton's interpreter cuts digits off instead.
    limit = 3e-3 if device.type == "cuda" else 6e-3
    assert max(errors["hidden_ND"], errors["weight_VD"]) < limit, errors
    for gradient in ("hidden_ND", "weight_VD", "bias_V"):
        del errors[gradient]
    assert max(errors.values()) < 1e-5, errors


def untied(case: Case, k: int) -> Case:
    """Without rows whose k-th and next most likely token are equally likely: either is right."""
    if not k:
        return case
    clear_N = torch.ones_like(case.weight_N, dtype=torch.bool)
    for side in (case.student, case.teacher):
        best_NK = (side.hidden_ND @ side.weight_VD.t()).topk(k + 1).values
        clear_N &= best_NK[:, -1] != best_NK[:, -2]
    rows = ("ids_N", "temperature_N", "weight_N", "coefficient_N")
    sides = (replace(s, hidden_ND=s.hidden_ND[clear_N]) for s in (case.student, case.teacher))
    student, teacher = sides
    selected = {name: getattr(case, name)[clear_N] for name in rows}
    return replace(case, student=student, teacher=teacher, **selected)


@pytest.mark.parametrize("divergence", [FULL[0], TOP_64[0], None], ids=name)
def test_hidden_states_of_float32_on_a_head_of_bfloat16(
    divergence: DivergenceSpec | None, device: torch.device
) -> None:
    """Under autocast: products of bfloat16 that add up and end in float32."""
    case = some(device)
    sides = [
        replace(side, weight_VD=side.weight_VD.bfloat16(), hidden_ND=side.hidden_ND.bfloat16())
        for side in (case.student, case.teacher)
    ]
    low = replace(case, student=sides[0], teacher=sides[1])
    wide = replace(low, student=replace(sides[0], hidden_ND=sides[0].hidden_ND.float()))
    ours, into = run(wide, divergence)
    same, same_into = run(low, divergence)
    assert ours.hidden_gradient_ND.dtype == torch.float32
    assert relative_error(same.hidden_gradient_ND, ours.hidden_gradient_ND.cpu()) < 5e-3
    torch.testing.assert_close(into.weight_VD, same_into.weight_VD)


@pytest.mark.parametrize("chunk", [5, 16, 37, None])
def test_chunks_do_not_change_the_sums(chunk: int | None, device: torch.device) -> None:
    """What chunks add up in float32 is the whole, also from bfloat16."""
    case = some(device, torch.bfloat16)
    whole, whole_into = run(case, FULL[0], plan=ChunkPlan(chunk=64, part=64))
    ours, into = run(case, FULL[0], plan=chunk and ChunkPlan(chunk=chunk, part=max(1, chunk // 2)))
    assert relative_error(ours.hidden_gradient_ND, whole.hidden_gradient_ND.cpu()) < 4e-3
    assert relative_error(into.weight_VD, whole_into.weight_VD.cpu()) < 1e-4
    torch.testing.assert_close(ours.statistics.reverse_kl_N, whole.statistics.reverse_kl_N)


@pytest.mark.parametrize("vocab_size", [151936, 151669, 49152, 32003])
@pytest.mark.parametrize("divergence", [FULL[0], TOP_64[1]], ids=name)
def test_real_vocabularies(
    vocab_size: int, divergence: DivergenceSpec, device: torch.device
) -> None:
    vocab_size = vocab_size if device.type == "cuda" else vocab_size // 100
    case = exact_like(some(device, vocab_size=vocab_size, num_rows=7, sizes=(64, 32)))
    ours, into = run(case, divergence)
    errors = differences(ours, into, expected(case, divergence))
    assert max(errors.values()) < 1e-4, errors


def exact_like(case: Case) -> Case:
    """Inputs of float32 whose products have few digits: the order of a support does not change."""

    def rounded(side: Any) -> Any:
        hidden_ND = (side.hidden_ND * 8).round() / 8
        weight_VD = (side.weight_VD * 64).round() / 64
        # A little more for each token: no ties.
        step = torch.arange(weight_VD.shape[0], device=weight_VD.device) / 2**20
        weight_VD[:, 0] += step
        hidden_ND[:, 0] = 1.0
        return replace(side, hidden_ND=hidden_ND, weight_VD=weight_VD)

    return replace(case, student=rounded(case.student), teacher=rounded(case.teacher))


@pytest.mark.parametrize("divergence", [*FULL, ON_SUPPORT[0]], ids=name)
def test_a_teacher_of_nan_without_weight_does_not_leak(
    divergence: DivergenceSpec, device: torch.device
) -> None:
    case = some(device)
    right, right_into = run(case, divergence)
    off_N = case.weight_N == 0
    case.teacher.hidden_ND[off_N] = math.nan
    ours, into = run(case, divergence)
    torch.testing.assert_close(
        ours.hidden_gradient_ND, right.hidden_gradient_ND, rtol=1e-4, atol=1e-6
    )
    torch.testing.assert_close(into.weight_VD, right_into.weight_VD, rtol=1e-4, atol=1e-6)
    case.teacher.hidden_ND[0] = math.nan
    ours, _ = run(case, divergence)
    assert bool(ours.hidden_gradient_ND[0].isnan().all()), "where it has weight, it is seen"


@pytest.mark.parametrize("divergence", FEW, ids=name)
def test_one_head_for_both(divergence: DivergenceSpec, device: torch.device) -> None:
    """Self-distillation: one weight, two contexts. The same context costs nothing."""
    case = some(device, sizes=(96, 96))
    case = replace(case, teacher=replace(case.teacher, weight_VD=case.student.weight_VD))
    ours, into = run(case, divergence)
    errors = differences(ours, into, expected(case, divergence))
    assert max(errors.values()) < 5e-5, errors
    case = replace(case, teacher=case.student)
    ours, _ = run(case, divergence, sampled=False)
    assert ours.divergence is not None and float(ours.divergence.value_N.abs().max()) < 1e-5


def test_a_frozen_head_gives_the_same_gradient_by_hidden_states(device: torch.device) -> None:
    case = some(device, torch.bfloat16)
    trained, _ = run(case, FULL[0])
    frozen = fused_linear_divergence(
        case.student, case.teacher, case.spec(FULL[0]), plan=SEAMS, backend="triton"
    )
    assert torch.equal(frozen.hidden_gradient_ND, trained.hidden_gradient_ND)


def select_top_ids(values_NV: Tensor, k: int, num_warps: int) -> Tensor:
    """Ids of the top k; their logits are compared here."""
    layout = {"lanes": 32 * num_warps, "width": 8}
    errors = allocate_top_k(len(values_NV), k, values_NV.device)
    errors.ids_NK.fill_(-1)
    maxima_NG = allocate_group_maxima(values_NV, **layout)
    padding = (0, 8 * maxima_NG.shape[1] - values_NV.shape[1])
    padded_NV = torch.nn.functional.pad(values_NV, padding, value=-math.inf)
    maxima_NG.copy_(padded_NV.view(*maxima_NG.shape, 8).amax(-1))
    other_NV = values_NV.flip(0).contiguous()
    select_top_k(values_NV, other_NV, maxima_NG, errors, **layout, num_warps=num_warps)
    for logits_NK, side_NV in ((errors.logits_NK, values_NV), (errors.other_logits_NK, other_NV)):
        right_NK = side_NV.float().gather(-1, errors.ids_NK)
        torch.testing.assert_close(logits_NK, right_NK, rtol=0, atol=0, equal_nan=True)
    return errors.ids_NK


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("vocab_size", [151936, 49155])
def test_the_most_likely_tokens_are_those_of_a_stable_sort(
    vocab_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """With rows that are crowded: all logits equal, all NaN, the most likely side by side."""
    large = device.type == "cuda"
    num_rows, vocab_size, k = (200, vocab_size, 64) if large else (6, vocab_size // 40, 16)
    values_NV = (2 * torch.randn(num_rows, vocab_size, device=device)).to(dtype)
    values_NV[1] = 0.0
    values_NV[2] = math.nan
    values_NV[3] = torch.arange(vocab_size, device=device).to(dtype)
    values_NV[4] += 1000
    ours_NK = select_top_ids(values_NV, k, 8 if large else 1)
    filled_NV = values_NV.double().nan_to_num(nan=math.inf)
    right_NK = filled_NV.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(ours_NK, right_NK)
    second_NK = select_top_ids(values_NV, k, 8 if large else 1)
    assert torch.equal(ours_NK, second_NK)


def test_kernels_are_chosen_on_a_gpu(device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        chosen = choose_backend(torch.empty(2, 2, dtype=dtype, device=device))
        assert chosen == ("triton" if device.type == "cuda" else "torch")
    assert choose_backend(torch.empty(2, 2, dtype=torch.float64, device=device)) == "torch"
