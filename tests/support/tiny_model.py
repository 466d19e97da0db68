"""A whole language model in a megabyte: random weights, real tokenizer, real chat template.

Everything that loads, samples, scores and trains a model can be tested on it in milliseconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_tokenizer(
    *,
    template: str | None = TEMPLATE,
    extra: tuple[str, ...] = (),
    merges: tuple[tuple[str, str], ...] = (),
) -> Any:
    """One token a byte, the special tokens, and one for each pair of `merges`."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = [first + second for first, second in merges]
    tokens = ["<|im_start|>", "<|im_end|>", *bytes_, *extra, *merged]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|im_start|>", eos_token="<|im_end|>",
        pad_token="<|im_end|>",
    )  # fmt: skip
    tokenizer.chat_template = template
    return tokenizer


def tiny_model(
    *,
    seed: int = 0,
    vocab_size: int = 258,
    layers: int = 2,
    size: int = 32,
    spread: float = 0.3,
) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=size,
        intermediate_size=2 * size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=spread,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return LlamaForCausalLM(config).eval()


def save_tiny(folder: Path, **options: Any) -> Path:
    """A model folder as a user would have it."""
    tiny_model(**options).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
