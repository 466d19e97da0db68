"""The KV-cache budget by the memory of a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import windowed
from support.hybrids import hybrid_engine
from support.small_runs import small_recipe

from courtside.assemble import assemble
from courtside.engines.loading import load_model
from courtside.training.kv_budget import (
    DEFAULT_TOKENS,
    MAX_TOKENS,
    MIN_TOKENS,
    kv_bytes_per_token,
    kv_cache_tokens,
)
from courtside.training.weights import StudentWeights


def make_student(folder: Path, **parts: Any) -> tuple[Any, StudentWeights]:
    recipe = small_recipe(folder, folder, **parts)
    return recipe, StudentWeights(recipe.student, seed=0)


def test_bytes_per_token_are_those_of_a_cache(tiny_folder: Path) -> None:
    _, weights = make_student(tiny_folder)
    out = weights.model(input_ids=torch.zeros(1, 5, dtype=torch.long), use_cache=True)
    cache_bytes = sum(
        layer.keys.nbytes + layer.values.nbytes for layer in out.past_key_values.layers
    )
    assert 5 * kv_bytes_per_token(weights.model, None) == cache_bytes
    assert 10 * kv_bytes_per_token(weights.model, torch.bfloat16) == cache_bytes


def test_layers_that_differ_or_share_the_cache_of_others_are_counted_one_by_one() -> None:
    model = windowed("gemma4_text")
    out = model(input_ids=torch.zeros(1, 3, dtype=torch.long), use_cache=True)
    # Layers that read the cache of others: uninitialized, or, since transformers 5.23, empty.
    layers = [x for x in out.past_key_values.layers if getattr(x, "keys", None) is not None]
    cache_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    assert len(layers) == 2 and 3 * kv_bytes_per_token(model, None) == cache_bytes


@pytest.mark.parametrize("kind", ["qwen3_next", "nemotron_h", "falcon_h1", "lfm2", "mamba"])
def test_layers_without_keys_and_values_are_not_counted(kind: str) -> None:
    """Where no layer has any, a token counts as two hidden states in each."""
    engine = hybrid_engine(kind)
    passes = engine.state_passes
    assert passes is not None
    ((row, _),) = passes.extend([(None, range(2, 12))], max_tokens=10)
    per_token = kv_bytes_per_token(engine.model, None)
    state_bytes = passes.layout.num_bytes(row, kv=False)
    assert passes.layout.num_bytes(row, kv=True) == (0 if kind == "mamba" else 10 * per_token)
    assert kind != "mamba" or per_token == 2 * 4 * 32 * 4
    assert engine.capabilities.row_state_tokens == -(-state_bytes // per_token) > 0


def test_half_of_the_remaining_memory_down_to_a_power_of_two(tiny_folder: Path) -> None:
    recipe, weights = make_student(tiny_folder)
    teacher = load_model(str(tiny_folder), device=torch.device("cpu"), dtype=torch.float32)
    size = sum(p.nbytes for p in weights.model.parameters())
    fixed_bytes = 4 * size  # the student, a teacher of its size, two moments
    per_token = 2 * kv_bytes_per_token(weights.model, weights.autocast)

    def budget(total: int) -> int:
        return kv_cache_tokens(recipe, weights, [teacher], total=total)

    assert (
        budget(fixed_bytes + 65536 * per_token) == budget(fixed_bytes + 131071 * per_token) == 65536
    )
    assert budget(fixed_bytes + 65536 * per_token - 1) == 32768
    assert budget(fixed_bytes) == budget(0) == MIN_TOKENS
    assert budget(fixed_bytes + 2 * MAX_TOKENS * per_token) == MAX_TOKENS


def test_weight_copies_are_counted(tiny_folder: Path) -> None:
    budgets = []
    for kind in ("live", "frozen"):
        recipe, weights = make_student(tiny_folder, teacher={
            "kind": "self", "weights": kind, "context": {"kind": "system", "text": "Well."},
        })  # fmt: skip
        size = sum(p.nbytes for p in weights.model.parameters())
        total = 3 * size + 2 * 65536 * kv_bytes_per_token(weights.model, weights.autocast)
        budgets.append(kv_cache_tokens(recipe, weights, [], total=total))
    assert budgets[0] == 65536 and budgets[1] < 65536


@pytest.mark.parametrize(("setting", "expected"), [("auto", DEFAULT_TOKENS), (1234, 1234)])
def test_engines_get_the_budget(
    setting: Any, expected: int, tiny_folder: Path, tiny_teacher_folder: Path
) -> None:
    recipe = small_recipe(tiny_folder, tiny_teacher_folder, rollout={"kv_cache_tokens": setting})
    parts = assemble(recipe)
    assert parts.engine.max_batch_tokens == expected
    assert parts.teacher.teacher.engine.max_batch_tokens == expected
