"""The likeliest words by the kernels against a stable sort: any logits, any ties, any crowd."""

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
from courtside.losses.fused.topk_select import (  # noqa: E402
    allocate_group_maxima,
    allocate_top_k,
    num_select_warps,
    select_top_k,
    select_top_k_by_sorting,
)

NUM_WORDS = 32 * 8 * 5 + 37
"""Five tiles and a piece, of bfloat16 on one warp."""


def likeliest(
    values_NV: Tensor, k: int, *, lanes: int = 32, room: int | None = None, num_warps: int = 1
) -> Tensor:
    """Their ids; what both sides say of them is looked at here."""
    other_NV = torch.randn(values_NV.shape, device=values_NV.device).to(values_NV.dtype)
    found = allocate_top_k(len(values_NV), k, values_NV.device, room=room)
    found.ids_NK.fill_(-1)
    if lanes:
        layout = {"lanes": lanes, "width": 8, "num_warps": num_warps}
        select_top_k(values_NV, other_NV, tops(values_NV, lanes), found, **layout)
    else:
        select_top_k_by_sorting(values_NV, other_NV, found)
    for logits_NK, side_NV in ((found.own_NK, values_NV), (found.other_NK, other_NV)):
        right_NK = side_NV.float().gather(-1, found.ids_NK)
        torch.testing.assert_close(logits_NK, right_NK, rtol=0, atol=0, equal_nan=True)
    return found.ids_NK


def tops(values_NV: Tensor, lanes: int) -> Tensor:
    """The largest of every 8 words; NaN is passed over, as the kernel may."""
    found_NG = allocate_group_maxima(values_NV, lanes=lanes, width=8)
    padding = 8 * found_NG.shape[1] - values_NV.shape[1]
    padded_NV = torch.nn.functional.pad(values_NV.float(), (0, padding), value=-torch.inf)
    padded_NV = padded_NV.masked_fill(padded_NV.isnan(), -torch.inf)
    return found_NG.copy_(padded_NV.view(*found_NG.shape, 8).amax(-1))


def sorted_ids(values_NV: Tensor, k: int) -> Tensor:
    """Of equal logits the lower number."""
    return values_NV.double().sort(dim=-1, descending=True, stable=True).indices[:, :k]


def crowd_in_one_lane() -> Tensor:
    """All of the likeliest where one lane looks: its maximum says nothing about the others."""
    values_NV = torch.randn(2, NUM_WORDS)
    for word in range(8):
        values_NV[:, word :: 32 * 8] += 10
    return values_NV


def zeros_of_both_signs() -> Tensor:
    values_NV = -torch.rand(2, NUM_WORDS) - 0.1
    values_NV[:, 7], values_NV[:, 3], values_NV[:, 9] = -0.0, 0.0, -0.0
    return values_NV


CASES = {
    "float32": lambda: torch.randn(4, NUM_WORDS),
    "bfloat16": lambda: (3 * torch.randn(4, NUM_WORDS)).bfloat16(),
    "four values": lambda: torch.randint(4, (2, NUM_WORDS)).bfloat16(),
    "all equal": lambda: torch.zeros(1, NUM_WORDS),
    "one lane": crowd_in_one_lane,
    "zeros": zeros_of_both_signs,
    "far from zero": lambda: (1000 + torch.randn(3, NUM_WORDS)).bfloat16(),
    "infinite": lambda: torch.randn(2, NUM_WORDS).masked_fill(
        torch.rand(2, NUM_WORDS) < 0.9, -9e37
    ),
    "no rows": lambda: torch.randn(0, NUM_WORDS),
    "rising": lambda: torch.arange(NUM_WORDS)[None] / NUM_WORDS,
    "minus infinity": lambda: torch.full((2, NUM_WORDS), -torch.inf).index_fill(
        1, torch.arange(0, NUM_WORDS, 100), 1.0
    ),
}


@pytest.mark.parametrize("k", [1, 16])
@pytest.mark.parametrize("case", CASES)
def test_they_are_those_of_a_stable_sort(case: str, k: int) -> None:
    values_NV = CASES[case]().to(DEVICE)
    # Little room: some cases need the bisection, some do not.
    found_NK = likeliest(values_NV, k, num_warps=1, room=32)
    assert torch.equal(found_NK, sorted_ids(values_NV, k))


@pytest.mark.parametrize("k", [1, 16])
@pytest.mark.parametrize("stand_for_all", [True, False])
def test_among_nan_any_words_come_out_once_each(k: int, stand_for_all: bool) -> None:
    """Whether NaN is passed over in the maxima of groups or is all that is left of them."""
    values_NV = torch.randn(4, NUM_WORDS, device=DEVICE)
    values_NV[1] = torch.nan
    values_NV[2, 5] = torch.nan
    values_NV[3, ::3] = torch.nan
    tops_NG = tops(values_NV, 32)
    if stand_for_all:
        tops_NG[1:] = torch.nan
    found = allocate_top_k(4, k, values_NV.device, room=32)
    select_top_k(values_NV, values_NV, tops_NG, found, lanes=32, width=8, num_warps=1)
    assert torch.equal(found.ids_NK[:1], sorted_ids(values_NV[:1], k))
    for ids in found.ids_NK.tolist():
        assert len(set(ids)) == k and min(ids) >= 0 and max(ids) < NUM_WORDS


def test_rows_need_not_lie_side_by_side() -> None:
    values_NV = torch.randn(3, NUM_WORDS + 11, device=DEVICE)[:, :NUM_WORDS]
    assert torch.equal(likeliest(values_NV, 7, num_warps=1), sorted_ids(values_NV, 7))


@pytest.mark.parametrize("k", [1, 64, 128])
@pytest.mark.parametrize("num_warps", [1, 8])
def test_many_words_and_more_warps(k: int, num_warps: int) -> None:
    """Enough of them for the lanes that k = 128 asks for; with ties, as bfloat16 has them."""
    values_NV = (2 * torch.randn(2, 9001)).bfloat16().to(DEVICE)
    assert num_select_warps(9001, k, least=1, width=8) is not None
    found_NK = likeliest(values_NV, k, lanes=256, num_warps=num_warps)
    assert torch.equal(found_NK, sorted_ids(values_NV, k))


def test_all_words() -> None:
    values_NV = torch.randn(3, 40, device=DEVICE)
    assert torch.equal(likeliest(values_NV, 40, lanes=0), sorted_ids(values_NV, 40))


def test_where_it_is_no_gain_it_is_not_used() -> None:
    assert num_select_warps(151936, 128, least=8, width=8) == 8
    assert num_select_warps(49152, 64, least=8, width=8) == 8
    assert num_select_warps(151936, 129, least=8, width=8) == 16, (
        "a bound by half of the lanes at most"
    )
    assert num_select_warps(151936, 513, least=8, width=8) is None
    assert num_select_warps(8000, 64, least=8, width=8) is None, "lanes of a word or two"
