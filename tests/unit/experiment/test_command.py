"""`courtside experiment`: what it prints before anything runs, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from courtside.cli.app import app
from courtside.experiment.config import experiment_name, find_experiment
from courtside.experiment.plan import read_plan
from courtside.experiment.summary import results_file

RECIPE = """
[student]
model = "smollm2-135m"
[tasks]
kind = "arithmetic"
[[losses]]
kind = "policy_gradient"
advantage = "reward"
[evaluate]
every = 5
"""
EXPERIMENT = """
learning_rates = [1e-5, 1e-4]
seeds = [0, 1, 2]
contrasts = [["one", "two"]]
[outcomes]
score = 0.04
[arms.one]
recipe = "recipe.toml"
[arms.two]
recipe = "recipe.toml"
with = ["train.prompts_per_step=8"]
rate_of = "one"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "experiment.toml").write_text(EXPERIMENT)
    return tmp_path


def invoke(folder: Path, *arguments: str) -> tuple[int, str]:
    command = ["experiment", str(folder), "--out", str(folder / "runs"), *arguments]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    return result.exit_code, result.output


def test_the_plan_is_printed_without_running(folder: Path) -> None:
    code, text = invoke(folder, "--plan")
    assert code == 0, text
    assert "7 runs of 2 arms, 0 finished, 0 failed; 2 recipes are valid" in text
    assert "one minus two, score: 3 seeds, expected SD 0.04, detectable" in text
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "("], "--only (: no regular expression"),
        (["--only", "three"], "--only three: matches none of one, two"),
        (["--plan", "--summarize"], "--plan and --summarize: give one of them"),
        (["--plan", "train.stepz=3"], "arms.one: "),
        (["--plan", "evaluate.every=0"], "learning rates are chosen on validation tasks"),
        (["--summarize"], "no run of the experiment is finished"),
    ],
)
def test_what_cannot_work_is_refused_with_exit_code_2(
    folder: Path, arguments: list[str], message: str
) -> None:
    code, text = invoke(folder, *arguments)
    assert code == 2 and message in text, text


def test_a_missing_recipe_names_its_arm(folder: Path) -> None:
    (folder / "experiment.toml").write_text(EXPERIMENT.replace("recipe.toml", "other.toml"))
    code, text = invoke(folder, "--plan")
    assert code == 2 and "arms.one: " in text and "other.toml: no such file" in text


def test_arms_with_other_test_tasks_are_refused(folder: Path) -> None:
    other = EXPERIMENT.replace("train.prompts_per_step=8", "tasks.operation=subtract")
    (folder / "experiment.toml").write_text(other)
    code, text = invoke(folder, "--plan")
    assert code == 2 and "arms.two: its test tasks are not those of one" in text, text
    (folder / "experiment.toml").write_text('unpaired = ["two"]\n' + other)
    assert invoke(folder, "--plan")[0] == 0
    # Other settings of the same tasks are fine.
    same = EXPERIMENT.replace("train.prompts_per_step=8", "tasks.limit=50")
    (folder / "experiment.toml").write_text(same)
    assert invoke(folder, "--plan")[0] == 0
    fewer = EXPERIMENT.replace("train.prompts_per_step=8", "evaluate.num_tasks=10")
    (folder / "experiment.toml").write_text(fewer)
    code, text = invoke(folder, "--plan")
    assert code == 2 and "evaluate.num_tasks" in text


def test_choosing_by_the_kl_needs_a_teacher(folder: Path) -> None:
    (folder / "experiment.toml").write_text('choose_by = "kl"\n' + EXPERIMENT)
    code, text = invoke(folder, "--plan")
    assert code == 2 and "choose_by = 'kl' needs a teacher" in text


def test_folders_files_and_built_in_names_lead_to_experiments(folder: Path) -> None:
    assert find_experiment(folder) == folder / "experiment.toml"
    other = folder / "mine.toml"
    other.write_text(EXPERIMENT)
    assert find_experiment(other) == other
    assert experiment_name(other) == "mine"
    assert experiment_name(folder / "experiment.toml") == folder.name
    assert experiment_name(find_experiment("pruned")) == "pruned"
    assert results_file(read_plan(other, folder)) == folder / "mine-results.json"
    for missing in (folder / "runs", folder / "nowhere"):
        code, text = invoke(missing)
        assert code == 2 and "Give a folder with" in text


def test_a_file_that_is_no_toml_is_refused(folder: Path) -> None:
    (folder / "experiment.toml").write_text("seeds = [")
    code, text = invoke(folder, "--plan")
    assert code == 2 and "not valid TOML" in text
