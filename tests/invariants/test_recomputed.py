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
from courtside.recipe import Recipe
from courtside.report.console import RunConsole
from courtside.runtime import Runtime
from courtside.types import Update


@pytest.fixture(scope="module")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    qwen().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def stepped(recipe: Recipe) -> tuple[Runtime, list[Update]]:
    parts = assemble(recipe)
    recomputes = recipe.student.gradient_checkpointing
    assert parts.student.weights.uses_gradient_checkpointing == recomputes
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
    recipe, checkpointed = (
        small_recipe(
            qwen_folder,
            qwen_folder,
            student={"model": str(qwen_folder), "gradient_checkpointing": recomputes, **student},
            teacher={
                "kind": "self", "weights": "live", "context": {"kind": "system", "text": "Hm."}
            },
            # One pass with several prompts, each shared by its samples.
            train={"prompts_per_step": 2, "learning_rate": 1e-2, "micro_batch_tokens": 1000},
        )
        for recomputes in (False, True)
    )  # fmt: skip
    (stored, stored_updates), (recomputed, recomputed_updates) = map(
        stepped, (recipe, checkpointed)
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


def test_a_run_goes_on_the_same_with_checkpointing_switched_on(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """As after running out of memory: the field may change in a run, its numbers do not."""
    plain, checkpointed = (
        small_recipe(
            tiny_folder,
            tiny_folder,
            student={"model": str(tiny_folder), "gradient_checkpointing": recomputes},
            train={"steps": 3, "prompts_per_step": 2},
        )
        for recomputes in (False, True)
    )
    whole = train(plain, tmp_path / "whole")

    class StopAfterTwo(RunConsole):
        def step(self, row: Any) -> None:
            if row["step"] == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(plain, tmp_path / "cut", console=StopAfterTwo())
    resumed = train(checkpointed, tmp_path / "cut")
    losses = [[row["loss"] for row in folder.metrics()] for folder in (resumed, whole)]
    assert losses[0] == losses[1] and len(losses[0]) == 3
