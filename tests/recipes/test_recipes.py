"""Every recipe in the repository runs, on a tiny model."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from courtside.api import train
from courtside.recipe.load import load_recipe

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(p for p in (ROOT / "recipes").glob("*/*.toml") if p.name != "experiment.toml")
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
    if recipe.reader is not None:  # random words are no call at all
        overrides.append("reader.rules=[{detect='no_call', hint='Call a tool.'}]")
    run = train(load_recipe(file, overrides), tmp_path / "run")
    rows = run.metrics()
    assert [row["step"] for row in rows] == [0, 1]
    assert all(math.isfinite(row["loss"]) for row in rows)
    if any(loss.kind != "policy_gradient" for loss in recipe.losses):  # nothing is ever rewarded
        assert all(row["grad_norm"] > 0 for row in rows)
    last = [e for e in run.evaluations() if e.policy == "student"][-1]
    assert last.step == 2
    assert {e.policy for e in run.evaluations() if e.step == 2} >= {
        f"student:{name}" for name in recipe.evaluate.suites
    }
    assert (run.path / "report.html").stat().st_size > 5000
