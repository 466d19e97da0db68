"""Attention of one new token a row over rows of different lengths, in room of one size.

For the time of a step the model's attention is this one, and `ragged` is told how much of each row
is there, and which rows began alike. On a GPU a kernel reads just that; elsewhere, for tests, a
mask hides the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from courtside.engines.patches.patch import apply_patches, patch_attention
from courtside.errors import ModelError

NAME = "courtside_ragged"
PLAIN = frozenset(["dropout", "is_causal", "position_ids", "cache_position", "use_cache",
                   "sliding_window", "output_attentions", "past_key_values"])  # fmt: skip
"""What a model may tell its attention without asking for another one than the usual."""

_rows: list[tuple[Tensor, tuple[Tensor, Tensor]]] = []
"""Of the step under way: places of each row that are to be read, the new one included; and for each
row one that has the same in its first places, with their number."""


def decode_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """[B, heads, 1, D] and room [B, shared heads, L, D] to [B, 1, heads, D]."""
    del module, attention_mask
    special = sorted(k for k, v in settings.items() if v is not None and k not in PLAIN)
    if special or settings.get("sliding_window") is not None:
        raise ModelError(f"an attention with {special[0] if special else 'a window'}")
    ((length_B, leaders),) = _rows
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.is_cuda:
        from courtside.engines.kernels.decode import (
            decode_attention,  # needs Triton, which CPUs do without
        )

        return decode_attention(query[:, :, 0], key, value, length_B, scale, leaders)[:, None], None
    place_L = torch.arange(key.shape[2], device=key.device)
    seen_BL = place_L < length_B[:, None]
    prefix_row_B, prefix_length_B = leaders
    led_BL = (place_L < prefix_length_B[:, None])[:, None, :, None]
    key, value = (torch.where(led_BL, room[prefix_row_B], room) for room in (key, value))
    query = query.to(key.dtype)  # autocast would do it for torch's own attention
    found = F.scaled_dot_product_attention(
        query, key, value, attn_mask=seen_BL[:, None, None], scale=scale, enable_gqa=True
    )
    return found.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, decode_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def use_decode_attention(
    model: Any, length_B: Tensor, prefix_row_B: Tensor, prefix_length_B: Tensor
) -> Iterator[None]:
    """Steps of the model in here read `length_B` places of each row, the first `alike_B` of them in
    the row `leader_B`, where the same lies."""
    _rows.append((length_B, (prefix_row_B, prefix_length_B)))
    try:
        with apply_patches([patch_attention(model, NAME)]):
            yield
    finally:
        _rows.pop()
