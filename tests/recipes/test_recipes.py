"""Every recipe in the repository runs, on a tiny model."""

from __future__ import annotations

import json
import math
import runpy
from pathlib import Path

import pytest
from support.small_runs import write_jsonl

from courtside.api import train
from courtside.recipe.load import load_recipe
from courtside.recipe.pipeline import is_pipeline, load_pipeline
from courtside.report.folder.folder import RunFolder
from courtside.tasks.parsing import read_jsonl_tasks

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(p for p in (ROOT / "recipes").glob("*/*.toml") if p.name != "experiment.toml")
PIPELINES = [file for file in FILES if is_pipeline(file)]
RECIPES = [file for file in FILES if file not in PIPELINES]
SMALL = (
    "train.steps=2", "train.prompts_per_step=2", "train.warmup_steps=0", "evaluate.num_tasks=4",
    "rollout.max_new_tokens=8",
)  # fmt: skip


@pytest.mark.parametrize("file", RECIPES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_recipe_trains(
    file: Path,
    tmp_path: Path,
    tiny_folder: Path,
    roomy_folder: Path,
    tiny_teacher_folder: Path,
) -> None:
    overrides = [*SMALL, f"student.model={tiny_folder}"]
    recipe = load_recipe(file)
    if recipe.student.keep_layers is not None:
        overrides.append("student.keep_layers=[0]")
    if recipe.teacher is not None and recipe.teacher.kind == "model":
        overrides.append(f"teacher.model={tiny_teacher_folder}")
    if recipe.student.adapter is not None:
        overrides.append("student.adapter=null")
    if recipe.tasks.kind == "toolbox":
        overrides += ["tasks.turns=2", "evaluate.num_tasks=2", f"student.model={roomy_folder}"]
        overrides += [f"evaluate.suites.{n}.turns=2" for n in recipe.evaluate.suites]
    if recipe.tasks.kind == "switchboard":
        overrides += ["tasks.turns=8", "evaluate.num_tasks=2", f"student.model={roomy_folder}"]
        overrides += [f"evaluate.suites.{n}.turns=8" for n in recipe.evaluate.suites]
    overrides += [
        f"drafts.{index}.{field}"
        for index, stage in enumerate(recipe.drafts)
        if stage.kind in ("rewrite", "criticize")
        for field in ("max_new_tokens=8", "max_failure_fraction=1")  # random words do not end
    ]
    if recipe.takeover is not None:  # nothing passes
        overrides.append("takeover.require=none")
    if recipe.tasks.kind == "prefixes":  # a run that the experiment prepares
        overrides += [f"tasks.path={write_words(tmp_path, roomy_folder)}", "evaluate.num_tasks=2"]
        overrides.append(f"student.model={roomy_folder}")
    if recipe.reader is not None:  # random words are no call at all
        overrides.append("reader.rules=[{detect='no_call', hint='Call a tool.'}]")
    run = train(load_recipe(file, overrides), tmp_path / "run")
    rows = run.metrics()
    assert [row["step"] for row in rows] == [0, 1]
    assert all(math.isfinite(row["loss"]) for row in rows)
    needs_success = recipe.drafts or any(loss.kind == "policy_gradient" for loss in recipe.losses)
    if not needs_success:  # nothing is ever rewarded
        assert all(row["grad_norm"] > 0 for row in rows)
    last = [e for e in run.evaluations() if e.policy.startswith("student")][-1]
    assert last.step == 2
    assert {e.policy for e in run.evaluations() if e.step == 2} >= {
        f"student:{name}" for name in recipe.evaluate.suites
    }
    assert (run.path / "report.html").stat().st_size > 5000


@pytest.mark.parametrize("file", PIPELINES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_pipeline_trains(file: Path, tmp_path: Path, roomy_folder: Path) -> None:
    overrides = [f"base.student.model={roomy_folder}", "base.evaluate.num_tasks=2"]
    overrides += ["base.evaluate.max_new_tokens=4"]
    stages = load_pipeline(file).stages
    for stage in stages:
        where = f"stages.{stage.name}"
        overrides += [f"{where}.train.steps=2", f"{where}.train.prompts_per_step=2"]
        if not stage.recipe.tasks.is_recorded:
            overrides.append(f"{where}.rollout.max_new_tokens=4")
        teacher = stage.recipe.teacher
        if teacher is not None and teacher.kind == "model" and ":" not in teacher.model:
            overrides.append(f"{where}.teacher.model={roomy_folder}")
        if stage.gate is not None:
            overrides.append(f"{where}.gate.max_loss=1.0")
    if file.parent.name == "three-fixes":  # random letters have no word to cut after
        overrides += use_words(tmp_path)
    pipeline = load_pipeline(file, overrides)
    last = train(pipeline, tmp_path / "run", quiet=True)
    assert last.path.name == stages[-1].folder_name
    for stage in pipeline.stages:
        run = RunFolder.read(tmp_path / "run" / "stages" / stage.folder_name)
        assert [row["step"] for row in run.metrics()] == [*range(stage.recipe.train.steps)]
        is_rewarded = any(loss.kind == "policy_gradient" for loss in stage.recipe.losses)
        if stage.recipe.teacher is None and not is_rewarded:  # nothing is ever right
            assert all(row["grad_norm"] > 0 for row in run.metrics())
        assert {e.policy for e in run.evaluations() if e.step > 0} >= {
            f"student:{name}" for name in stage.recipe.evaluate.suites
        }
    assert (tmp_path / "run" / "report.html").stat().st_size > 5000


def write_words(folder: Path, model: Path) -> Path:
    """A run whose student writes words, so that its answers can be cut."""
    file = ROOT / "recipes/three-fixes/recipe.toml"
    overrides = [f"base.student.model={model}", "base.evaluate.num_tasks=2"]
    for stage in load_pipeline(file).stages:
        overrides += [
            f"stages.{stage.name}.train.steps=1",
            f"stages.{stage.name}.train.prompts_per_step=32",
        ]
    train(load_pipeline(file, [*overrides, *use_words(folder)]), folder / "words", quiet=True)
    return next((folder / "words" / "stages").glob("*-draft"))


def use_words(folder: Path) -> list[str]:
    """Overrides by which the first student learns words, in a second."""
    rows = [
        {"prompt": f"say {n}", "completion": "yes no yes no", "answer": "yes", "grader": "contains"}
        for n in range(40)
    ]
    tasks = write_jsonl(folder / "words.jsonl", rows)
    return [
        f"base.tasks={{kind='jsonl', path='{tasks}'}}",
        "stages.sft.train={steps=60, prompts_per_step=8, learning_rate=3e-2}",
        *(f"stages.{name}.rollout.max_new_tokens=14" for name in ("draft", "adapt", "distil")),
    ]


def test_the_three_fixes_are_chained() -> None:
    """A student by imitation, a teacher by RL on that student's prefixes, a safe top-k."""
    stages = {s.name: s for s in load_pipeline(ROOT / "recipes/three-fixes/recipe.toml").stages}
    sources = {s.name: {r.field: r.stage for r in s.references} for s in stages.values()}
    assert sources["draft"] == {"student.model": "sft", "teacher.model": "teacher"}
    assert sources["adapt"] == {"student.model": "teacher", "tasks.path": "draft"}
    assert sources["distil"] == {"student.model": "sft", "teacher.model": "adapt"}
    assert [loss.kind for loss in stages["adapt"].recipe.losses] == ["policy_gradient"]
    (loss,) = stages["distil"].recipe.losses
    assert loss.kind == "divergence" and loss.support.kind == "top_k"
    assert loss.support.form in ("stop_gradient", "tail")


def test_the_facts_are_those_of_their_script(tmp_path: Path) -> None:
    folder = ROOT / "recipes" / "continual"
    runpy.run_path(str(folder / "make_facts.py"))["write_files"](tmp_path)
    for file in (*folder.glob("facts/*.txt"), folder / "questions.jsonl"):
        assert (tmp_path / file.relative_to(folder)).read_bytes() == file.read_bytes()
    facts = "".join(file.read_text() for file in folder.glob("facts/*.txt"))
    questions = [json.loads(line) for line in (folder / "questions.jsonl").open()]
    assert len(questions) == 40
    assert all(q["answer"] in facts and q["prompt"] not in facts for q in questions)
    assert len(read_jsonl_tasks(folder / "everyday.jsonl")) == 72
