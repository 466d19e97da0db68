"""Small random Qwen3 models with a real layout: query and key norms, GQA, tied embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.tiny_model import tiny_tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCAB_SIZE = 258
"""That of `tiny_tokenizer`."""


def qwen3(
    *,
    seed: int = 0,
    size: int = 64,
    layers: int = 2,
    tied: bool = True,
    vocab_size: int = VOCAB_SIZE,
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


def save_qwen3(folder: Path, **options: Any) -> Path:
    """A model folder as a user would have it."""
    qwen3(**options).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
