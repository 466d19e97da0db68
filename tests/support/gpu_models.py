"""Small random models with the shapes of real ones, and float64 references on a CPU."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from support.tiny_model import tiny_tokenizer
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

NUM_WORDS = 258
"""Those of `tiny_tokenizer`."""


def qwen3(
    *,
    seed: int = 0,
    size: int = 64,
    layers: int = 2,
    tied: bool = True,
    vocab_size: int = NUM_WORDS,
    spread: float = 0.15,
) -> Any:
    """A Qwen3: norms on queries and keys, grouped heads, tied embeddings."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=size,
        intermediate_size=2 * size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        initializer_range=spread,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return Qwen3ForCausalLM(config).eval()


def saved(folder: Path, **options: Any) -> Path:
    """A model folder as a user would have it."""
    qwen3(**options).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def in_float64(model: Any) -> Any:
    """A copy on the CPU, in float64 throughout: norms would compute in float32 otherwise."""
    duplicate = copy.deepcopy(model).cpu().double()
    for module in duplicate.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = partial(_norm, module)
    return duplicate


def _norm(layer: Any, hidden: Tensor) -> Tensor:
    size = hidden.square().mean(-1, keepdim=True) + layer.variance_epsilon
    return layer.weight * hidden * size.rsqrt()


def off(value: Tensor, right: Tensor) -> float:
    """‖value − right‖ / ‖right‖; inf where something is not finite."""
    value, right = (t.detach().cpu().double() for t in (value, right))
    error = (value - right).norm() / right.norm()
    return float(error) if bool(error.isfinite()) else float("inf")
