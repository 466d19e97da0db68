"""Gradient checkpointing where the recipe says "auto": on if the activations would not fit.

They are estimated from the shapes in the model's config. The update is the same either way; where
the estimate is too low, the out-of-memory message names the setting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from courtside.engines.forward.batching import default_pass_tokens
from courtside.training.memory.kv_budget import attention_widths, num_weight_copies
from courtside.training.offloaded_adamw import OffloadedAdamW
from courtside.training.student import Student

ACTIVATION_SHARE = 0.8
"""Of the memory left: the backward pass has temporaries, and allocators fragment."""
LOGIT_COPIES = 8
"""Float32 copies of a chunk's logits where a loss goes through the LM head in autograd."""

FreeBytes = Callable[[torch.device], int | None]


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
