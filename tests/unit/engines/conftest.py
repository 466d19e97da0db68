from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from courtside.engines.local import LocalEngine


@pytest.fixture
def make_engine() -> Callable[..., LocalEngine]:
    """An engine over a tiny model in float64, where rounding cannot flip a draw."""

    def make(
        model: Any = None, *, eos: tuple[int, ...] = (1,), seed: int = 0, **options: Any
    ) -> LocalEngine:
        from support.tiny_model import tiny_model, tiny_tokenizer

        model = model if model is not None else tiny_model(seed=seed)
        model.generation_config.eos_token_id = list(eos)
        return LocalEngine(model.double(), tiny_tokenizer(), name="tiny", **options)

    return make
