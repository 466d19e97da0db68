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
from courtside.losses import fused_select  # noqa: E402
from courtside.losses.fused_select import fits, likeliest  # noqa: E402

NUM_WORDS = 32 * 8 * 5 + 37
"""Five tiles and a piece, of bfloat16 on one warp."""


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
}


@pytest.mark.parametrize("k", [1, 16])
@pytest.mark.parametrize("case", CASES)
def test_they_are_those_of_a_stable_sort(case: str, k: int) -> None:
    values_NV = CASES[case]().to(DEVICE)
    # Little room: some cases take the second kernel, some do not.
    found_NK = likeliest(values_NV, k, num_warps=1, room=32)
    assert torch.equal(found_NK, sorted_ids(values_NV, k))


def test_rows_need_not_lie_side_by_side() -> None:
    values_NV = torch.randn(3, NUM_WORDS + 11, device=DEVICE)[:, :NUM_WORDS]
    assert torch.equal(likeliest(values_NV, 7, num_warps=1), sorted_ids(values_NV, 7))


def test_only_crowded_rows_take_the_second_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, those would be wrong and no others."""

    class Nothing:
        def __getitem__(self, grid: tuple[int]) -> object:
            return lambda *args, **options: None

    values_NV = torch.randn(2, NUM_WORDS)
    # Rising, and all in one lane: those that are met first are the least likely.
    values_NV[1] = torch.arange(NUM_WORDS) / NUM_WORDS
    values_NV[1] += 10.0 * (torch.arange(NUM_WORDS) % (32 * 8) < 8)
    values_NV = values_NV.to(DEVICE)
    monkeypatch.setattr(fused_select, "crowded_kernel", Nothing())
    found_NK = likeliest(values_NV, 16, num_warps=1, room=32)
    right_NK = sorted_ids(values_NV, 16)
    assert torch.equal(found_NK[0], right_NK[0]) and not torch.equal(found_NK[1], right_NK[1])


def test_where_it_is_no_gain_it_is_not_used() -> None:
    assert fits(151936, 128, num_warps=8, width=8) and fits(49152, 64, num_warps=8, width=8)
    assert not fits(151936, 129, num_warps=8, width=8), "a bound by too many of the lanes"
    assert not fits(8000, 64, num_warps=8, width=8), "lanes of a word or two"
