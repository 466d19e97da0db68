"""A student with an adapter on a base in 4 bits: sampling, scoring, update and export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from peft import PeftModel
from support.small_runs import small_recipe
from support.tiny_model import save_tiny
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from courtside.api import export, serving_command, train
from courtside.artifacts.weights import load_quantized_base
from courtside.assemble import assemble
from courtside.cli.app import app
from courtside.engines.base import ScoreRequest
from courtside.errors import RecipeError, UserError
from courtside.recipe.load import parse_recipe
from courtside.report.folder.folder import RunFolder
from courtside.run_state import restore
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exports_have_the_weights_that_the_run_multiplied_with(
    folder: Path, tmp_path: Path, dtype: str
) -> None:
    """Merged, and as an adapter on an exported base; the files here are float32, so in bfloat16
    the base is rounded before it is quantized."""
    changed = recipe(folder)
    student = changed.student.model_copy(update={"dtype": dtype})
    run = train(changed.model_copy(update={"student": student}), tmp_path / "run", quiet=True)
    exported = {
        "merged": export(run.path, tmp_path / "merged"),
        "adapter": export(run.path, tmp_path / "adapter", adapter=True),
        "base": export(run.path, tmp_path / "base", base=True),
    }
    parts = assemble(run.recipe())
    checkpoint = checkpoints.latest(run.checkpoints)
    assert checkpoint is not None
    restore(parts, checkpoints.load(checkpoint))
    trained = parts.student.weights.model
    base = AutoModelForCausalLM.from_pretrained(exported["base"])
    assert type(base.model.layers[0].mlp.up_proj) is torch.nn.Linear
    num_equal = 0
    for name, module in trained.named_modules():
        if isinstance(module, Linear4bit):
            held = dequantize_4bit(module.weight.data, module.weight.quant_state).float()
            assert torch.equal(base.get_parameter(name.replace(".base_layer", ".weight")), held)
            num_equal += 1
    assert num_equal == 7 * len(base.model.layers)
    # Quantized again, it is itself: also as the model of another run.
    from_export = student.model_copy(update={"model": str(exported["base"])})
    for name, parameter in load_quantized_base(from_export).named_parameters():
        assert torch.equal(parameter, base.get_parameter(name)), name
    ids = tuple(range(3, 40))
    merged = AutoModelForCausalLM.from_pretrained(exported["merged"]).eval()
    adapted = PeftModel.from_pretrained(base, exported["adapter"]).eval()
    files = AutoModelForCausalLM.from_pretrained(folder)
    on_files = PeftModel.from_pretrained(files, exported["adapter"]).eval()
    with torch.no_grad():
        run_logps, *export_logps = (
            plain_logps(m, ids) for m in (trained, merged, adapted, on_files)
        )
    assert float((export_logps[0] - export_logps[1]).abs().max()) < ATOL
    assert float((export_logps[0] - export_logps[2]).abs().max()) > 0.05, (
        "the base was not quantized"
    )
    difference_T = (export_logps[0] - run_logps).abs()
    if dtype == "float32":
        assert float(difference_T.max()) < ATOL
    else:  # the run's matmuls round, too
        assert float(difference_T.median()) < 0.1


def test_cards_and_the_command_say_what_an_adapter_belongs_on(folder: Path, tmp_path: Path) -> None:
    run = train(recipe(folder), tmp_path / "run", quiet=True)
    cards = [
        (export(run.path, tmp_path / name, **part) / "README.md").read_text()
        for name, part in (("a", {"adapter": True}), ("b", {"base": True}), ("m", {}))
    ]
    assert "On the base as its files have it, log-probs differ" in cards[0]
    assert "Nothing in it was trained. Adapters of that run have on it the log-probs" in cards[1]
    assert "These weights are that base, dequantized, with the adapter merged." in cards[2]
    command = serving_command(run.path, tmp_path / "a", base=tmp_path / "b")
    assert command is not None and command.startswith(f"vllm serve {tmp_path / 'b'} --enable-lora")
    result = CliRunner().invoke(app, ["export", str(run.path), str(tmp_path / "c"), "--adapter"])
    assert f"`courtside export {run.path} FOLDER --base`" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("lora", "options", "message"),
    [
        ({"rank": 2, "base_dtype": "nf4"}, {"adapter": True}, "Leave --adapter out"),
        ({"rank": 2, "base_dtype": "nf4"}, {"step": 1}, "Leave --step out"),
        ({"rank": 2}, {}, "its adapter belongs on those. Leave --base out"),
        (None, {}, "trained all weights and has no base"),
    ],
)
def test_bases_that_are_not_exported(
    folder: Path, tmp_path: Path, lora: Any, options: Any, message: str
) -> None:
    student = {"model": str(folder), **({"lora": lora} if lora else {})}
    changed = small_recipe(folder, student=student, teacher={"kind": "self", "weights": "frozen"})
    with RunFolder.open(tmp_path / "run", changed):
        pass
    with pytest.raises(UserError, match=message):
        export(tmp_path / "run", tmp_path / "base", base=True, **options)
    assert not (tmp_path / "base").exists()


@pytest.mark.parametrize("field", ["adapter", "average_with"])
def test_what_is_merged_before_training_is_refused(folder: Path, field: str) -> None:
    value = {"adapter": "warm", "average_with": {"model": "other"}}[field]
    with pytest.raises(RecipeError, match=f"before '{field}' could be merged"):
        small_recipe(
            folder,
            student={"model": "m", "lora": {"rank": 4, "base_dtype": "nf4"}, field: value},
            teacher={"kind": "self"},
        )
