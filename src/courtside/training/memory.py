"""What the recipe leaves to "auto" because of memory: KV cache size and gradient checkpointing.

Both are estimated from the recipe and the shapes in the model's config. The size of the KV cache
depends on device and recipe, never on the memory that happens to be free: batch shapes affect
rounding, and a resumed run must sample what it would have sampled. Gradient checkpointing is on
where activations would not fit. The update is the same either way; where the estimate is too low,
the out-of-memory message names the setting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from courtside.engines.forward.batching import default_pass_tokens
from courtside.recipe import Recipe
from courtside.recipe.teacher import SelfTeacherConfig
from courtside.training.optimizer import OffloadedAdamW
from courtside.training.student import Student
from courtside.training.weights import StudentWeights

DEFAULT_TOKENS, MIN_TOKENS, MAX_TOKENS = 65536, 4096, 2**19
KV_SHARE = 0.5
"""Of the memory that models and optimizer state leave; prefill and sampling use the remainder."""
ACTIVATION_SHARE = 0.8
"""Of the memory left: the backward pass has temporaries, and allocators fragment."""
LOGIT_COPIES = 8
"""Float32 copies of a chunk's logits where a loss goes through the LM head in autograd."""

FreeBytes = Callable[[torch.device], int | None]


# ── KV cache ──────────────────────────────────────────────────────────────────────────────────────


def device_bytes(device: torch.device) -> int | None:
    """Total memory of a GPU; None on a CPU."""
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
    models = sum(p.nbytes for model in (weights.model, *teachers) for p in model.parameters())
    trained = sum(p.nbytes for p in weights.trained.values())
    num_moments = 0 if recipe.train.optimizer_offload else 2
    available = total - models - (num_moments + num_weight_copies(recipe)) * trained
    tokens = int(KV_SHARE * available) // kv_bytes_per_token(weights.model, weights.autocast)
    # Rounded down to a power of two, so that a few bytes more or less do not change it.
    return min(max(1 << max(tokens, 1).bit_length() - 1, MIN_TOKENS), MAX_TOKENS)


def num_weight_copies(recipe: Recipe) -> int:
    """Frozen and EMA self-teachers, and the reference: at most one copy of the weights each."""
    copies = [
        t for t in recipe.model_teachers if isinstance(t, SelfTeacherConfig) and t.weights != "live"
    ]
    return len(copies) + recipe.needs_reference


def kv_bytes_per_token(model: Any, dtype: torch.dtype | None) -> int:
    """Keys and values of one token in all layers."""
    config = model.config.get_text_config()
    _, kv = attention_widths(config)
    itemsize = (dtype or next(model.parameters()).dtype).itemsize
    return int(2 * config.num_hidden_layers * kv * itemsize)


def attention_widths(config: Any) -> tuple[int, int]:
    """Output features of the query projection, and of the key (or value) projection."""
    num_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return num_heads * head_dim, num_kv_heads * head_dim


# ── gradient checkpointing ────────────────────────────────────────────────────────────────────────


def free_bytes(device: torch.device) -> int | None:
    """GPU memory that this process can still allocate; None on a CPU."""
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def choose_gradient_checkpointing(
    student: Student, free: FreeBytes, *, context_length: int
) -> str | None:
    """Returns why it was turned on; None: it was not. All models must be loaded by now."""
    recipe, weights = student.recipe, student.weights
    auto = recipe.student.gradient_checkpointing == "auto"
    if not auto or (available := free(weights.device)) is None:
        return None
    longest = min(recipe.rollout.limits.tokens or recipe.rollout.max_new_tokens, context_length)
    tokens = max(recipe.train.micro_batch_tokens or default_pass_tokens(weights.device), longest)
    needed = tokens * activation_bytes_per_token(weights.model, weights.autocast) / 2**30
    headroom = max(0, available - pending_bytes(student)) / 2**30
    if needed <= ACTIVATION_SHARE * headroom:
        return None
    reason = f"{tokens:,} tokens need {needed:.3g} GiB of activations, {headroom:.3g} GiB are left"
    if not weights.model.supports_gradient_checkpointing:
        return f"{reason}; this model has no gradient checkpointing: lower train.micro_batch_tokens"
    weights.enable_gradient_checkpointing()
    return f"gradient checkpointing is on: {reason}"


def activation_bytes_per_token(model: Any, autocast: torch.dtype | None) -> int:
    """Of a decoder with SwiGLU: two norm inputs per layer in the dtype of the residual stream, and
    the inputs of matmuls, RoPE, attention and SwiGLU in that of the matmuls."""
    config = model.config.get_text_config()
    query, kv = attention_widths(config)
    residual = 2 * config.hidden_size
    matmul = 2 * config.hidden_size + 3 * (query + kv) + 3 * config.intermediate_size
    itemsize = (autocast or model.dtype).itemsize
    return int(config.num_hidden_layers * (residual * model.dtype.itemsize + matmul * itemsize))


def pending_bytes(student: Student) -> int:
    """What the first step allocates in addition to activations: gradients, optimizer state, copies
    of the weights, and the logits of a chunk."""
    weights, optimizer = student.weights, student.optimizer
    trained = sum(p.nbytes for p in weights.trained.values())
    moments = 2 * trained
    if isinstance(optimizer, OffloadedAdamW):
        moments = optimizer.staging_bytes
    # Autocast has shadow weights during a step, and the sampler its own.
    shadow_itemsize = 0 if weights.autocast is None else 2 * weights.autocast.itemsize
    shadow = shadow_itemsize * weights.model.num_parameters()
    logits = LOGIT_COPIES * 4 * student.chunk * student.head.vocab_size
    return int(trained * (1 + num_weight_copies(student.recipe)) + moments + shadow + logits)
