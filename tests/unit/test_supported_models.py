"""docs/supported-models.md is true: small models of each type against plain transformers.

Recurrent and hybrid types are compared in `engines/test_recurrent_session.py`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hybrids import KINDS
from support.tiny_model import tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from courtside.engines.base import SampleRequest, Sampling, ScoreRequest
from courtside.engines.local import LocalEngine

PAGE = Path(__file__).resolve().parents[2] / "docs" / "supported-models.md"
COMMON: dict[str, Any] = {
    "vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "head_dim": 8,
}  # fmt: skip
FAST: dict[str, dict[str, Any]] = {
    "cohere": {},
    "deepseek_v3": {
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 16, "num_key_value_heads": 4,
    },
    "gemma": {"head_dim": 8},
    "glm": {"head_dim": 8},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "gpt_neox": {},
    "granite": {},
    "llama": {},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "olmo2": {},
    "phi": {"num_key_value_heads": 4},
    "phi3": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": EXPERTS,
    "smollm3": {"use_sliding_window": False},
}  # fmt: skip
PROMPTS = tuple(tuple(range(5, 5 + length)) for length in (3, 9, 14))


def make_engine(kind: str, settings: dict[str, Any]) -> LocalEngine:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**COMMON, **settings})
    model = AutoModelForCausalLM.from_config(config).eval()
    return LocalEngine(model, tiny_tokenizer(), name=kind)


@torch.no_grad()
def plain_logp(engine: LocalEngine, ids: tuple[int, ...]) -> torch.Tensor:
    """Log-probs of all tokens but the first, of one pass over this sequence alone."""
    logits_LV = engine.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    return logits_LV[:-1].log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


def sample(engine: LocalEngine) -> None:
    requests = [SampleRequest(prompt_ids=ids, seed=seed) for seed, ids in enumerate(PROMPTS)]
    samples = engine.sample(requests, Sampling(max_new_tokens=5))
    for prompt, answer in zip(PROMPTS, samples, strict=True):
        expected_T = plain_logp(engine, prompt + answer.token_ids)[len(prompt) - 1 :]
        torch.testing.assert_close(torch.tensor(answer.logp), expected_T, rtol=0, atol=1e-4)


def score(engine: LocalEngine) -> None:
    requests = [ScoreRequest(token_ids=x, scored=(False, *(True,) * (len(x) - 1))) for x in PROMPTS]
    for ids, scores in zip(PROMPTS, engine.score(requests), strict=True):
        torch.testing.assert_close(
            scores.logp_T.float(), plain_logp(engine, ids), rtol=0, atol=1e-4
        )


@pytest.mark.parametrize("kind", FAST)
def test_fast_types_take_every_fast_path(kind: str) -> None:
    engine = make_engine(kind, FAST[kind])
    sample(engine)
    score(engine)
    assert engine.passes.padding_reason is None and engine.passes.unshared_reason is None
    assert engine.stateless_reason is None and engine.separate_branches_reason is None


def test_the_page_lists_these_types() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for title, kinds in (("all fast paths", FAST), ("recurrent and hybrid", KINDS)):
        (row,) = re.findall(rf"^\| {title} \| (.+?) \|", page, re.M)
        assert set(re.findall(r"`(\w+)`", row)) == kinds.keys()
