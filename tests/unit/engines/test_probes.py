"""Attention of all kinds: supported and exact, or scored separately with a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tiny_model import tiny_model, tiny_tokenizer
from support.varlen import make_branch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from courtside.engines.base import BranchRequest
from courtside.engines.local import LocalEngine
from courtside.engines.probes import find_unsupported_attention, probe_kv_cache

TRUNK = tuple(3 + (5 * i * i + i) % 250 for i in range(30))
BRANCHES = (
    make_branch(30, (5, 6, 7, 8, 9, 10, 11)),
    make_branch(17, (9,) * 9),
    make_branch(17, (5, 6, 7)),
    make_branch(0, (4, 5, 6, 7, 8, 9, 3)),
)
REQUEST = BranchRequest(token_ids=TRUNK, branches=BRANCHES)


def build(kind: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    defaults = {
        "vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    config = AutoConfig.for_model(kind, **{**defaults, **settings})
    return AutoModelForCausalLM.from_config(config).eval()


def check_against_plain_passes(model: Any, scores: Any) -> None:
    for branch, branch_scores in zip(BRANCHES, scores.branches, strict=True):
        ids = torch.tensor([TRUNK[: branch.splice] + branch.token_ids])
        with torch.no_grad():
            logp_LV = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
        expected_T: Tensor = logp_LV[branch.splice : -1].gather(
            -1, ids[0, branch.splice + 1 :, None]
        )
        torch.testing.assert_close(branch_scores.logp_T, expected_T[:, 0], rtol=1e-4, atol=1e-4)


MIXED = {"sliding_window": 5, "head_dim": 8, "use_sliding_window": True,
         "layer_types": ["sliding_attention", "full_attention"] * 2}  # fmt: skip
UNIFORM = {"sliding_window": 5}
WINDOWED = {
    **dict.fromkeys(
        ["cohere2", "exaone4", "gemma3_text", "ministral", "olmo3", "qwen2", "qwen3", "smollm3"],
        MIXED,
    ),
    **dict.fromkeys(["mistral", "phi3", "starcoder2"], UNIFORM),
    "gemma2": {**MIXED, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gpt_oss": {**MIXED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {**UNIFORM, "num_local_experts": 2},
}


def supports_sdpa(kind: str) -> bool:
    """Not gpt-oss; and from transformers 5.21 on no model whose attention has a soft cap."""
    model = AutoModelForCausalLM._model_mapping[type(AutoConfig.for_model(kind))]
    return bool(model._supports_sdpa)


@pytest.mark.parametrize(
    ("kind", "attention"),
    [
        (kind, attention)
        for kind in sorted(WINDOWED)
        for attention in ("sdpa", "eager")
        if attention == "eager" or supports_sdpa(kind)  # transformers itself refuses others
    ],
)
def test_branches_of_windowed_models_equal_plain_passes(kind: str, attention: str) -> None:
    model = build(kind, **WINDOWED[kind], attn_implementation=attention)
    assert probe_kv_cache(model) == "it has sliding-window attention"
    engine = LocalEngine(model, tiny_tokenizer(), name=kind)
    (scores,) = engine.score_branches([REQUEST])
    assert scores.note == engine.stateless_reason == "it has sliding-window attention"
    check_against_plain_passes(model, scores)


def test_the_windows_matter_in_these_examples() -> None:
    windowed = build("qwen2", **MIXED)
    full = build("qwen2", **{**MIXED, "layer_types": ["full_attention"] * 4})
    full.load_state_dict(windowed.state_dict())
    assert find_unsupported_attention(full) is None
    logps = [
        LocalEngine(model, tiny_tokenizer(), name="qwen2").score_branches([REQUEST])[0]
        for model in (windowed, full)
    ]
    first, second = (scores.branches[0].logp_T for scores in logps)
    assert not torch.allclose(first, second, atol=1e-2)


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4, "original_max_position_embeddings": 16}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("bloom", {"n_head": 4, "n_layer": 2}, "no position ids"),
        ("llama4_text", {"num_local_experts": 2, "head_dim": 8, "attention_chunk_size": 8},
         "'chunked_attention'"),
        ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}, "'conv'"),
        ("phi3", {"sliding_window": None, "rope_parameters": LONGROPE}, "'longrope'"),
        ("gpt_neo", {"num_layers": 2, "num_heads": 4, "window_size": 5, "num_hidden_layers": 2,
                     "attention_types": [[["global", "local"], 1]]}, "window_size"),
        ("llama", {"attn_implementation": "flex_attention"}, "'flex_attention'"),
    ],
)  # fmt: skip
def test_unsupported_attention_is_scored_separately_and_reported(
    kind: str, settings: dict[str, Any], reason: str
) -> None:
    model = build(kind, **settings)
    problem = find_unsupported_attention(model)
    assert problem is not None and reason in problem
    if kind in ("llama", "llama4_text"):
        return  # no engine runs them: flex attention needs a compiler, the other has no base_model
    engine = LocalEngine(model, tiny_tokenizer(), name=kind)
    (scores,) = engine.score_branches([REQUEST])
    assert scores.note == problem
    check_against_plain_passes(model, scores)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("ignored", ["attention_mask", "position_ids", "past_key_values"])
def test_a_model_that_ignores_an_argument_is_detected(ignored: str, attention: str) -> None:
    model = tiny_model()
    model.set_attn_implementation(attention)
    assert probe_kv_cache(model) is None

    def drop(_: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return args, {k: v for k, v in kwargs.items() if k != ignored}

    model.base_model.register_forward_pre_hook(drop, with_kwargs=True)
    problem = probe_kv_cache(model)
    assert problem is not None and "small example" in problem


def test_probes_run_without_dropout_and_restore_training_mode() -> None:
    model = tiny_model()
    for layer in model.base_model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()
    model.base_model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    assert probe_kv_cache(model) is None
    assert modes == [module.training for module in model.modules()]
