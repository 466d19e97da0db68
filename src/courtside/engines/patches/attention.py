"""Attention over a KV cache: dtypes, masks, and two implementations for the length of a pass.

The cache has all positions; a sliding window is a mask over them. For prefill, and for decoding on
a CPU, attention with a mask: transformers repeats keys and values for every query head as soon as
there is one, as some GPU kernels require, which makes a decoding step up to ten times slower on a
CPU; soft caps and sinks are computed for some queries at a time. For decode steps, attention of one
new token per row over rows of different lengths: on a GPU a Triton kernel attends to just the
cached positions of each row; elsewhere, for tests, a mask hides the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from courtside.engines.patches.attention_variants import (
    AttentionVariant,
    attend,
    find_layer_kinds,
    find_window,
    needs_own_softmax,
)
from courtside.engines.patches.patch import Patch, patch_attention
from courtside.errors import ModelError

GQA_ATTENTION = "courtside_gqa_cpu"
DECODE_ATTENTION = "courtside_decode"
STANDARD_ARGUMENTS = frozenset(["dropout", "is_causal", "position_ids", "cache_position",
                                "use_cache", "sliding_window", "output_attentions",
                                "past_key_values", "softcap", "s_aux"])  # fmt: skip
"""What a model may pass to its attention without asking for one that is not supported."""
MAX_SCORES = 2**28
"""Of attention with a soft cap or sinks during prefill, at a time: 1 GiB in float32."""


def attn_implementation(model: Any) -> str:
    return str(model.config.get_text_config()._attn_implementation)


# ── dtypes ───────────────────────────────────────────────────────────────────────────────────────


def cast_attention_inputs(*states: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values in the dtype of attention.

    On a GPU that of autocast, because RoPE may have returned float32. On a CPU at least float32,
    because attention in bfloat16 takes up to seven times as long there.
    """
    device = states[0].device.type
    if device == "cpu":
        return tuple(state.to(torch.promote_types(state.dtype, torch.float32)) for state in states)
    if not torch.is_autocast_enabled(device):
        return states
    return tuple(state.to(torch.get_autocast_dtype(device)) for state in states)


def disable_cpu_autocast(device: torch.device) -> Any:
    """Around an operation whose inputs autocast would cast to bfloat16 on a CPU."""
    if device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
        return nullcontext()
    return torch.autocast("cpu", enabled=False)


# ── positions and masks over a KV cache ──────────────────────────────────────────────────────────


def new_positions(
    lengths: Sequence[int], num_new: int, *, capacity: int, device: torch.device
) -> tuple[Tensor, int]:
    """KV cache positions [B, N] of new tokens after `lengths` cached ones, and how many positions
    any of them attends to. Padding beyond the capacity shares the last position: nothing attends
    to it."""
    length_B = torch.tensor(lengths, device=device)
    position_BN = length_B[:, None] + torch.arange(num_new, device=device)
    return position_BN.clamp(max=capacity - 1), min(capacity, max(lengths) + num_new)


def cache_mask(model: Any, position_BN: Tensor, width: int) -> Tensor | dict[str, Tensor]:
    """Each token attends to the cached positions up to its own. Padding is overwritten before a
    token attends to it, so no mask needs to be stored."""
    position_W = torch.arange(width, device=position_BN.device)
    is_visible = (position_W <= position_BN[:, :, None])[:, None]
    # Rows of a prefill graph without a prompt are behind the width: a window without a single
    # position would make NaNs.
    return masks_by_layer_kind(model, is_visible, position_BN.clamp(max=width - 1), position_W)


def masks_by_layer_kind(
    model: Any, is_visible: Tensor, query_position_BN: Tensor, key_position_W: Tensor
) -> Tensor | dict[str, Tensor]:
    """The mask [B, 1, N, W] that the model's forward takes; by kind of layer where its config has
    kinds, of which some have a window."""
    window = find_window(model)
    mask = format_mask(model, is_visible)
    if window is None or window >= len(key_position_W):
        return mask
    is_near = (key_position_W > query_position_BN[:, :, None] - window)[:, None]
    windowed = format_mask(model, is_visible & is_near)
    kinds = find_layer_kinds(model)
    if kinds is None:
        return windowed
    return {kind: windowed if kind == "sliding_attention" else mask for kind in kinds}


def format_mask(model: Any, mask: Tensor) -> Tensor:
    """SDPA takes a boolean 4D mask as it is; other implementations add the mask to the scores."""
    if attn_implementation(model) in ("sdpa", GQA_ATTENTION):
        return mask
    dtype = model.get_input_embeddings().weight.dtype
    lowest = torch.finfo(dtype).min
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, lowest)


# ── grouped-query attention ──────────────────────────────────────────────────────────────────────


def gqa_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """[B, H, N, D] queries and [B, K, L, D] keys and values to [B, N, H, D]."""
    dtype = query.dtype
    query, key, value = cast_attention_inputs(query, key, value)
    needs_sdpa = settings.get("position_bias") is not None or module.training
    variant = AttentionVariant.of_call(module, settings, num_keys=key.shape[2])
    with disable_cpu_autocast(query.device):
        if variant.changes_softmax:
            output = _attend_in_chunks(module, query, key, value, attention_mask, scaling, variant)
        elif attention_mask is None or needs_sdpa:
            output, _ = sdpa_attention_forward(
                module, query, key, value, attention_mask, scaling=scaling, **settings
            )
        else:
            output = F.scaled_dot_product_attention(
                query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True
            )
            output = output.transpose(1, 2).contiguous()
    return output.to(dtype), None


AttentionInterface.register(GQA_ATTENTION, gqa_attention)
AttentionMaskInterface.register(GQA_ATTENTION, sdpa_mask)


def _attend_in_chunks(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    variant: AttentionVariant,
) -> Tensor:
    """[B, N, H, D], without a graph: as many queries at a time as `MAX_SCORES` permits."""
    if mask is None:
        raise ModelError(f"{type(module).__name__} does not pass its mask to its attention")
    B, H, N, D = query.shape
    size = max(1, MAX_SCORES // (B * H * key.shape[2]))
    scale = D**-0.5 if scaling is None else scaling
    outputs = [
        attend(
            query[:, :, start : start + size], key, value, mask[:, :, start : start + size],
            scale=scale, variant=variant,
        )[0]
        for start in range(0, N, size)
    ]  # fmt: skip
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def gains_from_gqa(model: Any) -> bool:
    """Whether decoding should run `GQA_ATTENTION`: on a CPU, in the place of torch's SDPA."""
    return model.device.type == "cpu" and attn_implementation(model) == "sdpa"


def cached_attention_patches(model: Any) -> list[Patch]:
    """For forward passes over a KV cache without a graph."""
    runs_here = gains_from_gqa(model) or needs_own_softmax(model)
    return [patch_attention(model, GQA_ATTENTION)] if runs_here else []


# ── decode attention ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLengths:
    """How much of each row of the KV cache a decode step attends to."""

    length_B: Tensor
    """Cached positions, the new one included."""
    prefix_row_B: Tensor
    prefix_length_B: Tensor
    """A row with the same first positions, bit for bit, and their number: rows that share a prompt
    load its keys and values from one place."""


_DECODED_ROWS: ContextVar[RowLengths] = ContextVar("_DECODED_ROWS")


@contextmanager
def decode_rows(rows: RowLengths) -> Iterator[None]:
    """For `decode_attention` in the forward pass inside: not every model would hand on an argument
    of ours, and not every layer of a hybrid ignores it."""
    token = _DECODED_ROWS.set(rows)
    try:
        yield
    finally:
        _DECODED_ROWS.reset(token)


def decode_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """[B, heads, 1, D] and a KV cache [B, KV heads, L, D] to [B, 1, heads, D]."""
    del attention_mask
    names = {name for name, value in settings.items() if value is not None}
    special = sorted(names - STANDARD_ARGUMENTS)
    if special:
        raise ModelError(f"{type(module).__name__} has an attention with {special[0]}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rows = _DECODED_ROWS.get()
    prefixes = (rows.prefix_row_B, rows.prefix_length_B)
    variant = AttentionVariant.of_call(module, settings, num_keys=key.shape[2])
    if query.is_cuda:
        from courtside.engines.kernels import decode  # needs Triton, which CPUs do without

        context_BHD = decode.decode_attention(
            query[:, :, 0], key, value, rows.length_B, scale, prefixes,
            window=variant.window, softcap=variant.softcap, sinks_H=variant.sinks_H,
        )  # fmt: skip
        return context_BHD[:, None], None
    position_L = torch.arange(key.shape[2], device=key.device)
    is_visible_BL = position_L < rows.length_B[:, None]
    if variant.window is not None:
        is_visible_BL &= position_L >= rows.length_B[:, None] - variant.window
    is_prefix_BL = (position_L < rows.prefix_length_B[:, None])[:, None, :, None]
    key, value = (torch.where(is_prefix_BL, x[rows.prefix_row_B], x) for x in (key, value))
    query = query.to(key.dtype)  # autocast would do it for torch's own attention
    mask_B11L = is_visible_BL[:, None, None]
    if variant.changes_softmax:
        context_BH1D, _ = attend(query, key, value, mask_B11L, scale=scale, variant=variant)
    else:
        context_BH1D = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask_B11L, scale=scale, enable_gqa=True
        )
    return context_BH1D.transpose(1, 2).contiguous(), None


AttentionInterface.register(DECODE_ATTENTION, decode_attention)
AttentionMaskInterface.register(DECODE_ATTENTION, sdpa_mask)
