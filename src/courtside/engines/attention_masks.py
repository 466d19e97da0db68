"""A model's attention implementation, and masks in the form that it takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def attn_implementation(model: Any) -> str:
    return str(model.config.get_text_config()._attn_implementation)


def format_mask(model: Any, mask: Tensor) -> Tensor:
    """SDPA takes a boolean 4D mask as it is; other implementations add the mask to the scores."""
    if attn_implementation(model) == "sdpa":
        return mask
    dtype = model.get_input_embeddings().weight.dtype
    lowest = torch.finfo(dtype).min
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, lowest)
