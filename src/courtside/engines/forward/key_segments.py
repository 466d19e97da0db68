"""Keys and values that the segments of a packed row attend to: a shared prefix before each suffix.

Gradients of a prefix that come back from its suffixes are summed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from courtside.engines.forward.varlen import VarlenLayout


def squeeze_batch(state: Tensor) -> Tensor:
    """[1, heads, N, D] to [N, heads, D]. The backward pass of an index instead of a squeeze would
    allocate zeros and copy the gradient into them."""
    return state.squeeze(0).transpose(0, 1)


def gather_segments(state: Tensor, layout: VarlenLayout) -> Tensor:
    """Keys or values [1, heads, N, D] of a row, to [1, heads, K, D] as its segments attend to."""
    if layout.gather_index is None:
        return _concat_segments(state, layout)
    from courtside.engines.kernels.prefix_gather import gather_rows

    return gather_rows(squeeze_batch(state), layout.gather_index).transpose(0, 1)[None]


class _ConcatSegments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, state: Tensor, layout: VarlenLayout) -> Tensor:
        assert layout.key_segments is not None
        ctx.layout = layout
        # Split in memory order, in which a segment is contiguous.
        segments = state.transpose(1, 2).split(list(layout.lengths), dim=1)
        return torch.cat([segments[i] for i in layout.key_segments], dim=1).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        layout: VarlenLayout = ctx.layout
        assert layout.key_segments is not None
        (gradient,) = gradients
        lengths = [layout.lengths[i] for i in layout.key_segments]
        by_segment: list[list[Tensor]] = [[] for _ in layout.lengths]
        pieces = gradient.transpose(1, 2).split(lengths, dim=1)
        for i, piece in zip(layout.key_segments, pieces, strict=True):
            by_segment[i].append(piece)
        return torch.cat([_sum_gradients(g) for g in by_segment], dim=1).transpose(1, 2), None


_concat_segments: Callable[[Tensor, VarlenLayout], Tensor] = _ConcatSegments.apply


def _sum_gradients(gradients: Sequence[Tensor]) -> Tensor:
    """In float32 at least: 16 bits would round away the samples of a large group."""
    if len(gradients) == 1:
        return gradients[0]
    dtype = gradients[0].dtype
    total = gradients[0].to(torch.promote_types(dtype, torch.float32), copy=True)
    for gradient in gradients[1:]:
        total += gradient
    return total.to(dtype)
