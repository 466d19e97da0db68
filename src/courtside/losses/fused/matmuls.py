"""The head's matrix products: from hidden states to logits, and from the gradient by them back.

A LoRA adapter of rank R on the head is a second, narrow pair. `LowRankActivations` has what lies
between the two, [rows, R], which is small enough to be made once for all chunks; its own gradient
is gathered chunk by chunk and goes on to the hidden states and the adapter once, at the end. The
sum of weight and adapter is never formed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from courtside.losses.fused.types import HeadGradient, Projection, RawLogits

MAX_UPCAST_ROWS = 4096
"""Of the gradient by logits, turned around: so many words of it exist in wide numbers at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankActivations:
    """scale · hidden·downᵀ of all rows, and the room for its gradient."""

    values_NR: Tensor
    gradient_NR: Tensor


def project_low_rank(side: Projection, *, gradient: bool = False) -> LowRankActivations | None:
    """None: the head has no adapter."""
    low = side.low_rank
    if low is None:
        return None
    values_NR = torch.mm(_operand(side, slice(None)), low.down_RD.t()) * low.scale
    wide = torch.promote_types(values_NR.dtype, torch.float32)
    room = values_NR.new_empty(values_NR.shape if gradient else (0, 0), dtype=wide)
    return LowRankActivations(values_NR=values_NR, gradient_NR=room)


def padded_vocab_size(vocab_size: int) -> int:
    """Rows that start at multiples of 128 bytes: for wide loads, and for the matrix products."""
    return -(-vocab_size // 64) * 64


def allocate_logits(side: Projection, num_rows: int) -> Tensor:
    vocab_size = len(side.weight_VD)
    return side.weight_VD.new_empty(num_rows, padded_vocab_size(vocab_size))[:, :vocab_size]


def compute_logits(
    side: Projection, narrow: LowRankActivations | None, rows: slice, room_NV: Tensor
) -> RawLogits:
    """Of `rows`, in the first rows of `room_NV`."""
    values_NV = room_NV[: rows.stop - rows.start]
    hidden_ND = _operand(side, rows)
    if side.bias_V is None:
        torch.mm(hidden_ND, side.weight_VD.t(), out=values_NV)
    else:
        torch.addmm(side.bias_V, hidden_ND, side.weight_VD.t(), out=values_NV)
    if narrow is not None:
        assert side.low_rank is not None
        values_NV.addmm_(narrow.values_NR[rows], side.low_rank.up_VR.t())
    return RawLogits(values_NV=values_NV, scale=side.scale, softcap=side.softcap)


def head_backward(
    student: Projection,
    narrow: LowRankActivations | None,
    gradient_CV: Tensor,
    rows: slice,
    *,
    gradient_ND: Tensor,
    into: HeadGradient,
) -> None:
    """From the gradient by logits to those by hidden states (set) and by the head (added)."""
    _multiply(gradient_CV, student.weight_VD, gradient_ND[rows], add=False)
    words_VC = gradient_CV.t()
    vocab_size = len(words_VC)
    if into.weight_VD is not None:
        _multiply(words_VC, _operand(student, rows), into.weight_VD[:vocab_size], add=True)
    if into.bias_V is not None:
        into.bias_V[:vocab_size].add_(gradient_CV.sum(0, dtype=into.bias_V.dtype))
    if narrow is None:
        return
    assert student.low_rank is not None
    _multiply(gradient_CV, student.low_rank.up_VR, narrow.gradient_NR[rows], add=False)
    if into.up_VR is not None:
        _multiply(words_VC, narrow.values_NR[rows], into.up_VR[:vocab_size], add=True)


def adapter_backward(
    student: Projection, narrow: LowRankActivations, *, gradient_ND: Tensor, into: HeadGradient
) -> None:
    """The rest of the way, of all rows: both are added to."""
    low = student.low_rank
    assert low is not None
    gradient_NR = (narrow.gradient_NR * low.scale).to(low.down_RD.dtype)
    _multiply(gradient_NR, low.down_RD, gradient_ND, add=True)
    if into.down_RD is not None:
        _multiply(gradient_NR.t(), _operand(student, slice(None)), into.down_RD, add=True)


def _operand(side: Projection, rows: slice) -> Tensor:
    return side.hidden_ND[rows].to(side.weight_VD.dtype)


def _multiply(first: Tensor, second: Tensor, out: Tensor, *, add: bool) -> None:
    if out.dtype == first.dtype:
        torch.addmm(out, first, second, out=out) if add else torch.mm(first, second, out=out)
    elif first.is_cuda and first.dtype == torch.bfloat16 and out.dtype == torch.float32:
        # One product that reads, adds and writes float32, from operands that stay small.
        if add:
            torch.addmm(out, first, second, out_dtype=torch.float32, out=out)
        else:
            torch.mm(first, second, out_dtype=torch.float32, out=out)
    elif add:
        second = second.to(out.dtype)
        for some, its in zip(first.split(MAX_UPCAST_ROWS), out.split(MAX_UPCAST_ROWS), strict=True):
            its.addmm_(some.to(out.dtype), second)
    else:
        out.copy_(torch.mm(first, second))
