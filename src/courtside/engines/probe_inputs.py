"""Example inputs of probes, and what a model raises that cannot run them."""

from __future__ import annotations

from typing import Any

PROBE_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip
"""What a model raises that cannot run an example; some models of transformers assert."""


def probe_ids(model: Any, length: int, seed: int) -> list[int]:
    """Other ids for each seed, at most as many as the model has positions."""
    vocab_size = model.get_input_embeddings().weight.shape[0]
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or length
    return [1 + (7 * i * i + 5 * seed + i) % (vocab_size - 1) for i in range(min(length, longest))]
