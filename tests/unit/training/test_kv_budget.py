"""Keys and values that are held at once, by the size of a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import small_recipe

from courtside.assemble import assemble
from courtside.engines.loading import load_model
from courtside.training.memory.kv_budget import (
    DEFAULT_TOKENS,
    MAX_TOKENS,
    MIN_TOKENS,
    kv_bytes_per_token,
    kv_cache_tokens,
)
from courtside.training.weights import StudentWeights


def made(folder: Path, **parts: Any) -> tuple[Any, StudentWeights]:
    recipe = small_recipe(folder, folder, **parts)
    return recipe, StudentWeights(recipe.student, seed=0)


def test_a_place_is_what_a_cache_holds_for_a_token(tiny_folder: Path) -> None:
    _, weights = made(tiny_folder)
    out = weights.model(input_ids=torch.zeros(1, 5, dtype=torch.long), use_cache=True)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in out.past_key_values.layers)
    assert 5 * kv_bytes_per_token(weights.model, None) == held
    assert 10 * kv_bytes_per_token(weights.model, torch.bfloat16) == held


def test_half_of_what_is_left_down_to_a_power_of_two(tiny_folder: Path) -> None:
    recipe, weights = made(tiny_folder)
    teacher = load_model(str(tiny_folder), device=torch.device("cpu"), dtype=torch.float32)
    size = sum(p.nbytes for p in weights.model.parameters())
    held = 4 * size  # itself, a teacher as large, two moments
    room = 2 * kv_bytes_per_token(weights.model, weights.autocast)

    def asked(total: int) -> int:
        return kv_cache_tokens(recipe, weights, [teacher], total=total)

    assert asked(held + 65536 * room) == asked(held + 131071 * room) == 65536
    assert asked(held + 65536 * room - 1) == 32768
    assert asked(held) == asked(0) == MIN_TOKENS
    assert asked(held + 2 * MAX_TOKENS * room) == MAX_TOKENS


def test_copies_of_itself_are_counted(tiny_folder: Path) -> None:
    found = []
    for kind in ("live", "frozen"):
        recipe, weights = made(tiny_folder, teacher={
            "kind": "self", "weights": kind, "context": {"kind": "system", "text": "Well."},
        })  # fmt: skip
        size = sum(p.nbytes for p in weights.model.parameters())
        total = 3 * size + 2 * 65536 * kv_bytes_per_token(weights.model, weights.autocast)
        found.append(kv_cache_tokens(recipe, weights, [], total=total))
    assert found[0] == 65536 and found[1] < 65536


@pytest.mark.parametrize(("asked", "expected"), [("auto", DEFAULT_TOKENS), (1234, 1234)])
def test_engines_get_it(
    asked: Any, expected: int, tiny_folder: Path, tiny_teacher_folder: Path
) -> None:
    recipe = small_recipe(tiny_folder, tiny_teacher_folder, rollout={"kv_cache_tokens": asked})
    parts = assemble(recipe)
    assert parts.engine.max_batch_tokens == expected
    assert parts.teacher.teacher.engine.max_batch_tokens == expected
