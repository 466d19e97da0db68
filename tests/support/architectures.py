"""Tiny models of the architectures whose layers are fused."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)


def make_model(config: type, model: type, **settings: Any) -> Any:
    torch.manual_seed(1)
    built = model(config(
        vocab_size=258, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        bos_token_id=0, eos_token_id=1, pad_token_id=1, **settings,
    )).eval()  # fmt: skip
    for name, parameter in built.named_parameters():
        if "norm" in name or "bias" in name:  # ones and zeros would hide an error
            torch.nn.init.normal_(parameter, mean=float(parameter.detach()[0]), std=0.3)
    return built


def qwen() -> Any:
    return make_model(Qwen3Config, Qwen3ForCausalLM, head_dim=16)


def qwen2() -> Any:
    return make_model(Qwen2Config, Qwen2ForCausalLM)


def phi3() -> Any:
    """Query, key and value are one layer already."""
    return make_model(Phi3Config, Phi3ForCausalLM)


def olmo2() -> Any:
    """Norms after the layers, whose outputs are added unrounded."""
    return make_model(Olmo2Config, Olmo2ForCausalLM)


def lora(model: Any, targets: Any = "all-linear") -> Any:
    torch.manual_seed(2)
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    return get_peft_model(model, config).base_model.model


def lora_qwen() -> Any:
    return lora(qwen())


def lora_head() -> Any:
    """On the output head too."""
    model = lora(qwen(), ["q_proj", "lm_head"])
    model.lm_head.lora_B.default.weight.data.mul_(4.0)
    return model
