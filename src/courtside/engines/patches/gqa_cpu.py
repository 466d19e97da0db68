"""Attention on a CPU with a mask where several heads share keys and values, not copying those.

transformers' own repeats keys and values for every head as soon as there is a mask, because a GPU's
kernels want that. On a CPU it makes a step of decoding up to ten times slower for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from courtside.engines.patches.patch import apply_patches, patch_attention
from courtside.engines.precision import cast_attention_inputs, disable_cpu_autocast

NAME = "courtside_grouped"


def gqa_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """[B, heads, N, D] and [B, shared heads, L, D] to [B, N, heads, D]."""
    given = query.dtype
    query, key, value = cast_attention_inputs(query, key, value)
    special = settings.get("position_bias") is not None or module.training
    with disable_cpu_autocast(query.device):
        if attention_mask is None or special:
            found, _ = sdpa_attention_forward(
                module, query, key, value, attention_mask, scaling=scaling, **settings
            )
        else:
            found = F.scaled_dot_product_attention(
                query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True
            )
            found = found.transpose(1, 2).contiguous()
    return found.to(given), None


AttentionInterface.register(NAME, gqa_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def use_gqa_attention(model: Any) -> Iterator[None]:
    """Passes of the model in here use it, where it pays and the model's own is the usual one."""
    current = model.config.get_text_config()._attn_implementation
    with apply_patches(
        [patch_attention(model, NAME)] if model.device.type == "cpu" and current == "sdpa" else []
    ):
        yield
