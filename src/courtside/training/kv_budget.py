"""The size of the KV cache, from the recipe and the shapes in the model's config.

It depends on device and recipe, never on the memory that happens to be free: batch shapes affect
rounding, and a resumed run must sample what it would have sampled. Importing it loads no torch:
`courtside plan` computes with it before there is a model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from courtside.recipe import Recipe
from courtside.recipe.teacher import SelfTeacherConfig

if TYPE_CHECKING:
    import torch

    from courtside.training.weights import StudentWeights

DEFAULT_TOKENS, MIN_TOKENS, MAX_TOKENS = 65536, 4096, 2**19
KV_SHARE = 0.5
"""Of the memory that models and optimizer state leave; prefill and sampling use the remainder."""


def device_bytes(device: torch.device) -> int | None:
    """Total memory of a GPU; None on a CPU."""
    import torch

    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def kv_cache_tokens(
    recipe: Recipe, weights: StudentWeights, teachers: Iterable[Any], *, total: int | None
) -> int:
    """`teachers`: their models. `total`: bytes of the device; None: the default number."""
    if recipe.rollout.kv_cache_tokens != "auto":
        return recipe.rollout.kv_cache_tokens
    if total is None:
        return DEFAULT_TOKENS
    from courtside.training.shards import local_rows

    models = (weights.model, *teachers)
    held = sum(local_rows(p).nbytes for model in models for p in model.parameters())
    trained = sum(p.nbytes for p in weights.trained.values())
    num_moments = 0 if recipe.train.optimizer_offload else 2
    available = total - held - (num_moments + num_weight_copies(recipe)) * trained
    return budget_kv_tokens(available, kv_bytes_per_token(weights.model, weights.autocast))


def budget_kv_tokens(available: int, bytes_per_token: int) -> int:
    """`available`: bytes of the device that models and optimizer state leave."""
    tokens = int(KV_SHARE * available) // bytes_per_token
    # Rounded down to a power of two, so that a few bytes more or less do not change it.
    return min(max(1 << max(tokens, 1).bit_length() - 1, MIN_TOKENS), MAX_TOKENS)


def num_weight_copies(recipe: Recipe) -> int:
    """Frozen and EMA self-teachers, and the reference: at most one copy of the weights each."""
    copies = [
        t for t in recipe.model_teachers if isinstance(t, SelfTeacherConfig) and t.weights != "live"
    ]
    return len(copies) + recipe.needs_reference


def kv_bytes_per_token(model: Any, dtype: torch.dtype | None) -> int:
    """Keys and values of one token in all layers that have some. Where none has, of as many
    hidden states: what its rows take is counted in such tokens (`Capabilities.row_state_tokens`).
    """
    config = model.config.get_text_config()
    itemsize = (dtype or next(model.parameters()).dtype).itemsize
    if getattr(config, "is_heterogeneous", False):  # as Gemma 4: heads differ from layer to layer
        num_layers = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", 0) or 0)
        layers = [config.per_layer_config[i] for i in range(num_layers)]
        return int(2 * sum(x.num_key_value_heads * x.head_dim for x in layers) * itemsize)
    kinds = getattr(config, "layer_types", None) or ["attention"] * config.num_hidden_layers
    num_layers = sum("attention" in kind or "hybrid" in kind for kind in kinds)
    num_layers -= sum(kind == "linear_attention" for kind in kinds)
    num_heads = getattr(config, "num_attention_heads", None)
    if not num_layers or num_heads is None:
        return int(2 * config.num_hidden_layers * config.hidden_size * itemsize)
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return int(2 * num_layers * num_kv_heads * head_dim * itemsize)
