"""Attention over a KV cache: dtypes, masks, and two implementations for the length of a pass.

On a CPU, grouped-query attention with a mask: transformers repeats keys and values for every query
head as soon as there is a mask, as some GPU kernels require, which makes a decoding step up to ten
times slower there. For decode steps, attention of one new token per row over rows of different
lengths: on a GPU a Triton kernel attends to just the cached positions of each row; elsewhere, for
tests, a mask hides the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from courtside.errors import ModelError

GQA_ATTENTION = "courtside_gqa_cpu"
DECODE_ATTENTION = "courtside_decode"
STANDARD_ARGUMENTS = frozenset(["dropout", "is_causal", "position_ids", "cache_position",
                                "use_cache", "sliding_window", "output_attentions",
                                "past_key_values"])  # fmt: skip
"""What a model may pass to its attention without asking for a non-standard one."""


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


def cache_mask(model: Any, position_BN: Tensor, width: int) -> Tensor:
    """Each token attends to the cached positions up to its own. Padding is overwritten before a
    token attends to it, so no mask needs to be stored."""
    position_W = torch.arange(width, device=position_BN.device)
    return format_mask(model, (position_W <= position_BN[:, :, None])[:, None])


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
    with disable_cpu_autocast(query.device):
        if attention_mask is None or needs_sdpa:
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


def gains_from_gqa(model: Any) -> bool:
    """Whether decoding should run `GQA_ATTENTION`: on a CPU, in the place of torch's SDPA."""
    return model.device.type == "cpu" and attn_implementation(model) == "sdpa"


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


def decode_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    row_lengths: RowLengths | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """[B, heads, 1, D] and a KV cache [B, KV heads, L, D] to [B, 1, heads, D]."""
    del attention_mask
    if row_lengths is None:
        raise ModelError(f"{type(module).__name__} does not pass row_lengths to its attention")
    names = {name for name, value in settings.items() if value is not None}
    special = sorted(names - STANDARD_ARGUMENTS)
    if special or "sliding_window" in names:
        reason = special[0] if special else "a sliding window"
        raise ModelError(f"{type(module).__name__} has an attention with {reason}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rows = row_lengths
    prefixes = (rows.prefix_row_B, rows.prefix_length_B)
    if query.is_cuda:
        from courtside.engines.kernels import decode  # needs Triton, which CPUs do without

        context_BHD = decode.decode_attention(
            query[:, :, 0], key, value, rows.length_B, scale, prefixes
        )
        return context_BHD[:, None], None
    position_L = torch.arange(key.shape[2], device=key.device)
    is_cached_BL = position_L < rows.length_B[:, None]
    is_prefix_BL = (position_L < rows.prefix_length_B[:, None])[:, None, :, None]
    key, value = (torch.where(is_prefix_BL, x[rows.prefix_row_B], x) for x in (key, value))
    query = query.to(key.dtype)  # autocast would do it for torch's own attention
    context_BH1D = F.scaled_dot_product_attention(
        query, key, value, attn_mask=is_cached_BL[:, None, None], scale=scale, enable_gqa=True
    )
    return context_BH1D.transpose(1, 2).contiguous(), None


AttentionInterface.register(DECODE_ATTENTION, decode_attention)
AttentionMaskInterface.register(DECODE_ATTENTION, sdpa_mask)
