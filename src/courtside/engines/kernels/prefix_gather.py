# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Rows laid out as several look at them, and their gradients summed again: a kernel each way.

A GPU's counterpart of cutting a row into parts and joining them, which costs a launch for every
sample of a group, in every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from courtside.engines.transfer import copy_to_device

BLOCK = 1024
"""Numbers of a row that a program sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherIndex:
    """Which of N rows stand in a layout of K, on the device."""

    rows_K: Tensor
    """Of each place, the row."""
    places_K: Tensor
    """The places of the first row in order, then those of the second, and so on."""
    firsts_N: Tensor
    """[N + 1]: where in `places_K` those of each row begin."""


def make_gather_index(
    lengths: Sequence[int], joined: Sequence[int], *, device: torch.device
) -> GatherIndex:
    """A row of parts of these lengths, of which `joined` stand one behind the other."""
    starts = [0, *accumulate(lengths)]
    rows_K = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in joined])
    counts_N = torch.bincount(rows_K, minlength=starts[-1])
    firsts_N = torch.cat([counts_N.new_zeros(1), counts_N.cumsum(0)])
    return GatherIndex(
        rows_K=copy_to_device(rows_K, device),
        places_K=copy_to_device(rows_K.argsort(stable=True).int(), device),
        firsts_N=copy_to_device(firsts_N.int(), device),
    )


def gather_rows(state_NHD: Tensor, where: GatherIndex) -> Tensor:
    """[N, heads, D] to [K, heads, D]."""
    found: Tensor = _LaidOut.apply(state_NHD, where)
    return found


class _LaidOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, state_NHD, where):
        ctx.where = where
        return state_NHD.index_select(0, where.rows_K)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_KHD):
        return sum_gathered_gradients(gradient_KHD, ctx.where), None


def sum_gathered_gradients(gradient_KHD: Tensor, where: GatherIndex) -> Tensor:
    """[K, heads, D] to [N, heads, D]: each row the sum of its places, always in the same order and
    in float32 at least."""
    gradient_KHD = gradient_KHD.contiguous()
    num_rows, shape = len(where.firsts_N) - 1, gradient_KHD.shape[1:]
    found_NHD = gradient_KHD.new_empty(num_rows, *shape)
    _summed[(num_rows, triton.cdiv(shape.numel(), BLOCK))](
        gradient_KHD, found_NHD, where.places_K, where.firsts_N,
        WIDTH=shape.numel(), BLOCK=min(BLOCK, triton.next_power_of_2(shape.numel())),
        WIDE=gradient_KHD.dtype == torch.float64,
    )  # fmt: skip
    return found_NHD


@triton.jit
def _summed(gradient, found, places, firsts, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
            WIDE: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    total = tl.zeros([BLOCK], dtype=tl.float64 if WIDE else tl.float32)
    number, end = tl.load(firsts + row), tl.load(firsts + row + 1)
    while number < end:
        place = tl.load(places + number).to(tl.int64)
        total += tl.load(gradient + place * WIDTH + at, mask=inside, other=0.0).to(total.dtype)
        number += 1
    tl.store(found + row * WIDTH + at, total.to(found.dtype.element_ty), mask=inside)
