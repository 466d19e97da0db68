# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The kernels of `layer_kernels` where gradients go through them, a kernel back for each.

Torch keeps up to four float32 copies of what it norms, rotates or gates, and reads them all again
on the way back. These keep their input, as the product before them made it, and a scale a row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from courtside.engines.kernels import layers
from courtside.engines.kernels.layers import (
    SWIGLU_BLOCK,
    as_rows,
    row_offset,
    rows_per_program,
    warps_per_program,
    with_dense_rows,
)

MAX_PROGRAMS = 512
"""Each sums the gradient of a norm's weights over its own rows: so many sums are left to add."""
BACKWARD_ELEMENTS, BACKWARD_REGISTERS = 2048, 64
"""Numbers that a program has at a time, and registers of a thread: four programs fit into a
multiprocessor, so that all run at once. Longer rows take what they need."""
SUM_BLOCK = 32


def _learns(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


# ── norms ────────────────────────────────────────────────────────────────────────────────────────


def rms_norm(
    x: Tensor, weight_D: Tensor, *, eps: float, dtype: torch.dtype, rounds: bool
) -> Tensor:
    if _learns(x, weight_D):
        normed: Tensor = _Norm.apply(x, weight_D, eps, dtype, rounds)
        return normed
    return layers.rms_norm(x, weight_D, eps=eps, dtype=dtype, rounds=rounds)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, weight_D, eps, dtype, rounds):
        scales = torch.empty(x.shape[:-1].numel(), dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight_D, scales)
        return layers.rms_norm(x, weight_D, eps=eps, dtype=dtype, rounds=rounds, scales=scales)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient):
        x, weight_D, scales = ctx.saved_tensors
        of_weight = ctx.needs_input_grad[1]
        return *rms_norm_backward(gradient, x, weight_D, scales, of_weight), None, None, None


def rms_norm_backward(
    gradient: Tensor, x: Tensor, weight_D: Tensor, scales: Tensor, of_weight: bool
) -> tuple[Tensor, Tensor | None]:
    D = x.shape[-1]
    x_NKD, num_rows = as_rows(x), len(scales)
    padded = triton.next_power_of_2(D)
    rows = rows_per_program(num_rows, padded, BACKWARD_ELEMENTS)
    programs = min(triton.cdiv(num_rows, rows), MAX_PROGRAMS)
    x_gradient = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sums_PD = torch.empty(programs, D, dtype=torch.float32, device=x.device) if of_weight else None
    _rms_norm_back[(programs,)](
        gradient.contiguous(), x_NKD, weight_D, scales, x_gradient, sums_PD, x_NKD.stride(0),
        x_NKD.stride(1), x_NKD.shape[1], num_rows, SIZE=D, PADDED=padded, ROWS=rows,
        OF_WEIGHT=of_weight, num_warps=warps_per_program(rows, padded),
        maxnreg=BACKWARD_REGISTERS if padded <= BACKWARD_ELEMENTS else None,
    )  # fmt: skip
    return x_gradient, None if sums_PD is None else sum_partials(sums_PD, weight_D.dtype)


@triton.jit
def _rms_norm_back(gradient, x, weight, scales, x_gradient, sums, outer, inner, num_inner, num_rows,
                   SIZE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
                   OF_WEIGHT: tl.constexpr):  # fmt: skip
    at = tl.arange(0, PADDED)
    w = tl.load(weight + at, mask=at < SIZE, other=0.0).to(tl.float32)[None, :]
    # The rows of a tile are added at the end only: threads would wait for one another.
    summed = tl.zeros([ROWS, PADDED], dtype=tl.float32)
    start = tl.program_id(0) * ROWS
    while start < num_rows:
        row = start + tl.arange(0, ROWS)
        inside = (row < num_rows)[:, None] & (at < SIZE)[None, :]
        first = row_offset(row, outer, inner, num_inner)[:, None]
        where = row.to(tl.int64)[:, None] * SIZE + at[None, :]
        scale = tl.load(scales + row, mask=row < num_rows, other=0.0)[:, None]
        y = tl.load(x + first + at[None, :], mask=inside, other=0.0).to(tl.float32) * scale
        g = tl.load(gradient + where, mask=inside, other=0.0).to(tl.float32)
        if OF_WEIGHT:
            summed += g * y
        g = g * w
        found = scale * (g - y * (tl.sum(g * y, 1) / SIZE)[:, None])
        tl.store(x_gradient + where, found.to(x_gradient.dtype.element_ty), mask=inside)
        start += tl.num_programs(0) * ROWS
    if OF_WEIGHT:
        tl.store(sums + tl.program_id(0) * SIZE + at, tl.sum(summed, 0), mask=at < SIZE)


def sum_partials(sums_PD: Tensor, dtype: torch.dtype) -> Tensor:
    """Over `P`, all read at once: torch's own sum asks for a few after another."""
    P, D = sums_PD.shape
    found_D = torch.empty(D, dtype=dtype, device=sums_PD.device)
    _added[(triton.cdiv(D, SUM_BLOCK),)](
        sums_PD, found_D, P, SIZE=D, BLOCK=SUM_BLOCK,
        PADDED=triton.next_power_of_2(max(P, MAX_PROGRAMS)), num_warps=8,
    )  # fmt: skip
    return found_D


@triton.jit
def _added(sums, found, num_sums, SIZE: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, PADDED)
    inside = (row < num_sums)[:, None] & (at < SIZE)[None, :]
    all_ = tl.load(sums + row[:, None] * SIZE + at[None, :], mask=inside, other=0.0)
    tl.store(found + at, tl.sum(all_, 0).to(found.dtype.element_ty), mask=at < SIZE)


# ── rotary embedding ─────────────────────────────────────────────────────────────────────────────


def apply_rotary(
    query_BHND: Tensor, key_BKND: Tensor, cos_BND: Tensor, sin_BND: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    if _learns(query_BHND, key_BKND):
        turned: tuple[Tensor, Tensor] = _Rotate.apply(query_BHND, key_BKND, cos_BND, sin_BND, dtype)
        return turned
    return layers.apply_rotary(query_BHND, key_BKND, cos_BND, sin_BND, dtypes=(dtype, dtype))


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query, key, cos, sin, dtype):
        ctx.save_for_backward(cos, sin)
        ctx.dtypes = query.dtype, key.dtype
        return layers.apply_rotary(query, key, cos, sin, dtypes=(dtype, dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, query_gradient, key_gradient):
        cos, sin = ctx.saved_tensors
        found = layers.apply_rotary(
            query_gradient, key_gradient, cos, sin, dtypes=ctx.dtypes, back=True
        )
        return *found, None, None, None


# ── gated MLPs ───────────────────────────────────────────────────────────────────────────────────


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    if _learns(gate, up):
        opened: Tensor = _Gated.apply(gate, up)
        return opened
    return layers.swiglu(gate, up)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate, up):
        ctx.save_for_backward(gate, up)
        return layers.swiglu(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient):
        gate, up = ctx.saved_tensors
        return swiglu_backward(gradient, gate, up)


def swiglu_backward(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    size = gate.shape[-1]
    found = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (gate, up)]
    gate_NI, up_NI = with_dense_rows(gate.reshape(-1, size)), with_dense_rows(up.reshape(-1, size))
    block = min(SWIGLU_BLOCK, triton.next_power_of_2(size))
    _gated_back[(len(gate_NI), triton.cdiv(size, block))](
        gradient.contiguous(), gate_NI, up_NI, *found, gate_NI.stride(0), up_NI.stride(0),
        SIZE=size, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return found[0], found[1]


@triton.jit
def _gated_back(gradient, gate, up, gate_gradient, up_gradient, gate_row, up_row,
                SIZE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    where = row * SIZE + at
    gradient_ = tl.load(gradient + where, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_row + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + at, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-g))
    of_up = gradient_ * g * share
    of_gate = gradient_ * u * share * (1.0 + g * (1.0 - share))
    tl.store(up_gradient + where, of_up.to(up_gradient.dtype.element_ty), mask=inside)
    tl.store(gate_gradient + where, of_gate.to(gate_gradient.dtype.element_ty), mask=inside)
