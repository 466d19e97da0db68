"""Branches on other kinds of attention: exactly right, or a pass each and a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from courtside.engines.base import BranchRequest
from courtside.engines.forward import padded_tree_scoring as module
from courtside.engines.forward.padded_tree_scoring import (
    branch_hidden,
    branching_problem,
    trunk_cache,
)
from courtside.engines.local import LocalEngine
from courtside.engines.probes import WINDOWED, find_unsupported_attention, windows_of
from courtside.engines.stateless import score_branches_separately
from courtside.errors import ModelError
from courtside.types import Branch

TRUNK = tuple(3 + (5 * i * i + i) % 250 for i in range(30))


def branch(splice: int, ids: tuple[int, ...]) -> Branch:
    scored = (False,) + (True,) * (len(ids) - 1)
    return Branch(trajectory="t", turn=1, splice=splice, token_ids=ids, scored=scored)


BRANCHES = (
    branch(30, (5, 6, 7, 8, 9, 10, 11)),
    branch(17, (9,) * 9),
    branch(17, (5, 6, 7)),
    branch(0, (4, 5, 6, 7, 8, 9, 3)),
)
REQUEST = BranchRequest(token_ids=TRUNK, branches=BRANCHES)


def build(kind: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    usual = {
        "vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    config = AutoConfig.for_model(kind, **{**usual, **settings})
    return AutoModelForCausalLM.from_config(config).eval()


MIXED = {"sliding_window": 5, "head_dim": 8, "use_sliding_window": True,
         "layer_types": ["sliding_attention", "full_attention"] * 2}  # fmt: skip
OWN = {
    "gpt_oss": {**MIXED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {**MIXED, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    **{kind: {"sliding_window": 5} for kind in ("mistral", "phi3", "starcoder2")},
}


EACH = [
    (kind, attention)
    for kind in sorted(WINDOWED)
    for attention in ("sdpa", "eager")
    if (kind, attention) != ("gpt_oss", "sdpa")  # transformers itself refuses that
]


@pytest.mark.parametrize(("kind", "attention"), EACH)
def test_windows_are_exactly_those_of_a_pass_for_each_branch(kind: str, attention: str) -> None:
    model = build(kind, **OWN.get(kind, MIXED), attn_implementation=attention)
    assert windows_of(model)["sliding_attention"] == 5
    engine = LocalEngine(model, tiny_tokenizer(), name=kind)
    (one,) = engine.score_branches([REQUEST], want="hidden")
    assert one.note is None
    (other,) = score_branches_separately(engine, [REQUEST], want="hidden")
    for x, y in zip(one.branches, other.branches, strict=True):
        torch.testing.assert_close(x.logp_T, y.logp_T, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(x.hidden_TD, y.hidden_TD, rtol=1e-4, atol=1e-4)


def test_the_windows_matter_here(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LocalEngine(build("qwen2", **MIXED), tiny_tokenizer(), name="qwen2")
    (right,) = engine.score_branches([REQUEST])
    kinds = {"sliding_attention": None, "full_attention": None}
    monkeypatch.setattr(module, "windows_of", lambda model: kinds)
    (wrong,) = engine.score_branches([REQUEST])
    assert not torch.allclose(right.branches[0].logp_T, wrong.branches[0].logp_T, atol=1e-2)


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4, "original_max_position_embeddings": 16}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "settings", "why"),
    [
        ("bloom", {"n_head": 4, "n_layer": 2}, "positions cannot be given"),
        ("llama4_text", {"num_local_experts": 2, "head_dim": 8, "attention_chunk_size": 8},
         "'chunked_attention'"),
        ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}, "'conv'"),
        ("mixtral", {"num_local_experts": 2, "sliding_window": 5}, "'mixtral' are untested"),
        ("phi3", {"sliding_window": None, "rope_parameters": LONGROPE}, "'longrope'"),
        ("gpt_neo", {"num_layers": 2, "num_heads": 4, "window_size": 5, "num_hidden_layers": 2,
                     "attention_types": [[["global", "local"], 1]]}, "window_size"),
        ("llama", {"attn_implementation": "flex_attention"}, "'flex_attention'"),
    ],
)  # fmt: skip
def test_what_cannot_share_a_trunk_takes_a_pass_each_and_says_so(
    kind: str, settings: dict[str, Any], why: str
) -> None:
    model = build(kind, **settings)
    reason = find_unsupported_attention(model)
    assert reason is not None and why in reason
    with pytest.raises(ModelError, match=rf"{type(model).__name__}.*score_branches_separately"):
        branch_hidden(model, [], [], [])
    if kind in ("llama", "llama4_text"):
        return  # no engine runs them: flex attention wants a compiler, the other has no base_model
    engine = LocalEngine(model, tiny_tokenizer(), name=kind)
    (found,) = engine.score_branches([REQUEST])
    assert found.note == reason
    for b, scores in zip(BRANCHES, found.branches, strict=True):
        ids = torch.tensor([TRUNK[: b.splice] + b.token_ids])
        with torch.no_grad():
            logp_LV = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
        expected = logp_LV[b.splice : -1].gather(-1, ids[0, b.splice + 1 :, None])[:, 0]
        torch.testing.assert_close(scores.logp_T, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ignored", ["attention_mask", "position_ids", "past_key_values"])
def test_a_model_that_ignores_what_it_is_told_is_found_out(ignored: str) -> None:
    model = tiny_model()
    assert branching_problem(model) is None

    def drop(_: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return args, {k: v for k, v in kwargs.items() if k != ignored}

    model.base_model.register_forward_pre_hook(drop, with_kwargs=True)
    problem = branching_problem(model)
    assert problem is not None and "small example" in problem


def test_a_cache_that_forgot_positions_is_refused() -> None:
    model = build("mistral", sliding_window=5)
    ids = torch.tensor([TRUNK])
    out = model.base_model(input_ids=ids, use_cache=True)
    with pytest.raises(ModelError, match=r"trunk_cache\(\)"):
        branch_hidden(model, out.past_key_values, [30], [BRANCHES])
    cache = trunk_cache()
    model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
    branch_hidden(model, cache, [30], [BRANCHES])
