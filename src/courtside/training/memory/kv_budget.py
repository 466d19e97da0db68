"""How many keys and values a rollout may hold at once, where the recipe leaves it open.

A number for the device and the recipe, never for what happens to be free: rows that are written
together round alike, and a run that is resumed must write what it would have written.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from courtside.recipe import Recipe
from courtside.training.memory.checkpointing_auto import num_weight_copies
from courtside.training.weights import StudentWeights

DEFAULT_TOKENS, MIN_TOKENS, MAX_TOKENS = 65536, 4096, 2**19
KV_SHARE = 0.5
"""Of what models and moments leave: reading prompts and drawing need some of it."""


def device_bytes(device: torch.device) -> int | None:
    """All of a GPU's memory; None: a CPU's is not asked for."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def kv_cache_tokens(
    recipe: Recipe, weights: StudentWeights, others: Iterable[Any], *, total: int | None
) -> int:
    """`others`: models of teachers. `total`: bytes of the device; None: the usual number."""
    asked = recipe.rollout.kv_cache_tokens
    if asked != "auto":
        return asked
    if total is None:
        return DEFAULT_TOKENS
    held = sum(p.nbytes for model in (weights.model, *others) for p in model.parameters())
    trained = sum(p.nbytes for p in weights.trained().values())
    num_moments = 0 if recipe.train.optimizer_offload else 2
    left = total - held - (num_moments + num_weight_copies(recipe)) * trained  # copies of itself
    fits = int(KV_SHARE * left) // kv_bytes_per_token(weights.model, weights.autocast)
    # A power of two: no accident of a few bytes changes it.
    return min(max(1 << max(fits, 1).bit_length() - 1, MIN_TOKENS), MAX_TOKENS)


def kv_bytes_per_token(model: Any, dtype: torch.dtype | None) -> int:
    """Of the keys and values of one token, in all layers."""
    config = model.config.get_text_config()
    num_heads = config.num_attention_heads
    shared = getattr(config, "num_key_value_heads", None) or num_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    numbers = dtype or next(model.parameters()).dtype
    return int(2 * config.num_hidden_layers * shared * size * numbers.itemsize)
