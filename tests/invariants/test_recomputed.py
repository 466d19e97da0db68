"""Stored and recomputed activations (gradient checkpointing) give the same update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import qwen
from support.small_runs import small_recipe
from support.tiny_model import tiny_tokenizer

from courtside.api import train
from courtside.assemble import assemble
from courtside.report.folder.folder import RunFolder
from courtside.runtime import Runtime
from courtside.types import Update

PLENTY = 2**50


@pytest.fixture(scope="module")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    qwen().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def stepped(recipe: Any, free: int) -> tuple[Runtime, list[Update]]:
    parts = assemble(recipe, free=lambda device: free)
    assert parts.student.weights.uses_gradient_checkpointing == (free != PLENTY)
    updates = []
    for step in range(2):
        scored = parts.teacher(parts.rollout(parts.tasks.batch(step, 2), step))
        updates.append(parts.student.step(step, scored))
    return parts, updates


@pytest.mark.parametrize(
    "student",
    [
        {}, {"dtype": "bfloat16"}, {"lora": {"rank": 2, "dropout": 0.2}},
        {"lora": {"rank": 2}, "dtype": "bfloat16"},
    ],
    ids=["all weights", "rounded", "dropout", "rounded lora"],
)  # fmt: skip
def test_bit_for_bit(student: dict[str, Any], qwen_folder: Path) -> None:
    recipe = small_recipe(
        qwen_folder,
        qwen_folder,
        student={"model": str(qwen_folder), **student},
        teacher={"kind": "self", "weights": "live", "context": {"kind": "system", "text": "Hm."}},
        # One pass with several prompts, each shared by its samples.
        train={"prompts_per_step": 2, "learning_rate": 1e-2, "micro_batch_tokens": 1000},
    )
    (stored, stored_updates), (recomputed, recomputed_updates) = (
        stepped(recipe, PLENTY),
        stepped(recipe, 0),
    )
    shares = "dropout" not in student.get("lora", {})
    assert stored.student.passes.padding_reason is None
    assert (stored.student.passes.unshared_reason is None) == shares
    assert stored_updates == recomputed_updates
    start = assemble(recipe).student.weights.trained
    recomputed_weights = recomputed.student.weights.trained
    for name, parameter in stored.student.weights.trained.items():
        assert torch.equal(parameter, recomputed_weights[name]), name
    assert any(not torch.equal(p, recomputed_weights[name]) for name, p in start.items())


def test_a_run_goes_on_the_same_whatever_is_free_then(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run chooses anew: what is free may have changed, its numbers do not."""
    recipe = small_recipe(tiny_folder, tiny_folder, train={"steps": 3, "prompts_per_step": 2})
    whole = train(recipe, tmp_path / "whole")

    real = assemble
    chosen = iter([PLENTY, 0])

    def assembled(recipe: Any, **options: Any) -> Runtime:
        free = next(chosen)
        parts = real(recipe, free=lambda device: free, **options)
        if free == PLENTY:
            student: Any = parts.student
            step = student.step

            def fail(number: int, scored: Any) -> Update:
                if number == 2:
                    raise KeyboardInterrupt
                update: Update = step(number, scored)
                return update

            student.step = fail
        else:
            assert parts.student.weights.uses_gradient_checkpointing
        return parts

    monkeypatch.setattr("courtside.assemble.assemble", assembled)
    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path / "cut")
    resumed = train(recipe, tmp_path / "cut")
    assert losses(resumed) == losses(whole)


def losses(folder: RunFolder) -> list[float]:
    values = [row["loss"] for row in folder.metrics()]
    assert len(values) == 3
    return values
