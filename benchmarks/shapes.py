"""Models of known shapes with random weights: nothing is downloaded, and times are the same."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from workload import SEED

from courtside.engines.local import LocalEngine
from courtside.losses.fused.linear_divergence import fused_linear_divergence
from courtside.losses.fused.types import HeadGradient, HeadLossSpec, Projection
from courtside.losses.policy_gradient import SampledTokenLoss

LLAMA = {
    "smollm2-135m": dict(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3,
    ),
    "llama-1b": dict(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
        num_attention_heads=32, num_key_value_heads=8,
    ),
}  # fmt: skip
LLAMA["smollm2-4-layers"] = {**LLAMA["smollm2-135m"], "num_hidden_layers": 4}
"""Fewer layers: for what grows with length, on a CPU."""
QWEN3 = {
    "qwen3-0.6b": dict(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128,
    ),
    "qwen3-4b": dict(
        vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    ),
    "qwen3-8b": dict(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
    ),
    "tiny": dict(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    ),
}  # fmt: skip
GEMMA3 = {
    "gemma-3-1b": dict(
        vocab_size=262144, hidden_size=1152, intermediate_size=6912, num_hidden_layers=26,
        num_attention_heads=4, num_key_value_heads=1, head_dim=256, query_pre_attn_scalar=256,
        sliding_window=512, max_position_embeddings=32768,
    ),
}  # fmt: skip
"""Five layers with a window, then one without."""
OLMO3 = {
    "olmo-3-7b": dict(
        vocab_size=100278, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=32, sliding_window=4096,
        max_position_embeddings=65536, tie_word_embeddings=False,
    ),
}  # fmt: skip
GPT_OSS = {
    "gpt-oss-20b": dict(
        vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=24,
        num_attention_heads=64, num_key_value_heads=8, head_dim=64, sliding_window=128,
        num_local_experts=32, num_experts_per_tok=4, tie_word_embeddings=False,
    ),
}  # fmt: skip
"""In 16 bits, where the published weights have four."""
QWEN3_MOE = {
    "qwen3-30b-a3b": dict(
        vocab_size=151936, hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128,
        num_experts_per_tok=8, norm_topk_prob=True, tie_word_embeddings=False,
    ),
}  # fmt: skip
QWEN3_5 = {
    "qwen3.5-4b": dict(
        vocab_size=248320, hidden_size=2560, intermediate_size=9216, num_hidden_layers=32,
        num_attention_heads=16, num_key_value_heads=4, head_dim=256,
    ),
}  # fmt: skip
"""Three gated delta nets, then one layer of attention."""
CLASSES: list[tuple[dict[str, dict[str, Any]], Any, Any]] = [
    (LLAMA, LlamaConfig, LlamaForCausalLM),
    (QWEN3, Qwen3Config, Qwen3ForCausalLM),
    (GEMMA3, Gemma3TextConfig, Gemma3ForCausalLM),
    (OLMO3, Olmo3Config, Olmo3ForCausalLM),
    (GPT_OSS, GptOssConfig, GptOssForCausalLM),
    (QWEN3_MOE, Qwen3MoeConfig, Qwen3MoeForCausalLM),
    (QWEN3_5, Qwen3_5TextConfig, Qwen3_5ForCausalLM),
]
SHAPES = {
    name: (settings, make_config, make_model)
    for group, make_config, make_model in CLASSES
    for name, settings in group.items()
}
NAMES = tuple(SHAPES)


def model_config(kind: str) -> Any:
    settings, make_config, make_model = SHAPES[kind]
    defaults = {"max_position_embeddings": 131072, "tie_word_embeddings": True}
    config = make_config(**{**defaults, **settings})
    config.architectures = [make_model.__name__]
    return config


def shape(kind: str) -> Any:
    """A model of a known shape; its weights do not matter to the clock."""
    return SHAPES[kind][2](model_config(kind))


def random_model(kind: str, device: torch.device, dtype: torch.dtype, **_: Any) -> Any:
    """Takes the arguments of `courtside.engines.loading.load_model`, which it may replace."""
    torch.manual_seed(SEED)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # 30 billion weights in float32 would not fit beside the cast
    try:
        with device:  # a CPU would take long for a billion random numbers
            return shape(kind).to(dtype).eval()
    finally:
        torch.set_default_dtype(default)


def random_engine(args: argparse.Namespace) -> LocalEngine:
    """As a student in training has it: bfloat16 autocast over float32 weights on a GPU. `args` has
    `device`, `model` and, as a rank or 0, `lora`."""
    device = torch.device(args.device)
    model = random_model(args.model, device, torch.float32)
    if args.lora:
        from peft import LoraConfig, get_peft_model

        settings = LoraConfig(task_type="CAUSAL_LM", r=args.lora, target_modules="all-linear")
        # As the student does: only weights that are stepped stay in float32.
        model = model.to(torch.bfloat16) if device.type == "cuda" else model
        get_peft_model(model, settings)
    return LocalEngine(
        model.eval(),
        SimpleNamespace(eos_token_id=0),
        name=args.model,
        autocast=torch.bfloat16 if device.type == "cuda" else None,
    )


def gradient_of_sampled(engine: LocalEngine, hidden_ND: Tensor, ids_N: Tensor) -> Tensor:
    """Of a loss on the sampled tokens, by the hidden states, as the student's step has it."""
    weight_VD, _ = engine.head.parameters()
    into = None
    if weight_VD.requires_grad:
        into = HeadGradient(weight_VD=torch.zeros_like(weight_VD, dtype=torch.float32))
    dtype = engine.autocast or weight_VD.dtype
    ones_N = torch.ones(len(hidden_ND), device=hidden_ND.device)
    loss = SampledTokenLoss(weight_N=ones_N, advantage_N=ones_N)
    result = fused_linear_divergence(
        Projection(hidden_ND=hidden_ND, weight_VD=weight_VD.detach().to(dtype)),
        None,
        HeadLossSpec(ids_N=ids_N, temperature_N=ones_N, sampled=(loss,)),
        head_gradient=into,
    )
    return result.hidden_gradient_ND.to(hidden_ND.dtype)
