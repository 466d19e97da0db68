"""Tiny models of the architectures whose layers are fused."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
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


# ── sliding windows, sinks, soft caps ────────────────────────────────────────────────────────────

MIXED: dict[str, Any] = {
    "sliding_window": 5, "head_dim": 8, "use_sliding_window": True,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
UNIFORM: dict[str, Any] = {"sliding_window": 5}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
CAPPED: dict[str, Any] = {
    **MIXED, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
    "attn_implementation": "eager",
}  # fmt: skip
WINDOWED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ["cohere2", "exaone4", "gemma3_text", "ministral", "olmo3", "qwen2", "qwen3", "smollm3"],
        MIXED,
    ),
    **dict.fromkeys(["mistral", "ministral3", "phi3", "starcoder2"], UNIFORM),
    "gemma2": CAPPED,
    "gemma4_text": {
        **MIXED, "global_head_dim": 16, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 258, "num_kv_shared_layers": 2,
    },
    "gpt_oss": {**MIXED, **EXPERTS},
    "granite_swa": MIXED,
    "mixtral": {**UNIFORM, "num_local_experts": 2},
    "phimoe": {**UNIFORM, **EXPERTS},
}  # fmt: skip
"""Windows of 5 positions. Phi-MoE passes its window to masks only; layers of Gemma 4 have heads of
different sizes, and the last two use the KV cache of those before them."""


def windowed(kind: str, **settings: Any) -> Any:
    """A small model with a window of 5 positions; sinks and norms as different as trained ones."""
    torch.manual_seed(0)
    defaults = {
        "vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    config = AutoConfig.for_model(kind, **{**defaults, **WINDOWED[kind], **settings})
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=2.0)
        elif "norm" in name and parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=float(parameter.detach()[0]), std=0.3)
    return model
