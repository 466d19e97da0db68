"""Models whose cache does not take a padded batch decode in separate rows or without a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.hybrids import plain_logp
from support.kind_checks import make_ids
from support.model_kinds import ModelKind, build_model
from support.tiny_model import tiny_model, tiny_tokenizer

from courtside.engines.base import SampleRequest, Sampling
from courtside.engines.generation.eager_probe import choose_decode_path
from courtside.engines.generation.left_padded import LeftPaddedBatch
from courtside.engines.local import LocalEngine
from courtside.engines.probes import find_batch_problem

PROMPTS = [make_ids(n, n) for n in (3, 17, 3, 8)]
REQUESTS = [SampleRequest(prompt_ids=ids, seed=seed) for seed, ids in enumerate(PROMPTS)]


def make_engine(kind: str, **settings: Any) -> LocalEngine:
    model = build_model(ModelKind(model_type=kind, settings=settings))
    return LocalEngine(model, tiny_tokenizer(), name=kind)


@pytest.mark.parametrize(
    ("kind", "path", "note"),
    [
        ("gpt_neo", "left_padded", "passes are padded"),
        ("marian", "separate_rows", "samples one row at a time"),
        ("openai-gpt", "uncached", "samples without a cache"),
    ],
)
def test_the_first_path_that_is_right_is_taken(kind: str, path: str, note: str) -> None:
    engine = make_engine(kind)
    assert engine.decode_path[0] == path
    assert any(note in text for text in engine.notes())
    samples = engine.sample(REQUESTS, Sampling(max_new_tokens=9))
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        expected_T = plain_logp(engine.model, prompt + sample.token_ids)[len(prompt) - 1 :]
        torch.testing.assert_close(torch.tensor(sample.logp), expected_T, rtol=0, atol=1e-4)


def test_all_paths_sample_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine("gpt_neo")
    sampling = Sampling(max_new_tokens=20)
    engine.eos_ids = frozenset(range(30))
    expected = [sample.token_ids for sample in engine.sample(REQUESTS, sampling)]
    assert len({len(ids) for ids in expected}) > 1, "rows leave the batch one after another"
    for path in ("separate_rows", "uncached"):
        monkeypatch.setattr(engine, "decode_path", (path, "asked for"))
        assert [s.token_ids for s in engine.sample(REQUESTS, sampling)] == expected


def test_a_model_that_ignores_the_mask_is_not_padded() -> None:
    model = tiny_model()

    def drop(_: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return args, {k: v for k, v in kwargs.items() if k != "attention_mask"}

    assert choose_decode_path(model, pad_id=0) == ("left_padded", None)
    model.base_model.register_forward_pre_hook(drop, with_kwargs=True)
    path, reason = choose_decode_path(model, pad_id=0)
    assert path == "separate_rows" and reason is not None and "small example" in reason


def test_a_wrong_cache_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it loses its first position."""
    advance = LeftPaddedBatch.advance

    def forget(self: LeftPaddedBatch, next_ids: Any) -> Any:
        for layer in self._cache.layers:
            layer.keys[:, :, :1] = 0
        return advance(self, next_ids)

    monkeypatch.setattr(LeftPaddedBatch, "advance", forget)
    path, reason = choose_decode_path(tiny_model(), pad_id=0)
    assert path == "uncached" and reason is not None


def test_blocks_longer_than_a_probe_are_decided_by_the_config() -> None:
    settings = {"index_topk": 2048, "num_hidden_layers": 1}
    model = build_model(ModelKind(model_type="deepseek_v32", settings=settings))
    assert "index_topk" in str(find_batch_problem(model))
    engine = LocalEngine(model, tiny_tokenizer(), name="sparse")
    assert "index_topk" in str(engine.passes.separate_reason)
    assert engine.decode_path[0] == "separate_rows"
    assert any("sequences pass one at a time" in note for note in engine.notes())
