"""Engines that decode with and without continuous batching on a CPU, and how to compare them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.tiny_model import tiny_model, tiny_tokenizer

from courtside.engines.base import SampleRequest
from courtside.engines.local import LocalEngine
from courtside.types import Sample

REQUESTS = [
    SampleRequest(prompt_ids=prompt, seed=seed)
    for prompt in ((0, 5, 9), (0, 7, 7, 7, 30, 31), (0, 40))
    for seed in (1, 2, 3)
]


def make_engine(*, continuous: bool, model: Any = None, **options: Any) -> LocalEngine:
    """A tiny model, by default in float64, where rounding cannot flip a sample."""
    engine = LocalEngine(model or tiny_model().double(), tiny_tokenizer(), name="tiny", **options)
    engine.uses_continuous_batching = continuous
    return engine


def assert_equal_samples(
    samples: Sequence[Sample], expected: Sequence[Sample], *, atol: float = 1e-5
) -> None:
    assert [s.token_ids for s in samples] == [s.token_ids for s in expected]
    assert [s.stop for s in samples] == [s.stop for s in expected]
    for sample, reference in zip(samples, expected, strict=True):
        assert sample.logp == pytest.approx(reference.logp, abs=atol)
