"""Gradient checkpointing by "auto": the estimate, and what is decided by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_runs import small_recipe
from support.tiny_model import tiny_model

from courtside.assemble import assemble
from courtside.engines.forward.batching import default_pass_tokens
from courtside.runtime import Runtime
from courtside.training.memory import (
    ACTIVATION_SHARE,
    activation_bytes_per_token,
    free_bytes,
    pending_bytes,
)

CPU = torch.device("cpu")


def assemble_with(folder: Path, free: int | None, /, **student: Any) -> Runtime:
    recipe = small_recipe(folder, folder, student={"model": str(folder), **student})
    return assemble(recipe, free=lambda device: free)


def checkpointing_notes(runtime: Runtime) -> list[str]:
    return [note for note in runtime.notes if "activations" in note]


def saved_bytes(model: Any, num_tokens: int) -> int:
    """What autograd saves for the backward pass of one sequence, each storage once."""
    storages: dict[int, int] = {}

    def record(x: torch.Tensor) -> torch.Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    ids = torch.arange(2, 2 + num_tokens)[None]
    with torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
        out = model.base_model(input_ids=ids, use_cache=False)
    assert out.last_hidden_state.requires_grad
    return sum(storages.values())


def test_the_estimate_is_near_what_plain_layers_save() -> None:
    """They save more than fused ones, so here it is a lower bound; tests/gpu has those."""
    model = tiny_model()
    saved = (saved_bytes(model, 192) - saved_bytes(model, 64)) / 128
    assert 0.4 * saved < activation_bytes_per_token(model, None) < 1.1 * saved


def test_the_estimate_follows_shapes_and_dtypes() -> None:
    model = tiny_model()
    config = model.config
    exact = activation_bytes_per_token(model, None)
    halved = activation_bytes_per_token(model, torch.bfloat16)
    residual = 2 * 4 * config.hidden_size * config.num_hidden_layers
    assert halved - residual == (exact - residual) // 2, "the residual stream stays float32"
    config.num_hidden_layers *= 2
    assert activation_bytes_per_token(model, None) == 2 * exact


def test_auto_decides_by_free_memory(tiny_folder: Path) -> None:
    student, tokens = assemble_with(tiny_folder, None).student, default_pass_tokens(CPU)
    assert not student.weights.uses_gradient_checkpointing
    needed = tokens * activation_bytes_per_token(student.weights.model, student.weights.autocast)
    pending = pending_bytes(student)
    enough = assemble_with(tiny_folder, int(1.001 * (pending + needed / ACTIVATION_SHARE)))
    assert not enough.student.weights.uses_gradient_checkpointing and not checkpointing_notes(
        enough
    )
    for free in (int(0.999 * (pending + needed / ACTIVATION_SHARE)), pending, 0):
        runtime = assemble_with(tiny_folder, free)
        assert (
            runtime.student.weights.uses_gradient_checkpointing
            and not runtime.engine.model.training
        )
        headroom = max(0, free - pending) / 2**30
        assert checkpointing_notes(runtime) == [
            f"gradient checkpointing is on: {tokens} tokens need {needed / 2**30:.3g} GiB of "
            f"activations, {headroom:.3g} GiB are left"
        ]


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({"train": {"micro_batch_tokens": 77}}, 77),
        ({"train": {"micro_batch_tokens": 77}, "rollout": {"max_new_tokens": 300}}, 300),
        ({"train": {"micro_batch_tokens": 1000}, "rollout": {"max_new_tokens": 300}}, "1,000"),
    ],
)
def test_it_counts_the_largest_micro_batch(
    changes: dict[str, Any], tokens: int | str, tiny_folder: Path
) -> None:
    runtime = assemble(small_recipe(tiny_folder, tiny_folder, **changes), free=lambda device: 0)
    (note,) = checkpointing_notes(runtime)
    assert note.startswith(f"gradient checkpointing is on: {tokens} tokens need")


@pytest.mark.parametrize("choice", [True, False])
def test_an_explicit_choice_asks_for_no_free_memory(choice: bool, tiny_folder: Path) -> None:
    def refuse(device: torch.device) -> int | None:
        raise AssertionError("the recipe has decided")

    student = {"model": str(tiny_folder), "gradient_checkpointing": choice}
    runtime = assemble(small_recipe(tiny_folder, tiny_folder, student=student), free=refuse)
    assert (
        runtime.student.weights.uses_gradient_checkpointing == choice
        and not checkpointing_notes(runtime)
    )


def test_a_cpu_saves_all_activations(tiny_folder: Path) -> None:
    assert free_bytes(CPU) is None
    runtime = assemble(small_recipe(tiny_folder, tiny_folder))
    assert runtime.recipe.student.gradient_checkpointing == "auto"
    assert not runtime.student.weights.uses_gradient_checkpointing


def test_a_model_without_checkpointing_gets_the_other_advice(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(LlamaForCausalLM, "supports_gradient_checkpointing", False)
    runtime = assemble_with(tiny_folder, 0)
    assert not runtime.student.weights.uses_gradient_checkpointing
    assert any(note.endswith("lower train.micro_batch_tokens") for note in runtime.notes)


def test_weight_copies_are_pending(tiny_folder: Path) -> None:
    def pending(**changes: Any) -> int:
        return pending_bytes(assemble(small_recipe(tiny_folder, **changes)).student)

    context = {"kind": "system", "text": "Be short."}
    live: dict[str, Any] = {"teacher": {"kind": "self", "weights": "live", "context": context}}
    student = assemble(small_recipe(tiny_folder, **live)).student
    size = sum(p.nbytes for p in student.weights.trained.values())
    assert pending(teacher={**live["teacher"], "weights": "ema"}) == pending(**live) + size
    extrapolated = [{"kind": "divergence", "extrapolate": 1.5}]
    assert pending(**live, losses=extrapolated) == pending(**live) + size
    bf16 = {"model": str(tiny_folder), "dtype": "bfloat16"}
    assert pending(**live, student=bf16) == pending(**live) + size, "two copies in half the bytes"
