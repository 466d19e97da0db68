# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Gathers keys or values of shared prefixes for every suffix, and sums their gradients, by kernels.

Slicing and concatenating segments instead would launch a kernel per sample of a group in every
layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 1024
"""Elements of a row that one program sums."""


class GatherIndex(NamedTuple):
    """Which of N source rows each of K gathered rows is."""

    source_K: Tensor
    """Source row of each gathered row."""
    targets_K: Tensor
    """Gathered rows ordered by their source row."""
    offsets_N: Tensor
    """[N + 1]: where the gathered rows of each source row begin in `targets_K`."""


def make_gather_index(lengths: Sequence[int], key_segments: Sequence[int]) -> GatherIndex:
    """On the host, for a row of segments of these lengths, of which `key_segments` are
    concatenated."""
    starts = [0, *accumulate(lengths)]
    source_K = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in key_segments])
    counts_N = torch.bincount(source_K, minlength=starts[-1])
    offsets_N = torch.cat([counts_N.new_zeros(1), counts_N.cumsum(0)])
    return GatherIndex(
        source_K=source_K,
        targets_K=source_K.argsort(stable=True).int(),
        offsets_N=offsets_N.int(),
    )


def gather_rows(state_NHD: Tensor, index: GatherIndex) -> Tensor:
    """[N, heads, D] to [K, heads, D]."""
    gathered_KHD: Tensor = _GatherRows.apply(state_NHD, index)
    return gathered_KHD


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, state_NHD, index):
        ctx.index = index
        return state_NHD.index_select(0, index.source_K)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_KHD):
        return sum_gathered_gradients(gradient_KHD, ctx.index), None


def sum_gathered_gradients(gradient_KHD: Tensor, index: GatherIndex) -> Tensor:
    """[K, heads, D] to [N, heads, D]: summed per source row, in a fixed order and in float32 at
    least."""
    gradient_KHD = gradient_KHD.contiguous()
    num_rows, shape = len(index.offsets_N) - 1, gradient_KHD.shape[1:]
    sum_NHD = gradient_KHD.new_empty(num_rows, *shape)
    sum_rows_kernel[(num_rows, triton.cdiv(shape.numel(), BLOCK))](
        gradient_KHD, sum_NHD, index.targets_K, index.offsets_N,
        WIDTH=shape.numel(), BLOCK=min(BLOCK, triton.next_power_of_2(shape.numel())),
        IS_FLOAT64=gradient_KHD.dtype == torch.float64,
    )  # fmt: skip
    return sum_NHD


@triton.jit
def sum_rows_kernel(gradient, output, targets, offsets, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
                    IS_FLOAT64: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = column < WIDTH
    total = tl.zeros([BLOCK], dtype=tl.float64 if IS_FLOAT64 else tl.float32)
    number, end = tl.load(offsets + row), tl.load(offsets + row + 1)
    while number < end:
        target = tl.load(targets + number).to(tl.int64)
        total += tl.load(gradient + target * WIDTH + column, mask=in_row, other=0.0).to(total.dtype)
        number += 1
    tl.store(output + row * WIDTH + column, total.to(output.dtype.element_ty), mask=in_row)
