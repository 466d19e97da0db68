"""A student with an adapter on a base in 4 bits: sampling, scoring, update and export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_runs import small_recipe
from support.tiny_model import save_tiny

from courtside.api import export, train
from courtside.artifacts.weights import load_student, merge_student
from courtside.assemble import assemble
from courtside.engines.base import ScoreRequest
from courtside.errors import RecipeError
from courtside.recipe.load import parse_recipe
from courtside.training import checkpoints
from courtside.training.weights import StudentWeights

ATOL = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bitsandbytes packs whole blocks of 64 weights there."""
    return save_tiny(tmp_path_factory.mktemp("wide"), size=64)


def recipe(folder: Path, **lora: Any) -> Any:
    return small_recipe(
        folder,
        student={"model": str(folder), "lora": {"rank": 4, "base_dtype": "nf4", **lora}},
        teacher={"kind": "self", "weights": "frozen", "context": {"kind": "system", "text": "No."}},
        train={"steps": 3, "prompts_per_step": 3, "learning_rate": 1e-2},
    )


def plain_logps(model: Any, token_ids: tuple[int, ...]) -> torch.Tensor:
    """Of each token after the first, from transformers alone."""
    ids = torch.tensor([token_ids])
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


def test_the_base_is_in_4_bits_and_the_adapter_alone_trains(folder: Path) -> None:
    weights = StudentWeights(recipe(folder).student, seed=0)
    layers = weights.model.model.layers
    base = layers[0].mlp.up_proj.base_layer
    assert type(base).__name__ == "Linear4bit"
    assert base.weight.nbytes == base.in_features * base.out_features / 2
    assert type(weights.model.get_output_embeddings()) is torch.nn.Linear
    assert all("lora_" in n and p.dtype == torch.float32 for n, p in weights.trained.items())


def test_samples_scores_and_updates_are_those_of_the_quantized_model(folder: Path) -> None:
    parts = assemble(recipe(folder))
    weights = parts.student.weights
    with torch.no_grad():
        for name, parameter in weights.trained.items():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    trajectories = parts.rollout(parts.tasks.batch(0, 3), 0)
    with torch.no_grad():
        for t in trajectories:
            expected = plain_logps(weights.model, t.token_ids)[-t.num_completion_tokens :]
            torch.testing.assert_close(torch.tensor(t.sampler_logp), expected, atol=ATOL, rtol=0)
        (scores,) = parts.engine.score([ScoreRequest.of_trajectory(trajectories[0])])
    expected = plain_logps(weights.model, trajectories[0].token_ids).detach()
    length = trajectories[0].num_completion_tokens
    torch.testing.assert_close(scores.logp_T, expected[-length:], atol=ATOL, rtol=0)
    base_before = {n: p.clone() for n, p in weights.model.named_parameters() if "lora_" not in n}
    adapter_before = {n: p.detach().clone() for n, p in weights.trained.items()}
    parts.student.step(0, parts.teacher(trajectories))
    assert any(not torch.equal(p, adapter_before[n]) for n, p in weights.trained.items())
    for name, before in base_before.items():
        assert torch.equal(weights.model.get_parameter(name), before), name


def test_the_gradient_is_that_of_transformers(folder: Path) -> None:
    """Cross-entropy of the sampled tokens, over all of them."""
    changed = recipe(folder).model_copy(
        update={"losses": small_recipe(
            folder, rollout={"student_fraction": 0.0},
            tasks={"kind": "arithmetic", "digits": 1},
            losses=[{"kind": "cross_entropy", "on": "dataset"}],
        ).losses}
    )  # fmt: skip
    tree = changed.model_dump(mode="json", exclude_unset=True)
    tree |= {"rollout": {"student_fraction": 0.0}, "tasks": {"kind": "arithmetic", "digits": 1}}
    del tree["teacher"]
    parts = assemble(parse_recipe(tree))
    weights = parts.student.weights
    with torch.no_grad():
        for name, parameter in weights.trained.items():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    scored = parts.teacher(parts.rollout(parts.tasks.batch(0, 3), 0))
    losses = [
        -plain_logps(weights.model, s.trajectory.token_ids)[-s.trajectory.num_completion_tokens :]
        for s in scored
    ]
    torch.cat(losses).mean().backward()
    expected = {n: p.grad.clone() for n, p in weights.trained.items() if p.grad is not None}
    weights.model.zero_grad()
    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in weights.trained.items():
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: gradients.__setitem__(name, p.grad.clone())
        )
    update = parts.student.step(0, scored)
    assert update.components["cross_entropy"] == pytest.approx(
        float(torch.cat(losses).detach().mean()), abs=ATOL
    )
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-3)


def test_an_export_is_the_adapter_on_the_base_of_the_files(folder: Path, tmp_path: Path) -> None:
    run = train(recipe(folder), tmp_path / "run", quiet=True)
    card = (export(run.path, tmp_path / "adapter", adapter=True) / "README.md").read_text()
    assert "trained on the base in 4 bits (NF4" in card
    checkpoint = checkpoints.latest(run.checkpoints)
    assert checkpoint is not None
    trained = checkpoints.load(checkpoint).tensors["weights"]
    student = load_student(recipe(folder).student, trained)
    assert type(student.model.model.layers[0].mlp.up_proj.base_layer) is torch.nn.Linear
    merged = merge_student(student, torch.float32)
    assert not any("lora" in name for name, _ in merged.named_parameters())


@pytest.mark.parametrize("field", ["adapter", "average_with"])
def test_what_is_merged_before_training_is_refused(folder: Path, field: str) -> None:
    value = {"adapter": "warm", "average_with": {"model": "other"}}[field]
    with pytest.raises(RecipeError, match=f"before '{field}' could be merged"):
        small_recipe(
            folder,
            student={"model": "m", "lora": {"rank": 4, "base_dtype": "nf4"}, field: value},
            teacher={"kind": "self"},
        )
