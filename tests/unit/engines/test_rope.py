"""RoPE whose factors depend on the length: one set of factors for all sequences of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.hybrids import plain_logp
from support.kind_checks import Checks, largest_error, make_ids
from support.model_kinds import DYNAMIC, LONGROPE, ModelKind, build_model
from support.tiny_model import tiny_tokenizer
from transformers import AutoConfig

from courtside.engines.base import SampleRequest, Sampling, ScoreRequest
from courtside.engines.loading import find_context_length
from courtside.engines.local import LocalEngine
from courtside.engines.rope import find_original_length, fix_rope, is_rope_fixed
from courtside.errors import ModelError

ORIGINAL = 48
SETTINGS = {"sliding_window": None, "original_max_position_embeddings": ORIGINAL}
CHECKS = ("sampling", "scoring", "sessions", "tree_scoring", "gradient")


def phi3(factors: str | None = None) -> Any:
    """`factors`: those of all lengths, of a model whose RoPE does not depend on the length."""
    rope = LONGROPE if factors is None else LONGROPE | dict.fromkeys(
        ("short_factor", "long_factor"), LONGROPE[factors]
    )  # fmt: skip
    return build_model(ModelKind(model_type="phi3", settings={**SETTINGS, "rope_parameters": rope}))


def llama_with_dynamic_rope() -> Any:
    settings = {"max_position_embeddings": ORIGINAL, "rope_parameters": DYNAMIC}
    return build_model(ModelKind(model_type="llama", settings=settings))


def make_engine(model: Any, context_length: int | None = None) -> LocalEngine:
    return LocalEngine(model, tiny_tokenizer(), name="rope", context_length=context_length)


def score(engine: LocalEngine, *sequences: tuple[int, ...]) -> list[torch.Tensor]:
    requests = [
        ScoreRequest(token_ids=x, scored=(False, *(True,) * (len(x) - 1))) for x in sequences
    ]
    return [scores.logp_T for scores in engine.score(requests)]


def test_transformers_takes_the_factors_from_the_batch() -> None:
    """What is worked around here; if this fails, `rope.py` is no longer needed."""
    model = phi3()
    short, long = make_ids(20, 0), make_ids(ORIGINAL + 10, 1)
    padded = torch.tensor([short + (0,) * (len(long) - len(short)), long])
    with torch.no_grad():
        logp_LV = (
            model(input_ids=padded, use_cache=False).logits[0, : len(short) - 1].log_softmax(-1)
        )
    in_batch_T = logp_LV.gather(-1, torch.tensor(short[1:])[:, None])[:, 0]
    assert largest_error(in_batch_T, plain_logp(model, short)) > 0.1


@pytest.mark.parametrize("factors", ["short_factor", "long_factor"])
def test_all_that_an_engine_computes_has_one_set_of_factors(factors: str) -> None:
    """Sequences on both sides of the original length in one batch, a session that crosses it."""
    model, plain = phi3(), phi3(factors)
    engine = make_engine(model, 128 if factors == "long_factor" else None)
    assert engine.context_length == (128 if factors == "long_factor" else ORIGINAL)
    checks = Checks(model, plain, engine)
    assert max(checks.lengths) + 12 > ORIGINAL or factors == "short_factor"
    assert engine.passes.padding_reason is None and engine.stateless_reason is None
    for name in CHECKS:
        assert getattr(checks, name)() < 1e-4, name


def test_these_factors_are_those_of_plain_passes_of_that_length() -> None:
    short, long = make_ids(ORIGINAL, 0), make_ids(ORIGINAL + 1, 1)
    for ids, context_length in ((short, None), (long, 128)):
        (logp_T,) = score(make_engine(phi3(), context_length), ids)
        assert largest_error(logp_T, plain_logp(phi3(), ids)) < 1e-5
    (other_T,) = score(make_engine(phi3(), 128), short)
    assert largest_error(other_T, plain_logp(phi3(), short)) > 0.1


def test_dynamic_factors_are_those_of_the_context_length() -> None:
    longest, other = make_ids(96, 0), make_ids(10, 1)
    engine = make_engine(llama_with_dynamic_rope(), 96)
    expected_T = plain_logp(llama_with_dynamic_rope(), longest)
    logp_T, _ = score(engine, longest, other)
    assert largest_error(logp_T, expected_T) < 1e-5
    assert largest_error(score(engine, longest[:40])[0], expected_T[:39]) < 1e-5
    assert largest_error(plain_logp(llama_with_dynamic_rope(), longest[:40]), expected_T[:39]) > 0.1


def test_samples_that_cross_the_original_length_are_scored_alike() -> None:
    engine = make_engine(phi3(), 128)
    requests = [SampleRequest(prompt_ids=make_ids(n, n), seed=n) for n in (ORIGINAL - 8, 5)]
    samples = engine.sample(requests, Sampling(max_new_tokens=24))
    assert len(requests[0].prompt_ids + samples[0].token_ids) > ORIGINAL
    scored = score(
        engine, *(r.prompt_ids + s.token_ids for r, s in zip(requests, samples, strict=True))
    )
    for request, sample, logp_T in zip(requests, samples, scored, strict=True):
        expected_T = logp_T[len(request.prompt_ids) - 1 :]
        assert largest_error(torch.tensor(sample.logp), expected_T) < 1e-5


def test_longer_sequences_are_refused() -> None:
    with pytest.raises(ModelError, match=r"49 tokens do not fit the context .* \(48\)"):
        score(make_engine(phi3()), make_ids(ORIGINAL + 1, 0))


def test_more_than_the_models_positions_is_refused() -> None:
    with pytest.raises(ModelError, match=r"context_length = 300: .* 256 positions"):
        make_engine(phi3(), 300)


def test_one_model_has_one_context_length() -> None:
    model = phi3()
    make_engine(model, 128)
    make_engine(model, 128)
    with pytest.raises(ModelError, match=r"for 128 tokens .* of 48: give student and teacher"):
        make_engine(model)


def test_a_model_with_a_rule_of_its_own_keeps_to_its_original_length() -> None:
    rope = LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.3}
    kind = ModelKind(
        model_type="phimoe", settings={"rope_parameters": rope, "sliding_window": None}
    )
    engine = make_engine(build_model(kind))
    assert engine.context_length == ORIGINAL and not is_rope_fixed(engine.model)
    assert "RoPE" in str(engine.stateless_reason)
    with pytest.raises(ModelError, match="change after 48 tokens and cannot be fixed"):
        make_engine(build_model(kind), 128)


def test_other_kinds_of_rope_are_left_alone() -> None:
    model = build_model(ModelKind(model_type="llama"))
    assert find_original_length(model.config) is None
    fix_rope(model, 17)
    assert is_rope_fixed(model) and not hasattr(model.model.rotary_emb, "courtside_context_length")
    assert make_engine(model).context_length == 256


def test_the_context_length_is_known_without_weights() -> None:
    config = phi3().config
    assert find_context_length(config) == ORIGINAL
    assert find_context_length(config, 200) == 200
    config = AutoConfig.for_model("llama", max_position_embeddings=64, rope_parameters=DYNAMIC)
    assert find_context_length(config) == 64 and find_context_length(config, 128) == 128


def test_a_recipe_decides_the_context_length(tmp_path: Path) -> None:
    from support.small_runs import small_recipe

    from courtside.assemble import assemble

    phi3().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    folder = str(tmp_path / "model")
    recipe = small_recipe(
        tmp_path, student={"model": folder, "context_length": 100},
        teacher={"kind": "model", "model": folder, "context_length": 120},
    )  # fmt: skip
    parts = assemble(recipe)
    assert parts.engine.context_length == 100
    assert parts.teacher.teacher.engine.context_length == 120  # type: ignore[union-attr]
