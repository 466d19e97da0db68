"""The LM head's matmuls: from hidden states to logits, and from the gradient by logits back.

A LoRA adapter of rank R on the head is a second, narrow pair of matmuls. `LowRankActivations` holds
the [rows, R] activations between the two, small enough to be computed once for all chunks; their
gradient is gathered chunk by chunk and goes on to the hidden states and the adapter once, at the
end. The sum of weight and adapter is never formed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from courtside.losses.fused.types import HeadGradient, Projection, RawLogits

MAX_UPCAST_ROWS = 4096
"""Vocabulary rows of the gradient by logits that exist in float32 at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankActivations:
    """scale · hidden·downᵀ of all rows, and the buffer for its gradient."""

    values_NR: Tensor
    gradient_NR: Tensor


def project_low_rank(side: Projection, *, gradient: bool = False) -> LowRankActivations | None:
    """None: the head has no adapter."""
    low = side.low_rank
    if low is None:
        return None
    values_NR = torch.mm(_operand(side, slice(None)), low.down_RD.t()) * low.scale
    dtype = torch.promote_types(values_NR.dtype, torch.float32)
    gradient_NR = values_NR.new_empty(values_NR.shape if gradient else (0, 0), dtype=dtype)
    return LowRankActivations(values_NR=values_NR, gradient_NR=gradient_NR)


def padded_vocab_size(vocab_size: int) -> int:
    """Rows start at multiples of 128 bytes, for vectorized loads and for the matmuls."""
    return -(-vocab_size // 64) * 64


def allocate_logits(side: Projection, num_rows: int) -> Tensor:
    vocab_size = len(side.weight_VD)
    return side.weight_VD.new_empty(num_rows, padded_vocab_size(vocab_size))[:, :vocab_size]


def compute_logits(
    side: Projection, low_rank: LowRankActivations | None, rows: slice, buffer_NV: Tensor
) -> RawLogits:
    """Logits of `rows`, in the first rows of `buffer_NV`."""
    values_NV = buffer_NV[: rows.stop - rows.start]
    hidden_ND = _operand(side, rows)
    if side.bias_V is None:
        torch.mm(hidden_ND, side.weight_VD.t(), out=values_NV)
    else:
        torch.addmm(side.bias_V, hidden_ND, side.weight_VD.t(), out=values_NV)
    if low_rank is not None:
        assert side.low_rank is not None
        values_NV.addmm_(low_rank.values_NR[rows], side.low_rank.up_VR.t())
    return RawLogits(values_NV=values_NV, scale=side.scale, softcap=side.softcap)


def head_backward(
    student: Projection,
    low_rank: LowRankActivations | None,
    gradient_CV: Tensor,
    rows: slice,
    *,
    gradient_ND: Tensor,
    head_gradient: HeadGradient,
) -> None:
    """From the gradient by logits to those by hidden states (set) and by the head (added)."""
    _multiply(gradient_CV, student.weight_VD, gradient_ND[rows], add=False)
    gradient_VC = gradient_CV.t()
    vocab_size = len(gradient_VC)
    if head_gradient.weight_VD is not None:
        weight_VD = head_gradient.weight_VD[:vocab_size]
        _multiply(gradient_VC, _operand(student, rows), weight_VD, add=True)
    if head_gradient.bias_V is not None:
        bias_V = head_gradient.bias_V
        bias_V[:vocab_size].add_(gradient_CV.sum(0, dtype=bias_V.dtype))
    if low_rank is None:
        return
    assert student.low_rank is not None
    _multiply(gradient_CV, student.low_rank.up_VR, low_rank.gradient_NR[rows], add=False)
    if head_gradient.up_VR is not None:
        up_VR = head_gradient.up_VR[:vocab_size]
        _multiply(gradient_VC, low_rank.values_NR[rows], up_VR, add=True)


def adapter_backward(
    student: Projection,
    low_rank: LowRankActivations,
    *,
    gradient_ND: Tensor,
    head_gradient: HeadGradient,
) -> None:
    """From the gradient by the low-rank activations of all rows; both results are added to."""
    low = student.low_rank
    assert low is not None
    gradient_NR = (low_rank.gradient_NR * low.scale).to(low.down_RD.dtype)
    _multiply(gradient_NR, low.down_RD, gradient_ND, add=True)
    if head_gradient.down_RD is not None:
        hidden_ND = _operand(student, slice(None))
        _multiply(gradient_NR.t(), hidden_ND, head_gradient.down_RD, add=True)


def _operand(side: Projection, rows: slice) -> Tensor:
    return side.hidden_ND[rows].to(side.weight_VD.dtype)


def _multiply(first: Tensor, second: Tensor, out: Tensor, *, add: bool) -> None:
    if out.dtype == first.dtype:
        torch.addmm(out, first, second, out=out) if add else torch.mm(first, second, out=out)
    elif first.is_cuda and first.dtype == torch.bfloat16 and out.dtype == torch.float32:
        # One matmul that accumulates in float32, from operands that stay in bfloat16.
        if add:
            torch.addmm(out, first, second, out_dtype=torch.float32, out=out)
        else:
            torch.mm(first, second, out_dtype=torch.float32, out=out)
    elif add:
        second = second.to(out.dtype)
        blocks = zip(first.split(MAX_UPCAST_ROWS), out.split(MAX_UPCAST_ROWS), strict=True)
        for block, out_block in blocks:
            out_block.addmm_(block.to(out.dtype), second)
    else:
        out.copy_(torch.mm(first, second))
