"""The most likely tokens by the kernels against a stable sort: any logits, any ties, any crowd."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="kernels need Triton: pip install triton")
from courtside.losses.fused.topk_kernels import (  # noqa: E402
    allocate_group_maxima,
    allocate_top_k,
    num_select_warps,
    select_top_k,
    select_top_k_by_sorting,
)

VOCAB_SIZE = 32 * 8 * 5 + 37
"""Five tiles and a piece, of bfloat16 on one warp."""


def top_k_ids(
    values_NV: Tensor, k: int, *, lanes: int = 32, capacity: int | None = None, num_warps: int = 1
) -> Tensor:
    """Their ids; what both sides say of them is looked at here."""
    other_NV = torch.randn(values_NV.shape, device=values_NV.device).to(values_NV.dtype)
    buffers = allocate_top_k(len(values_NV), k, values_NV.device, capacity=capacity)
    buffers.ids_NK.fill_(-1)
    if lanes:
        layout = {"lanes": lanes, "width": 8, "num_warps": num_warps}
        select_top_k(values_NV, other_NV, group_maxima(values_NV, lanes), buffers, **layout)
    else:
        select_top_k_by_sorting(values_NV, other_NV, buffers)
    for logits_NK, side_NV in ((buffers.logits_NK, values_NV), (buffers.other_logits_NK, other_NV)):
        right_NK = side_NV.float().gather(-1, buffers.ids_NK)
        torch.testing.assert_close(logits_NK, right_NK, rtol=0, atol=0, equal_nan=True)
    return buffers.ids_NK


def group_maxima(values_NV: Tensor, lanes: int) -> Tensor:
    """The largest of every 8 tokens; NaN is passed over, as the kernel may."""
    maxima_NG = allocate_group_maxima(values_NV, lanes=lanes, width=8)
    padding = 8 * maxima_NG.shape[1] - values_NV.shape[1]
    padded_NV = torch.nn.functional.pad(values_NV.float(), (0, padding), value=-torch.inf)
    padded_NV = padded_NV.masked_fill(padded_NV.isnan(), -torch.inf)
    return maxima_NG.copy_(padded_NV.view(*maxima_NG.shape, 8).amax(-1))


def sorted_ids(values_NV: Tensor, k: int) -> Tensor:
    """Of equal logits the lower number."""
    return values_NV.double().sort(dim=-1, descending=True, stable=True).indices[:, :k]


def crowd_in_one_lane() -> Tensor:
    """All of the most likely where one lane looks: its maximum says nothing about the others."""
    values_NV = torch.randn(2, VOCAB_SIZE)
    for token in range(8):
        values_NV[:, token :: 32 * 8] += 10
    return values_NV


def zeros_of_both_signs() -> Tensor:
    values_NV = -torch.rand(2, VOCAB_SIZE) - 0.1
    values_NV[:, 7], values_NV[:, 3], values_NV[:, 9] = -0.0, 0.0, -0.0
    return values_NV


CASES = {
    "float32": lambda: torch.randn(4, VOCAB_SIZE),
    "bfloat16": lambda: (3 * torch.randn(4, VOCAB_SIZE)).bfloat16(),
    "four values": lambda: torch.randint(4, (2, VOCAB_SIZE)).bfloat16(),
    "all equal": lambda: torch.zeros(1, VOCAB_SIZE),
    "one lane": crowd_in_one_lane,
    "zeros": zeros_of_both_signs,
    "far from zero": lambda: (1000 + torch.randn(3, VOCAB_SIZE)).bfloat16(),
    "infinite": lambda: torch.randn(2, VOCAB_SIZE).masked_fill(
        torch.rand(2, VOCAB_SIZE) < 0.9, -9e37
    ),
    "no rows": lambda: torch.randn(0, VOCAB_SIZE),
    "rising": lambda: torch.arange(VOCAB_SIZE)[None] / VOCAB_SIZE,
    "minus infinity": lambda: torch.full((2, VOCAB_SIZE), -torch.inf).index_fill(
        1, torch.arange(0, VOCAB_SIZE, 100), 1.0
    ),
}


@pytest.mark.parametrize("k", [1, 16])
@pytest.mark.parametrize("case", CASES)
def test_they_are_those_of_a_stable_sort(case: str, k: int) -> None:
    values_NV = CASES[case]().to(DEVICE)
    # Little capacity: some cases need the bisection, some do not.
    ours_NK = top_k_ids(values_NV, k, num_warps=1, capacity=32)
    assert torch.equal(ours_NK, sorted_ids(values_NV, k))


@pytest.mark.parametrize("k", [1, 16])
@pytest.mark.parametrize("stand_for_all", [True, False])
def test_among_nan_any_tokens_come_out_once_each(k: int, stand_for_all: bool) -> None:
    """Whether NaN is passed over in the maxima of groups or is all that is left of them."""
    values_NV = torch.randn(4, VOCAB_SIZE, device=DEVICE)
    values_NV[1] = torch.nan
    values_NV[2, 5] = torch.nan
    values_NV[3, ::3] = torch.nan
    maxima_NG = group_maxima(values_NV, 32)
    if stand_for_all:
        maxima_NG[1:] = torch.nan
    buffers = allocate_top_k(4, k, values_NV.device, capacity=32)
    select_top_k(values_NV, values_NV, maxima_NG, buffers, lanes=32, width=8, num_warps=1)
    assert torch.equal(buffers.ids_NK[:1], sorted_ids(values_NV[:1], k))
    for ids in buffers.ids_NK.tolist():
        assert len(set(ids)) == k and min(ids) >= 0 and max(ids) < VOCAB_SIZE


def test_rows_need_not_lie_side_by_side() -> None:
    values_NV = torch.randn(3, VOCAB_SIZE + 11, device=DEVICE)[:, :VOCAB_SIZE]
    assert torch.equal(top_k_ids(values_NV, 7, num_warps=1), sorted_ids(values_NV, 7))


@pytest.mark.parametrize("k", [1, 64, 128])
@pytest.mark.parametrize("num_warps", [1, 8])
def test_many_tokens_and_more_warps(k: int, num_warps: int) -> None:
    """Enough of them for the lanes that k = 128 asks for; with ties, as bfloat16 has them."""
    values_NV = (2 * torch.randn(2, 9001)).bfloat16().to(DEVICE)
    assert num_select_warps(9001, k, least=1, width=8) is not None
    ours_NK = top_k_ids(values_NV, k, lanes=256, num_warps=num_warps)
    assert torch.equal(ours_NK, sorted_ids(values_NV, k))


def test_all_tokens() -> None:
    values_NV = torch.randn(3, 40, device=DEVICE)
    assert torch.equal(top_k_ids(values_NV, 40, lanes=0), sorted_ids(values_NV, 40))


def test_where_it_is_no_gain_it_is_not_used() -> None:
    assert num_select_warps(151936, 128, least=8, width=8) == 8
    assert num_select_warps(49152, 64, least=8, width=8) == 8
    assert num_select_warps(151936, 129, least=8, width=8) == 16, (
        "a bound by half of the lanes at most"
    )
    assert num_select_warps(151936, 513, least=8, width=8) is None
    assert num_select_warps(8000, 64, least=8, width=8) is None, "lanes of a token or two"
