"""Every recipe in the repository runs, on a tiny model; so does the study program."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from courtside.recipe_file import load_recipe
from courtside.verbs import train

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(p for p in (ROOT / "recipes").glob("*/*.toml") if p.name != "study.toml")
SMALL = ("train.steps=2", "train.prompts=2", "evaluate.tasks=4", "rollout.max_new_tokens=8")


@pytest.mark.parametrize("file", RECIPES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_recipe_trains(
    file: Path, tmp_path: Path, tiny_folder: Path, tiny_teacher_folder: Path
) -> None:
    overrides = [*SMALL, f"student.model={tiny_folder}"]
    recipe = load_recipe(file)
    if recipe.student.keep_layers is not None:
        overrides.append("student.keep_layers=[0]")
    if recipe.teacher is not None and recipe.teacher.kind == "model":
        overrides.append(f"teacher.model={tiny_teacher_folder}")
    run = train(load_recipe(file, overrides), tmp_path / "run")
    rows = run.metrics()
    assert [row["step"] for row in rows] == [0, 1]
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows)
    last = run.evaluations()[-1]
    assert (last.step, last.who) == (2, "student")
    assert (run.path / "report.html").stat().st_size > 5000


def test_study_chooses_on_validation_and_reports_the_test(
    tmp_path: Path, tiny_folder: Path
) -> None:
    study = tmp_path / "study"
    study.mkdir()
    (study / "recipe.toml").write_text((ROOT / "recipes/shared-rule/recipe.toml").read_text())
    (study / "study.toml").write_text(
        'learning_rates = [1e-4, 1e-2]\nseeds = [0, 1]\nwith = ["evaluate.every=2"]\n'
        'goals = [0.0, 1.1]\n[arms.only]\nrecipe = "recipe.toml"\n'
        '[arms.other]\nrecipe = "recipe.toml"\nlearning_rates = [1e-3]\n'
        'with = ["train.warmup=1"]\n'
    )
    program = [sys.executable, str(ROOT / "recipes/study.py"), str(study), "--out", str(tmp_path)]
    done = subprocess.run(
        [*program, "--with", f"student.model={tiny_folder}", *SMALL],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((study / "results.json").read_text())
    sweep = {s["learning_rate"]: s["validation"] for s in results["sweep"]}
    best = results["arms"]["only"]["learning_rate"]
    assert sweep[best][2] == max(rate for _, _, rate, _ in sweep.values())
    runs = results["arms"]["only"]["runs"]
    assert len(runs) == 2
    mean = sum(run["after"] for run in runs) / 2
    assert results["arms"]["only"]["after"]["mean"] == pytest.approx(mean)
    assert results["arms"]["only"]["tokens_until"] == {"0": [0, 0], "1.1": [None, None]}
    others = results["arms"]["other"]["runs"]
    assert results["arms"]["other"]["learning_rate"] == 1e-3
    assert results["equal_tokens"] == min(run["trained_tokens"] for run in [*runs, *others])
    gap = results["differences"]["only minus other"]["after"]
    assert gap["mean"] == pytest.approx(mean - sum(run["after"] for run in others) / 2)
    assert gap["low"] <= gap["mean"] <= gap["high"]
