"""The plan counts the tokens and FLOPs that the run then records, and learns from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.small_runs import small_recipe

from courtside.api import train
from courtside.errors import PlanError
from courtside.planning.estimate import estimate
from courtside.planning.gpus import find_device
from courtside.planning.measured import read_run
from courtside.planning.models import resolve_shapes
from courtside.planning.plan import plan
from courtside.planning.workload import Lengths, Workload, plan_models
from courtside.report.folder.folder import RunFolder

DATA = {"kind": "jsonl", "path": "DATA"}
CASES: dict[str, dict[str, Any]] = {
    "all weights": {},
    "LoRA": {"student": {"lora": {"rank": 4}}},
    "frozen self": {
        "teacher": {
            "kind": "self", "weights": "frozen", "context": {"kind": "system", "text": "Be brief."},
        },
    },
    "policy gradient with reference": {
        "losses": [
            {"kind": "policy_gradient", "advantage": "teacher_gap"},
            {"kind": "divergence", "against": "reference", "name": "near"},
        ],
    },
    "fine-tuning on data": {
        "tasks": DATA, "rollout": {"student_fraction": 0.0}, "teacher": None,
        "losses": [{"kind": "cross_entropy"}],
    },
    "half data, half samples": {
        "tasks": DATA, "rollout": {"student_fraction": 0.5, "max_new_tokens": 6},
        "losses": [{"kind": "cross_entropy", "on": "dataset"}, {"kind": "divergence"}],
    },
    "preferences": {
        "tasks": DATA, "rollout": {"student_fraction": 0.0}, "teacher": None,
        "losses": [{"kind": "preference"}],
    },
    "fine-tuning on the teacher's answers": {
        "rollout": {
            "samples_per_prompt": 2, "max_new_tokens": 6, "student_fraction": 0.0,
            "off_policy_source": "teacher",
        },
        "losses": [{"kind": "cross_entropy", "on": "teacher"}],
    },
}  # fmt: skip


ANSWER_BYTES = 5


def write_data(file: Path) -> Path:
    """Prompts and answers of one length, with the end token that of a sample: bytes are tokens."""
    rows = [
        {"prompt": f"letter {a}?", "completion": a * ANSWER_BYTES, "rejected": "z" * ANSWER_BYTES}
        for a in "abcdefghij"
    ]
    file.write_text("".join(json.dumps({**row, "split": "train"}) + "\n" for row in rows))
    return file


def run_lengths(folder: RunFolder, work: Workload) -> Lengths:
    """Means of what the run sampled or read, exactly."""
    costs = folder.read_costs()
    num_rows = len(folder.metrics()) * work.num_rows
    new = sum(row["length/mean"] for row in folder.metrics()) / len(folder.metrics())
    prompt = (costs["update"].input_tokens / num_rows) + 1 - new
    if not work.is_scored:
        return Lengths(prompt=prompt, new=new)
    context = costs["teacher"].input_tokens / num_rows - prompt - new
    if folder.recipe().needs_reference:
        context -= prompt + new
    return Lengths(prompt=prompt, new=new, context=max(context, 0.0))


@pytest.mark.parametrize("name", CASES)
def test_flops_of_the_plan_are_those_of_the_run(
    name: str, tiny_folder: Path, tiny_teacher_folder: Path, tmp_path: Path
) -> None:
    changes = dict(CASES[name])
    if changes.get("tasks") is DATA:
        changes["tasks"] = {"kind": "jsonl", "path": str(write_data(tmp_path / "data.jsonl"))}
    if "student" in changes:
        changes["student"] = {"model": str(tiny_folder), **changes["student"]}
    has_teacher = changes.get("teacher", "model") is not None
    changes = {section: value for section, value in changes.items() if value is not None}
    recipe = small_recipe(
        tiny_folder,
        tiny_teacher_folder if has_teacher else None,
        evaluate={"num_tasks": 2, "teacher": False},
        **changes,
    )
    folder = train(recipe, tmp_path / "run", quiet=True)
    costs = folder.read_costs()
    device = find_device("cpu", 1)
    student, teachers = resolve_shapes(recipe, shape=None, teacher_shape=None)
    work = Workload(
        recipe=recipe,
        models=plan_models(recipe, student, teachers, device),
        lengths=Lengths(prompt=1, new=1),
        device=device,
    )
    work = replace(work, lengths=run_lengths(folder, work))
    result = estimate(work)
    for phase in result.phases:
        if phase.name == "record":
            continue
        measured = costs[phase.name]
        steps = recipe.train.steps
        assert steps * phase.flops.input_tokens == pytest.approx(measured.input_tokens)
        assert steps * phase.flops.output_tokens == pytest.approx(measured.output_tokens)
        assert steps * phase.flops.counted == pytest.approx(measured.flops, rel=1e-9), phase.name
    assert {phase.name for phase in result.phases if phase.flops.counted} == {
        name for name, cost in costs.items() if cost.flops and name != "evaluate"
    }
    tokens = sum(round(e.metrics["length"] * len(e.scores)) for e in folder.evaluations())
    evaluated = tokens / result.num_evaluations / 2
    if tokens:
        work = replace(work, lengths=replace(work.lengths, evaluated=evaluated))
        flops = estimate(work).evaluation.flops
        assert flops.counted == pytest.approx(costs["evaluate"].flops, rel=1e-9)


@pytest.fixture(scope="module")
def small_run(tiny_folder, tiny_teacher_folder, tmp_path_factory) -> RunFolder:
    recipe = small_recipe(tiny_folder, tiny_teacher_folder)
    return train(recipe, tmp_path_factory.mktemp("plan") / "run", quiet=True)


def test_a_plan_from_a_run_repeats_its_seconds_and_lengths(small_run: RunFolder) -> None:
    rows, costs = small_run.metrics(), small_run.read_costs()
    result = plan(small_run.recipe(), gpu="cpu", run=small_run.path)
    for phase in result.estimate.phases:
        if phase.name != "record":
            seconds = sorted(row[f"seconds/{phase.name}"] for row in rows)
            assert phase.seconds == pytest.approx(seconds[len(seconds) // 2])
    mean_length = sum(row["length/mean"] for row in rows) / len(rows)
    assert result.lengths.new == pytest.approx(mean_length)
    num_rows = len(rows) * 4
    assert result.lengths.prompt == pytest.approx(costs["rollout"].input_tokens / num_rows)
    assert result.lengths.context == pytest.approx(0.0, abs=1e-6)
    assert any("times are those of run (5 steps)" in note for note in result.notes)
    assert result.assumptions[0].endswith("(of run)")


def test_a_run_scales_other_sizes(small_run: RunFolder) -> None:
    """Twice the prompts take twice the update that the run took."""
    recipe = small_run.recipe()
    train_config = recipe.train.model_copy(update={"prompts_per_step": 64, "steps": 1})
    larger = recipe.model_copy(update={"train": train_config})
    measured = read_run(small_run.path, find_device("cpu", 1))
    result = plan(larger, gpu="cpu", run=small_run.path)
    default = plan(larger, gpu="cpu", prompt_tokens=result.lengths.prompt,
                   new_tokens=result.lengths.new)  # fmt: skip
    for phase, plain in zip(result.estimate.phases, default.estimate.phases, strict=True):
        factor = measured.factors.get(phase.name, 1.0)
        assert phase.seconds == pytest.approx(factor * plain.seconds)


def test_runs_that_cannot_be_learned_from(small_run: RunFolder, tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "new", small_run.recipe()):
        pass
    with pytest.raises(PlanError, match="no step is recorded there"):
        plan(small_run.recipe(), gpu="cpu", run=tmp_path / "new")
