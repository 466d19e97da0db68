"""Runs whose answers student and teacher sample together."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_runs import small_recipe

from courtside.api import train
from courtside.assemble import assemble
from courtside.engines.base import Capabilities
from courtside.engines.mixed_sampling import mix_distributions
from courtside.errors import RecipeError

CONTEXT = {"kind": "system", "text": "Be brief."}


def make_recipe(student: Path, teacher: Path | None, /, *, fraction: Any = 1.0, **changes: Any):
    tree: dict[str, Any] = {
        "tasks": {"kind": "arithmetic"},
        "rollout": {
            "samples_per_prompt": 2,
            "max_new_tokens": 6,
            "mixed_sampling": {"top_k": 20, "fraction": fraction},
        },
        "run": {"checkpoint_every": 1, "trajectories_every": 1},
        "train": {"steps": 2, "prompts_per_step": 4, "learning_rate": 1e-3},
    }
    return small_recipe(student, teacher, **(tree | changes))


SELF: dict[str, dict[str, Any]] = {
    "live": {"kind": "self", "weights": "live", "context": CONTEXT},
    "frozen": {"kind": "self", "weights": "frozen", "context": CONTEXT},
    "ema": {"kind": "self", "weights": "ema", "context": CONTEXT},
}


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
@pytest.mark.parametrize("weights", SELF)
def test_a_self_teacher_with_a_context_replaces_tokens(
    weights: str, lora: Any, tiny_folder: Path, tmp_path: Path
) -> None:
    student: dict[str, Any] = {"model": str(tiny_folder)}
    if lora is not None:
        student["lora"] = lora
    recipe = make_recipe(tiny_folder, None, student=student, teacher=SELF[weights])
    run = train(recipe, tmp_path / "run")
    for row in run.metrics():
        assert 0 < row["mixed_sampling/replaced"] < 1 and row["tokens/divergence"] > 0
        assert "kl" in row and "kl_estimate" not in row, "no token is the student's own sample"


def test_sampler_logps_are_those_of_the_mixture(
    tiny_folder: Path, tiny_teacher_folder: Path
) -> None:
    """From whole forward passes of both models over what was sampled."""
    parts = assemble(make_recipe(tiny_folder, tiny_teacher_folder))
    teacher: Any = parts.teacher.teacher
    for t in parts.rollout(parts.tasks.batch(0, 4), 0):
        logits = []
        for model in (parts.student.weights.model, teacher.engine.model):
            with torch.no_grad():
                logits.append(model(input_ids=torch.tensor([t.token_ids])).logits[0])
        at = [i - 1 for i, chosen in enumerate(t.completion_mask) if chosen]
        ids_TK, logp_TK, _ = mix_distributions(
            logits[0][at], logits[1][at], temperature=t.temperature, top_k=20
        )
        is_sampled_TK = ids_TK == torch.tensor(t.completion_ids)[:, None]
        assert is_sampled_TK.any(-1).all(), "every token is among the teacher's twenty"
        torch.testing.assert_close(
            torch.tensor(t.sampler_logp), logp_TK[is_sampled_TK], rtol=1e-4, atol=1e-4
        )


def test_a_run_counts_what_was_replaced_and_what_it_cost(
    tiny_folder: Path, tiny_teacher_folder: Path, tmp_path: Path
) -> None:
    run = train(make_recipe(tiny_folder, tiny_teacher_folder, fraction=0.5), tmp_path / "mixed")
    num_input = 0
    for row in run.metrics():
        stored = [s.trajectory for s in run.trajectories(row["step"])]
        mixed = [t for t in stored if t.num_replaced is not None]
        assert len(mixed) == len(stored) / 2 == 4
        num_tokens = sum(t.num_completion_tokens for t in mixed)
        replaced = sum(t.num_replaced or 0 for t in mixed)
        assert row["mixed_sampling/replaced"] == pytest.approx(replaced / num_tokens)
        num_input += sum(len(t.token_ids) for t in mixed)
        num_input += sum(len(t.token_ids) - t.num_completion_tokens for t in stored)
    costs = json.loads((run.path / "costs.json").read_text())["rollout"]
    assert costs["input_tokens"] == num_input, "the teacher's passes, too"


class Elsewhere:
    """A server in front of a model: it samples whole answers."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.engine.capabilities, mixed_sampling=False)


def test_engines_that_cannot_are_refused(tiny_folder: Path, tiny_teacher_folder: Path) -> None:
    recipe = make_recipe(tiny_folder, tiny_teacher_folder)
    with pytest.raises(RecipeError, match="cannot decode token by token with another model"):
        assemble(recipe, serve=Elsewhere)  # type: ignore[arg-type]
    rollout = {"max_new_tokens": 6, "mixed_sampling": {"top_k": 300}}
    with pytest.raises(RecipeError, match="top_k = 300: the vocabulary has 258 tokens"):
        assemble(make_recipe(tiny_folder, tiny_teacher_folder, rollout=rollout))
