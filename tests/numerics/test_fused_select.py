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
from courtside.losses.fused_select import pick, room_for, warps_for  # noqa: E402

NUM_WORDS = 32 * 8 * 5 + 37
"""Five tiles and a piece, of bfloat16 on one warp."""


def likeliest(values_NV: Tensor, k: int, *, room: int | None = None, **options: int) -> Tensor:
    """Their ids; what both sides say of them is looked at here."""
    other_NV = torch.randn(values_NV.shape, device=values_NV.device).to(values_NV.dtype)
    found = room_for(len(values_NV), k, values_NV.device, room=room)
    found.ids_NK.fill_(-1)
    pick(values_NV, other_NV, found, **options)
    for logits_NK, side_NV in ((found.own_NK, values_NV), (found.other_NK, other_NV)):
        right_NK = side_NV.float().gather(-1, found.ids_NK)
        torch.testing.assert_close(logits_NK, right_NK, rtol=0, atol=0, equal_nan=True)
    return found.ids_NK


def sorted_ids(values_NV: Tensor, k: int) -> Tensor:
    """NaN first, as `torch.topk` has it; of equal logits the lower number."""
    filled_NV = values_NV.double().nan_to_num(nan=torch.inf)
    return filled_NV.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def crowd_in_one_lane() -> Tensor:
    """All of the likeliest where one lane looks: its maximum says nothing about the others."""
    values_NV = torch.randn(2, NUM_WORDS)
    for word in range(8):
        values_NV[:, word :: 32 * 8] += 10
    return values_NV


def some_nan() -> Tensor:
    values_NV = torch.randn(3, NUM_WORDS)
    values_NV[1] = torch.nan
    values_NV[2, 5] = torch.nan
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
    "NaN": some_nan,
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


def test_rows_need_not_lie_side_by_side() -> None:
    values_NV = torch.randn(3, NUM_WORDS + 11, device=DEVICE)[:, :NUM_WORDS]
    assert torch.equal(likeliest(values_NV, 7, num_warps=1), sorted_ids(values_NV, 7))


@pytest.mark.parametrize("k", [1, 64, 128])
@pytest.mark.parametrize("tiles", [1, 4])
def test_many_words_and_more_warps(k: int, tiles: int) -> None:
    """Enough of them for the lanes that k = 128 asks for; with ties, as bfloat16 has them."""
    values_NV = (2 * torch.randn(2, 9001)).bfloat16().to(DEVICE)
    assert warps_for(9001, k, least=1, width=8) is not None
    found_NK = likeliest(values_NV, k, num_warps=1, tiles=tiles)
    assert torch.equal(found_NK, sorted_ids(values_NV, k))


def test_all_words() -> None:
    values_NV = torch.randn(3, 40, device=DEVICE)
    assert torch.equal(likeliest(values_NV, 40), sorted_ids(values_NV, 40))


def test_where_it_is_no_gain_it_is_not_used() -> None:
    assert warps_for(151936, 128, least=8, width=8) == 8
    assert warps_for(49152, 64, least=8, width=8) == 8
    assert warps_for(151936, 129, least=8, width=8) == 16, "a bound by half of the lanes at most"
    assert warps_for(151936, 513, least=8, width=8) is None
    assert warps_for(8000, 64, least=8, width=8) is None, "lanes of a word or two"
