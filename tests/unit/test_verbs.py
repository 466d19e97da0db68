"""What a user can do with a finished run: export, evaluate and rescore it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_runs import contents, small_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer

from courtside.api import evaluate_student, export, rescore, train
from courtside.assemble import assemble
from courtside.errors import CheckpointError, UserError
from courtside.report.folder.folder import RunFolder
from courtside.run_state import restore
from courtside.training import checkpoints

IDS = torch.tensor([[5, 9, 33, 80, 7]])


def student_logits(run: Path) -> torch.Tensor:
    """Of the trained student, as the loop would use it."""
    parts = assemble(RunFolder.read(run).recipe())
    restore(parts, checkpoints.load(checkpoints.latest(run / "checkpoints")))
    return logits(parts.engine.model)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.fixture(scope="module")
def lora_run(tiny_folder, tiny_teacher_folder, tmp_path_factory) -> Path:
    recipe = small_recipe(
        tiny_folder,
        tiny_teacher_folder,
        student={"model": str(tiny_folder), "lora": {"rank": 4, "dropout": 0.2}},
        train={"steps": 4, "prompts_per_step": 2, "learning_rate": 3e-2},
        evaluate={"num_tasks": 6, "samples_per_task": 2},
        tasks={"kind": "instructions", "checks": ["lower_case"]},
    )
    return train(recipe, tmp_path_factory.mktemp("lora") / "run").path


@pytest.fixture(scope="module")
def head_run(tiny_folder, tiny_teacher_folder, tmp_path_factory) -> Path:
    """An adapter on the output head, which is the embedding and must stay that."""
    lora = {"rank": 4, "target_modules": ["q_proj", "lm_head"]}
    recipe = small_recipe(
        tiny_folder,
        tiny_teacher_folder,
        student={"model": str(tiny_folder), "lora": lora},
        train={"steps": 3, "prompts_per_step": 2, "learning_rate": 3e-2},
    )
    return train(recipe, tmp_path_factory.mktemp("head") / "run").path


@pytest.fixture(scope="module")
def full_run(tiny_folder, tiny_teacher_folder, tmp_path_factory) -> Path:
    recipe = small_recipe(
        tiny_folder,
        tiny_teacher_folder,
        student={"model": str(tiny_folder), "keep_layers": [1]},
        train={"steps": 3, "prompts_per_step": 2, "learning_rate": 1e-2},
        run={"checkpoint_every": 1},
    )
    return train(recipe, tmp_path_factory.mktemp("full") / "run").path


# ── export ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["lora_run", "head_run", "full_run"])
def test_an_exported_model_is_the_student(kind, request, tiny_folder, tmp_path):
    run = request.getfixturevalue(kind)
    before = contents(run)
    folder = export(run, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(logits(model), student_logits(run), rtol=1e-4, atol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(tiny_folder)
    assert not torch.allclose(logits(model), logits(base), atol=1e-2)
    assert not any("lora" in name for name, _ in model.named_parameters())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template and tokenizer.get_vocab()
    assert not list(folder.glob("*.bin")) and (folder / "model.safetensors").is_file()
    assert contents(run) == before
    if kind == "full_run":
        assert model.config.num_hidden_layers == 1
    if kind == "head_run":
        assert torch.equal(model.model.embed_tokens.weight, base.model.embed_tokens.weight)
        assert not torch.allclose(model.lm_head.weight, base.lm_head.weight, atol=1e-3)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
@pytest.mark.parametrize("kind", ["lora_run", "head_run"])
def test_an_exported_adapter_loads_with_peft(kind, request, tiny_folder, tmp_path):
    from peft import PeftModel
    from safetensors import safe_open

    run = request.getfixturevalue(kind)
    folder = export(run, tmp_path / "adapter", adapter=True)
    assert (folder / "adapter_model.safetensors").is_file()
    assert not (folder / "model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained(tiny_folder)
    model = PeftModel.from_pretrained(base, str(folder)).eval()
    torch.testing.assert_close(logits(model), student_logits(run), rtol=1e-4, atol=1e-5)
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        assert all("lora_" in name for name in file.keys())  # noqa: SIM118


@pytest.mark.parametrize("kind", ["lora_run", "head_run"])
def test_an_exported_adapter_can_teach(kind, request, tiny_folder, tmp_path):
    """Beside its own base model: two teachers of one name and different weights."""
    run = request.getfixturevalue(kind)
    folder = export(run, tmp_path / "adapter", adapter=True)
    routes = {
        "lower_case": {"kind": "model", "model": str(tiny_folder), "adapter": str(folder)},
        "json": {"kind": "model", "model": str(tiny_folder)},
    }
    recipe = small_recipe(tiny_folder, teacher={"kind": "routes", "routes": routes})
    teachers = assemble(recipe).teacher.teacher.routes
    taught = logits(teachers["lower_case"].engine.model)
    torch.testing.assert_close(taught, student_logits(run), rtol=1e-4, atol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(tiny_folder)
    torch.testing.assert_close(logits(teachers["json"].engine.model), logits(base))


def test_training_can_start_from_an_exported_adapter(lora_run, tiny_folder, tmp_path):
    folder = export(lora_run, tmp_path / "adapter", adapter=True)
    student = {"model": str(tiny_folder), "adapter": str(folder), "lora": {"rank": 2}}
    recipe = small_recipe(
        tiny_folder, student=student, teacher={"kind": "self", "weights": "frozen"}
    )
    parts = assemble(recipe)
    started = logits(parts.engine.model)
    torch.testing.assert_close(started, student_logits(lora_run), rtol=1e-4, atol=1e-5)
    # What "before training" means is the model with the adapter in it.
    train(recipe, tmp_path / "run")
    merged = AutoModelForCausalLM.from_pretrained(export(tmp_path / "run", tmp_path / "model"))
    assert not torch.allclose(logits(merged), started, atol=1e-4)
    weights = assemble(recipe).student.weights
    with weights.without_adapter():
        torch.testing.assert_close(logits(weights.model), started)


def test_an_export_needs_neither_teacher_nor_tasks(full_run, tiny_teacher_folder, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(full_run, run)
    recipe = run / "recipe.toml"
    recipe.write_text(recipe.read_text().replace(str(tiny_teacher_folder), "/gone/away"))
    assert (export(run, tmp_path / "model") / "config.json").is_file()


def test_a_step_can_be_chosen(full_run, tmp_path):
    first = AutoModelForCausalLM.from_pretrained(export(full_run, tmp_path / "two", step=2))
    last = AutoModelForCausalLM.from_pretrained(export(full_run, tmp_path / "three", step=3))
    assert not torch.equal(logits(first), logits(last))
    with pytest.raises(UserError, match=r"no checkpoint of step 1; there are: 2, 3"):
        export(full_run, tmp_path / "one", step=1)
    assert not (tmp_path / "one").exists()


def test_what_export_refuses(full_run, tmp_path):
    with pytest.raises(UserError, match="has no adapter"):
        export(full_run, tmp_path / "new", adapter=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file"):
        with pytest.raises(UserError, match="not an empty folder"):
            export(full_run, tmp_path / name)
    with pytest.raises(UserError, match="not a run folder"):
        export(tmp_path / "full", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    run = tmp_path / "run"
    shutil.copytree(full_run, run)
    file = run / "checkpoints" / "step-000003" / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match="step-000003 is damaged"):
        export(run, tmp_path / "new")
    assert not (tmp_path / "new").exists()


# ── evaluate ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["lora_run", "full_run"])
def test_evaluating_a_run_gives_what_it_recorded(kind, request):
    """The same seeds and the same weights: dropout off, the adapter on."""
    run = request.getfixturevalue(kind)
    folder = RunFolder.read(run)
    recorded = {(e.step, e.policy): e for e in folder.evaluations()}
    recipe = folder.recipe()
    last = recipe.train.steps
    student, teacher = evaluate_student(recipe, run=run, teacher=True)
    assert repr(student) == repr(recorded[last, "student"])
    assert teacher.scores == recorded[0, "teacher"].scores
    (untrained,) = evaluate_student(recipe)
    assert repr(untrained) == repr(recorded[0, "student"])
    answers = [[s.response for s in e.samples] for e in (student, untrained)]
    assert answers[0] != answers[1]


def test_how_many_and_which_tasks_can_be_chosen(full_run):
    recipe = RunFolder.read(full_run).recipe()
    (evaluation,) = evaluate_student(recipe, run=full_run, split="validation", num_tasks=3, step=2)
    assert (evaluation.split, evaluation.step, len(evaluation.scores)) == ("validation", 2, 3)


def test_a_student_that_is_not_the_runs_is_refused(lora_run, tiny_folder, tiny_teacher_folder):
    recipe = RunFolder.read(lora_run).recipe()
    for change in ({"lora": None}, {"model": str(tiny_teacher_folder)}, {"keep_layers": (0,)}):
        other = recipe.model_copy(update={"student": recipe.student.model_copy(update=change)})
        with pytest.raises(UserError, match=rf"student\.{next(iter(change))}.*another student"):
            evaluate_student(other, run=lora_run)
    with pytest.raises(UserError, match=r"student\.lora.*another student"):
        rescore(lora_run, ["student.lora.rank=8"])
    with pytest.raises(UserError, match="a moving average exists only in a run that trained"):
        rescore(lora_run, ["teacher={ kind = 'self', weights = 'ema' }"])


def test_no_teacher_to_evaluate(tiny_folder):
    recipe = small_recipe(
        tiny_folder,
        tasks={"kind": "arithmetic"},
        rollout={"student_fraction": 0.0},
        losses=[{"kind": "cross_entropy"}],
    )
    with pytest.raises(UserError, match="no teacher"):
        evaluate_student(recipe, teacher=True)


# ── rescore ──────────────────────────────────────────────────────────────────────────────────────


def test_rescoring_the_first_step_gives_what_was_recorded(full_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(full_run, run)
    shutil.rmtree(run / "checkpoints")  # the student before training
    (row,) = rescore(run, steps=[0])
    recorded = RunFolder.read(run).metrics()[0]
    assert row["step"] == 0 and row["trajectories"] == 4 and row["without_teacher"] == 0
    shared = (row.keys() & recorded.keys()) - {"step"}
    assert {"kl", "kl_estimate", "loss/divergence", "teacher_gap/mean", "entropy/teacher"} <= shared
    for name in shared:
        assert row[name] == pytest.approx(recorded[name], rel=1e-6), name


def test_rescoring_uses_the_trained_student_and_changes_nothing(full_run):
    before = contents(full_run)
    rows = rescore(full_run)
    assert [row["step"] for row in rows] == [0, 1, 2]
    recorded = RunFolder.read(full_run).metrics()
    assert rows[0]["kl"] < recorded[0]["kl"]  # it has learned on these very trajectories
    assert contents(full_run) == before
    (other,) = rescore(
        full_run,
        [
            "losses=[{ kind = 'policy_gradient' }, "
            "{ kind = 'divergence', divergence = 'forward_kl' }]",
        ],
        steps=[1],
    )
    assert other["kl"] == pytest.approx(rows[1]["kl"])
    assert other["loss/divergence"] != rows[1]["loss/divergence"]
    assert "loss/policy_gradient" in other


def test_steps_that_are_not_stored_are_refused(full_run):
    with pytest.raises(UserError, match=r"no trajectories of steps \[7\]; there are \[0, 1, 2\]"):
        rescore(full_run, steps=[1, 7])


@pytest.mark.parametrize("change", ["tasks.limit=1", "train.learning_rate=1.0", "evaluate=null"])
def test_overrides_that_change_nothing_are_refused(full_run, change):
    with pytest.raises(UserError, match="changes nothing, because rescoring takes the traj"):
        rescore(full_run, [change])
