"""Boolean attention masks in the form that a model's attention implementation takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from courtside.engines.probes import attn_implementation


def format_mask(model: Any, mask: Tensor) -> Tensor:
    """SDPA takes a 4D mask as it is; other implementations add it to the scores."""
    if attn_implementation(model) == "sdpa":
        return mask
    dtype = model.get_input_embeddings().weight.dtype
    lowest = torch.finfo(dtype).min
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, lowest)
