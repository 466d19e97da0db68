"""Packed attention with sinks or a soft cap: one block of queries at a time, or one kernel.

A sink only rescales a softmax. So sinks go through the kernel of all segments, whose output and
log-sum-exp are corrected before they are returned; its backward pass takes the corrected ones. A
soft cap needs scores that no kernel of torch computes: `attend_in_blocks`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from courtside.engines.patches.attention_variants import (
    AttentionVariant,
    attend,
    attend_backward,
    sink_gradient,
)

if TYPE_CHECKING:
    from courtside.engines.forward.varlen import VarlenLayout


class _AttendInBlocks(torch.autograd.Function):
    """Scores exist for one block; the backward pass computes them again."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks_H: Tensor | None,
        layout: VarlenLayout,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        variant = AttentionVariant(window=window, softcap=softcap, sinks_H=sinks_H)
        outputs, lses = zip(
            *(
                attend(
                    query[:, :, q], key[:, :, k], value[:, :, k], layout.mask(query, q, k, window),
                    scale=scale, variant=variant,
                )
                for q, k in layout.query_blocks(window)
            ),
            strict=True,
        )  # fmt: skip
        output, lse = torch.cat(outputs, dim=2), torch.cat(lses, dim=2)
        ctx.save_for_backward(query, key, value, sinks_H, output, lse)
        ctx.options = layout, scale, window, softcap
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, sinks_H, output, lse = ctx.saved_tensors
        layout, scale, window, softcap = ctx.options
        (gradient,) = gradients
        variant = AttentionVariant(window=window, softcap=softcap, sinks_H=sinks_H)
        query_grad = torch.empty_like(query)
        # Several blocks add to one key's: float32 at least.
        dtype = torch.promote_types(key.dtype, torch.float32)
        key_grad, value_grad = (torch.zeros_like(x, dtype=dtype) for x in (key, value))
        for q, k in layout.query_blocks(window):
            query_grad[:, :, q], key_part, value_part = attend_backward(
                gradient[:, :, q], query[:, :, q], key[:, :, k], value[:, :, k],
                layout.mask(query, q, k, window), output_BHND=output[:, :, q],
                lse_BHN=lse[:, :, q], scale=scale, variant=variant,
            )  # fmt: skip
            key_grad[:, :, k] += key_part
            value_grad[:, :, k] += value_part
        sinks_grad = None
        if sinks_H is not None:
            sinks_grad = sink_gradient(sinks_H, gradient, output, lse)
        return (
            query_grad, key_grad.to(key.dtype), value_grad.to(value.dtype), sinks_grad,
            None, None, None, None,
        )  # fmt: skip


def attend_in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: VarlenLayout,
    scale: float,
    variant: AttentionVariant,
) -> Tensor:
    """Query [1, heads, N, D] to output [1, N, heads, D]."""
    function: Callable[..., Tensor] = _AttendInBlocks.apply
    output = function(
        query, key, value, variant.sinks_H, layout, scale, variant.window, variant.softcap
    )
    return output.transpose(1, 2)


# ── sinks through a kernel ───────────────────────────────────────────────────────────────────────


class FlashAttention:
    """The operators of torch's varlen attention, with the log-sum-exp of scores [heads, N].

    States are [N, heads, D]; keys may have fewer heads.
    """

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, layout: VarlenLayout, scale: float, window: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Output, log-sum-exp, and the state of random numbers that the operator wants back.
        `window`: positions before its own that a token attends to; −1: all."""
        output, lse, rng_state, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, layout.cu_seqlens_S, layout.cu_key_lens_S, max(layout.lengths),
            max(layout.key_lengths), 0.0, window < 0, return_debug_mask=False, scale=scale,
            window_size_left=window, window_size_right=0,
        )  # fmt: skip
        return output, lse, rng_state

    @staticmethod
    def backward(
        gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor,
        rng_state: Tensor, layout: VarlenLayout, scale: float, window: int,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            gradient, query, key, value, output, lse, layout.cu_seqlens_S, layout.cu_key_lens_S,
            max(layout.lengths), max(layout.key_lengths), 0.0, window < 0, rng_state,
            torch.empty(0, device=query.device), scale=scale, window_size_left=window,
            window_size_right=0,
        )  # fmt: skip
        return gradients


class _AttendWithSinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_NHD: Tensor,
        key_MKD: Tensor,
        value_MKD: Tensor,
        sinks_H: Tensor,
        kernel: type[FlashAttention],
        layout: VarlenLayout,
        scale: float,
        window: int,
    ) -> Tensor:
        output_NHD, lse_HN, rng_state = kernel.forward(
            query_NHD, key_MKD, value_MKD, layout, scale, window
        )
        with_sinks_HN = torch.logaddexp(lse_HN, sinks_H.to(lse_HN.dtype)[:, None])
        share_HN = (lse_HN - with_sinks_HN).exp()
        output_NHD = (output_NHD * share_HN.t()[..., None]).to(output_NHD.dtype)
        ctx.save_for_backward(
            query_NHD, key_MKD, value_MKD, sinks_H, output_NHD, with_sinks_HN, rng_state
        )
        ctx.options = kernel, layout, scale, window
        return output_NHD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient_NHD,) = gradients
        query, key, value, sinks_H, output_NHD, lse_HN, rng_state = ctx.saved_tensors
        kernel, layout, scale, window = ctx.options
        query_grad, key_grad, value_grad = kernel.backward(
            gradient_NHD.contiguous(), query, key, value, output_NHD, lse_HN, rng_state, layout,
            scale, window,
        )  # fmt: skip
        gradient, output = (x.transpose(0, 1)[None] for x in (gradient_NHD, output_NHD))
        sinks_grad = sink_gradient(sinks_H, gradient, output, lse_HN[None])
        return query_grad, key_grad, value_grad, sinks_grad, None, None, None, None


def attend_with_sinks(
    query_NHD: Tensor,
    key_MKD: Tensor,
    value_MKD: Tensor,
    layout: VarlenLayout,
    scale: float,
    variant: AttentionVariant,
) -> Tensor:
    """All segments in one kernel; output [N, heads, D]."""
    function: Callable[..., Tensor] = _AttendWithSinks.apply
    window = -1 if variant.window is None else variant.window - 1
    return function(
        query_NHD, key_MKD, value_MKD, variant.sinks_H, layout.backend.kernel_with_lse, layout,
        scale, window,
    )  # fmt: skip
