"""Attention of all kinds: supported and exact, or scored separately with a reason."""

from __future__ import annotations

from copy import copy
from typing import Any

import pytest
import torch
from support.architectures import windowed
from support.tiny_model import tiny_model, tiny_tokenizer
from support.varlen import make_branch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Gemma2ForCausalLM

from courtside.engines.base import BranchRequest
from courtside.engines.forward.forward import probe_packing
from courtside.engines.generation.decode_probe import probe_decoding
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


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "mistral", "olmo3"])
def test_windowed_models_whose_eager_attention_was_asked_for(kind: str) -> None:
    """Gemma 2 needs it for its soft cap: without the cap it is scored in padded passes."""
    model = windowed(kind, attn_implementation="eager")
    engine = LocalEngine(model, tiny_tokenizer(), name=kind)
    assert engine.stateless_reason is None
    (scores,) = engine.score_branches([REQUEST])
    assert (scores.note is None) == (kind == "gemma2")
    check_against_plain_passes(model, scores)


@pytest.mark.skipif(
    not Gemma2ForCausalLM._supports_sdpa, reason="from 5.21 on transformers refuses it by itself"
)
def test_sdpa_without_the_soft_cap_of_the_model_is_detected() -> None:
    model = windowed("gemma2", attn_implementation="sdpa")
    problem = find_unsupported_attention(model)
    assert problem is not None and "leaves out its soft cap" in problem
    engine = LocalEngine(model, tiny_tokenizer(), name="gemma2")
    (scores,) = engine.score_branches([REQUEST])
    assert scores.note == problem
    check_against_plain_passes(model, scores)


def test_the_windows_matter_in_these_examples() -> None:
    model = windowed("qwen2")
    full = windowed("qwen2", layer_types=["full_attention"] * 4)
    full.load_state_dict(model.state_dict())
    logps = [
        LocalEngine(model, tiny_tokenizer(), name="qwen2").score_branches([REQUEST])[0]
        for model in (model, full)
    ]
    first, second = (scores.branches[0].logp_T for scores in logps)
    assert not torch.allclose(first, second, atol=1e-2)


@pytest.mark.parametrize("wrong", [4, 6, 0])
def test_a_window_that_the_attention_takes_for_another_is_detected(wrong: int) -> None:
    """Masks and plain passes have a window of 5; 0: none at all."""
    model = windowed("qwen3")
    for layer in model.model.layers[::2]:
        layer.self_attn.config = copy(layer.self_attn.config)
        layer.self_attn.config.layer_types = ["full_attention"] * 4
        layer.self_attn.sliding_window = wrong or None
    assert probe_kv_cache(model) is None  # masks have the window there
    assert str(probe_packing(model)).startswith("on a small example")
    assert str(probe_decoding(model)).startswith("on a small example")


def test_probes_see_windows_of_any_size_and_leave_them_as_they_were() -> None:
    model = windowed("qwen3", sliding_window=300)
    windows = [layer.self_attn.sliding_window for layer in model.model.layers]
    assert probe_packing(model) is None and probe_decoding(model) is None
    assert windows == [layer.self_attn.sliding_window for layer in model.model.layers]
    assert windows == [300, None, 300, None] and model.config.sliding_window == 300
    # What is wrong with a window shows although no example has 300 tokens.
    for layer in model.model.layers:
        layer.self_attn.sliding_window = 299 if layer.self_attn.sliding_window else None
    assert str(probe_packing(model)).startswith("on a small example")


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("bloom", {"n_head": 4, "n_layer": 2}, "no position ids"),
        ("llama4_text", {"num_local_experts": 2, "head_dim": 8, "attention_chunk_size": 8},
         "'chunked_attention'"),
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
