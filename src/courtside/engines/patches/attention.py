"""What attention needs of its inputs, and grouped-query attention with a mask on a CPU.

transformers repeats keys and values for every query head as soon as there is a mask, as some GPU
kernels require. On a CPU that makes a decoding step up to ten times slower.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from courtside.engines.patches.patch import apply_patches, patch_attention

GQA_ATTENTION = "courtside_gqa_cpu"


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


@contextmanager
def use_gqa_attention(model: Any) -> Iterator[None]:
    """On a CPU, and where the model's attention is torch's SDPA; otherwise nothing changes."""
    applies = model.device.type == "cpu" and attn_implementation(model) == "sdpa"
    with apply_patches([patch_attention(model, GQA_ATTENTION)] if applies else []):
        yield
