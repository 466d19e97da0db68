"""Grouped-query attention with a mask on a CPU, without repeating keys and values.

transformers repeats them for every query head as soon as there is a mask, as some GPU kernels
require. On a CPU that makes a decoding step up to ten times slower.
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

NAME = "courtside_gqa_cpu"


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


AttentionInterface.register(NAME, gqa_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def use_gqa_attention(model: Any) -> Iterator[None]:
    """On a CPU, and where the model's attention is torch's SDPA; otherwise nothing changes."""
    current = model.config.get_text_config()._attn_implementation
    applies = model.device.type == "cpu" and current == "sdpa"
    with apply_patches([patch_attention(model, NAME)] if applies else []):
        yield
