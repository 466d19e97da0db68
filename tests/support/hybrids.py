"""Tiny models with recurrent or convolution states, alone and mixed with attention."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from support.tiny_model import tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from courtside.engines.base import SampleRequest, Sampling, Session
from courtside.engines.local import LocalEngine
from courtside.training.adapter_targets import find_bare_layers

COMMON: dict[str, Any] = {
    "vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "initializer_range": 0.15, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "head_dim": 8,
}  # fmt: skip
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1,
    "mamba_expand": 2, "mamba_chunk_size": 16,
}  # fmt: skip
CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2}
ALTERNATING = {"layer_types": ["linear_attention", "full_attention"] * 2}

KINDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"head_dim": 8, **DELTA},
    "qwen3_5_moe_text": {**EXPERTS, **DELTA},
    "qwen3_next": {**EXPERTS, **DELTA},
    "olmo_hybrid": {**DELTA, "linear_num_key_heads": 4},
    "granitemoehybrid": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16,
        "position_embedding_type": "rope", **ALTERNATING, **MAMBA2,
    },
    "lfm2": CONVOLUTIONS,
    "lfm2_moe": {**EXPERTS, **CONVOLUTIONS, "num_dense_layers": 1},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mamba", "mlp"], "head_dim": 8,
        "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1,
        "chunk_size": 16,
    },
    "falcon_h1": {"head_dim": 8, "mamba_d_ssm": 64, **MAMBA2},
    "jamba": {"num_experts": 2, "mamba_d_state": 8, "attn_layer_period": 4, "attn_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1, 3], **MAMBA2},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2, "mamba_d_state": 8,
        "mamba_ngroups": 1, "n_mamba_heads": 8, "chunk_size": 16, "num_mem_blocks": 1,
        "adapter_rank": 4, "num_key_value_heads": 4,
    },
    "mamba": {"state_size": 8},
    "falcon_mamba": {"state_size": 8},
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 16},
    "minimax": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "block_size": 16,
        **ALTERNATING,
    },
    "kimi_linear": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "linear_head_dim": 8, "linear_num_heads": 4, "kv_lora_rank": 8, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4, **ALTERNATING,
    },
    "rwkv": {"attention_hidden_size": 32, "context_length": 512},
}  # fmt: skip


def make_hybrid(kind: str, *, adapter: bool = False, **settings: Any) -> Any:
    """`adapter`: with LoRA on all linear layers."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**COMMON, **KINDS[kind], **settings})
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # ones would hide an error
            torch.nn.init.normal_(parameter, mean=float(parameter.detach().flatten()[0]), std=0.2)
    return add_adapter(model) if adapter else model


def add_adapter(model: Any) -> Any:
    torch.manual_seed(2)
    config = LoraConfig(
        r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM",
        exclude_modules=find_bare_layers(model) or None,
    )  # fmt: skip
    return get_peft_model(model, config).base_model.model


@cache
def hybrid_engine(kind: str, *, adapter: bool = False) -> LocalEngine:
    """Every seventh token ends an answer, so that rows leave their batch at different times."""
    model = make_hybrid(kind, adapter=adapter)
    model.generation_config.eos_token_id = list(range(1, 258, 7))
    return LocalEngine(model, tiny_tokenizer(), name=kind)


@torch.no_grad()
def plain_logp(model: Any, ids: tuple[int, ...], temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of all tokens but the first, of one pass over this sequence alone."""
    logits_LV = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0] / temperature
    return logits_LV[:-1].log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


# ── conversations ────────────────────────────────────────────────────────────────────────────────


def prompt(length: int, start: int = 0) -> tuple[int, ...]:
    return tuple(2 + (7 * i * i + 5 * start + i) % 250 for i in range(length))


PROMPTS = (*(prompt(3),) * 3, prompt(9, 1), prompt(9, 2), prompt(20, 3), prompt(70, 4))
"""A group, two of equal length, one longer than a chunk."""


def assert_plain(engine: LocalEngine, ids: tuple[int, ...], logp: tuple[float, ...]) -> None:
    """The log-probs of the last tokens are those of a pass over the sequence alone."""
    expected_T = plain_logp(engine.model, ids)[-len(logp) :]
    torch.testing.assert_close(torch.tensor(logp), expected_T, rtol=0, atol=5e-5)


def play_turns(engine: LocalEngine, session: Session, max_new_tokens: Sequence[int]) -> int:
    """Four turns of five conversations, in which one begins anew; each token's log-prob is that of
    a separate pass. Returns the number of tokens of all turns."""
    conversations: dict[int, tuple[int, ...]] = dict.fromkeys(range(5), ())
    num_tokens = 0
    for turn, rows in enumerate([[0, 1, 2, 3, 4], [0, 2, 3], [4, 1, 0], [3, 2, 1, 0, 4]]):
        if turn == 2:
            session.restart(1)
            conversations[1] = ()
        requests = []
        for row in rows:
            # In the first turn rows 0 and 3 are a group. The last token is not in the state yet.
            new = prompt(3 + 2 * ((row + turn) % 3), row % 3 + turn)
            new = conversations[row][-1:] + new
            conversations[row] = conversations[row][:-1] + new
            requests.append(SampleRequest(prompt_ids=new, seed=row + 10 * turn))
            num_tokens += len(new)
        samples = session.sample(rows, requests, Sampling(max_new_tokens=max_new_tokens[turn]))
        for row, sample in zip(rows, samples, strict=True):
            conversations[row] += sample.token_ids
            num_tokens += len(sample.token_ids)
            assert_plain(engine, conversations[row], sample.logp)
    return num_tokens
