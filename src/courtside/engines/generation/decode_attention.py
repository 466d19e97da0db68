"""Decode attention: one new token per row over rows of different lengths in one KV cache.

For the length of a step the model's attention implementation is this one. The lengths reach it
through the model's forward, as a keyword argument. On a GPU a Triton kernel attends to just the
cached positions of each row; elsewhere, for tests, a mask hides the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from courtside.engines.patches.patch import apply_patches, patch_attention
from courtside.errors import ModelError

NAME = "courtside_decode"
STANDARD_ARGUMENTS = frozenset(["dropout", "is_causal", "position_ids", "cache_position",
                                "use_cache", "sliding_window", "output_attentions",
                                "past_key_values"])  # fmt: skip
"""What a model may pass to its attention without asking for a non-standard one."""


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


AttentionInterface.register(NAME, decode_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def use_decode_attention(model: Any) -> Iterator[None]:
    """Forward passes of the model in here take `row_lengths`."""
    with apply_patches([patch_attention(model, NAME)]):
        yield
