# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The kernels of `layers.py` as autograd functions, with a kernel for each backward pass.

Torch saves up to four float32 copies of the input of an RMSNorm, RoPE or SwiGLU. These save the
input as the preceding matmul produced it, and one scale per row.
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
"""Of the RMSNorm's backward pass; each leaves a partial sum of the weight's gradient."""
BACKWARD_ELEMENTS, BACKWARD_REGISTERS = 2048, 64
"""Elements of one program's tile and registers of one thread: four programs fit on a
multiprocessor, so that all run at once. Longer rows take what they need."""
SUM_BLOCK = 32


def _needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


# ── RMSNorm ──────────────────────────────────────────────────────────────────────────────────────


def rms_norm(
    x: Tensor,
    weight_D: Tensor,
    *,
    eps: float,
    dtype: torch.dtype,
    rounds: bool,
    shift: float = 0.0,
) -> Tensor:
    """`shift`: added to the weight, as Gemma's norms do."""
    if _needs_grad(x, weight_D):
        out: Tensor = _RMSNorm.apply(x, weight_D, eps, dtype, rounds, shift)
        return out
    return layers.rms_norm(x, weight_D, eps=eps, dtype=dtype, rounds=rounds, shift=shift)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, weight_D, eps, dtype, rounds, shift):
        scales = torch.empty(x.shape[:-1].numel(), dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight_D, scales)
        ctx.shift = shift
        return layers.rms_norm(
            x, weight_D, eps=eps, dtype=dtype, rounds=rounds, shift=shift, scales=scales
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient):
        x, weight_D, scales = ctx.saved_tensors
        gradients = rms_norm_backward(
            gradient, x, weight_D, scales, ctx.needs_input_grad[1], ctx.shift
        )
        return *gradients, None, None, None, None


def rms_norm_backward(
    gradient: Tensor,
    x: Tensor,
    weight_D: Tensor,
    scales: Tensor,
    needs_weight_grad: bool,
    shift: float,
) -> tuple[Tensor, Tensor | None]:
    D = x.shape[-1]
    x_NKD, num_rows = as_rows(x), len(scales)
    padded = triton.next_power_of_2(D)
    rows = rows_per_program(num_rows, padded, BACKWARD_ELEMENTS)
    programs = min(triton.cdiv(num_rows, rows), MAX_PROGRAMS)
    x_gradient = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    partials_PD = None
    if needs_weight_grad:
        partials_PD = torch.empty(programs, D, dtype=torch.float32, device=x.device)
    _rms_norm_backward[(programs,)](
        gradient.contiguous(), x_NKD, weight_D, scales, x_gradient, partials_PD, shift,
        x_NKD.stride(0), x_NKD.stride(1), x_NKD.shape[1], num_rows, SIZE=D, PADDED=padded,
        ROWS=rows, WEIGHT_GRAD=needs_weight_grad, num_warps=warps_per_program(rows, padded),
        maxnreg=BACKWARD_REGISTERS if padded <= BACKWARD_ELEMENTS else None,
    )  # fmt: skip
    return x_gradient, None if partials_PD is None else sum_partials(partials_PD, weight_D.dtype)


@triton.jit
def _rms_norm_backward(gradient, x, weight, scales, x_gradient, partials, shift, outer_stride,
                       inner_stride, num_inner, num_rows, SIZE: tl.constexpr, PADDED: tl.constexpr,
                       ROWS: tl.constexpr, WEIGHT_GRAD: tl.constexpr):  # fmt: skip
    column = tl.arange(0, PADDED)
    w = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)[None, :] + shift
    # Summed over the rows of a tile only once, at the end: each reduction synchronizes the warps.
    weight_gradient = tl.zeros([ROWS, PADDED], dtype=tl.float32)
    start = tl.program_id(0) * ROWS
    while start < num_rows:
        row = start + tl.arange(0, ROWS)
        mask = (row < num_rows)[:, None] & (column < SIZE)[None, :]
        x_offset = row_offset(row, outer_stride, inner_stride, num_inner)[:, None]
        offset = row.to(tl.int64)[:, None] * SIZE + column[None, :]
        scale = tl.load(scales + row, mask=row < num_rows, other=0.0)[:, None]
        y = tl.load(x + x_offset + column[None, :], mask=mask, other=0.0).to(tl.float32) * scale
        g = tl.load(gradient + offset, mask=mask, other=0.0).to(tl.float32)
        if WEIGHT_GRAD:
            weight_gradient += g * y
        g = g * w
        dx = scale * (g - y * (tl.sum(g * y, 1) / SIZE)[:, None])
        tl.store(x_gradient + offset, dx.to(x_gradient.dtype.element_ty), mask=mask)
        start += tl.num_programs(0) * ROWS
    if WEIGHT_GRAD:
        partial = tl.sum(weight_gradient, 0)
        tl.store(partials + tl.program_id(0) * SIZE + column, partial, mask=column < SIZE)


def sum_partials(partials_PD: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over P with all loads in flight at once; torch's sum issues a few at a time."""
    P, D = partials_PD.shape
    sum_D = torch.empty(D, dtype=dtype, device=partials_PD.device)
    _sum_partials[(triton.cdiv(D, SUM_BLOCK),)](
        partials_PD, sum_D, P, SIZE=D, BLOCK=SUM_BLOCK,
        PADDED=triton.next_power_of_2(max(P, MAX_PROGRAMS)), num_warps=8,
    )  # fmt: skip
    return sum_D


@triton.jit
def _sum_partials(partials, out, num_partials, SIZE: tl.constexpr, BLOCK: tl.constexpr,
                  PADDED: tl.constexpr):  # fmt: skip
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, PADDED)
    mask = (row < num_partials)[:, None] & (column < SIZE)[None, :]
    values = tl.load(partials + row[:, None] * SIZE + column[None, :], mask=mask, other=0.0)
    tl.store(out + column, tl.sum(values, 0).to(out.dtype.element_ty), mask=column < SIZE)


# ── RoPE ─────────────────────────────────────────────────────────────────────────────────────────


def apply_rotary(
    query_BHND: Tensor, key_BKND: Tensor, cos_BND: Tensor, sin_BND: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    if _needs_grad(query_BHND, key_BKND):
        out: tuple[Tensor, Tensor] = _Rotary.apply(query_BHND, key_BKND, cos_BND, sin_BND, dtype)
        return out
    return layers.apply_rotary(query_BHND, key_BKND, cos_BND, sin_BND, dtypes=(dtype, dtype))


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query, key, cos, sin, dtype):
        ctx.save_for_backward(cos, sin)
        ctx.dtypes = query.dtype, key.dtype
        return layers.apply_rotary(query, key, cos, sin, dtypes=(dtype, dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, query_gradient, key_gradient):
        gradients = layers.apply_rotary(
            query_gradient, key_gradient, *ctx.saved_tensors, dtypes=ctx.dtypes, backward=True
        )
        return *gradients, None, None, None


# ── SwiGLU ───────────────────────────────────────────────────────────────────────────────────────


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    if _needs_grad(gate, up):
        out: Tensor = _SwiGLU.apply(gate, up)
        return out
    return layers.swiglu(gate, up)


class _SwiGLU(torch.autograd.Function):
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
    gate_gradient, up_gradient = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (gate, up)
    )
    gate_NI, up_NI = (with_dense_rows(x.reshape(-1, size)) for x in (gate, up))
    block = min(SWIGLU_BLOCK, triton.next_power_of_2(size))
    _swiglu_backward[(len(gate_NI), triton.cdiv(size, block))](
        gradient.contiguous(), gate_NI, up_NI, gate_gradient, up_gradient, gate_NI.stride(0),
        up_NI.stride(0), SIZE=size, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return gate_gradient, up_gradient


@triton.jit
def _swiglu_backward(gradient, gate, up, gate_gradient, up_gradient, gate_row, up_row,
                     SIZE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    offset = row * SIZE + column
    dy = tl.load(gradient + offset, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_row + column, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + column, mask=mask, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-g))
    du = dy * g * sigmoid
    dg = dy * u * sigmoid * (1.0 + g * (1.0 - sigmoid))
    tl.store(up_gradient + offset, du.to(up_gradient.dtype.element_ty), mask=mask)
    tl.store(gate_gradient + offset, dg.to(gate_gradient.dtype.element_ty), mask=mask)
