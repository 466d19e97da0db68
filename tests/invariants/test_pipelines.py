"""Whole pipelines on tiny models: gates, edited stages, repetition, reports, exit codes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_runs import contents, write_jsonl
from support.tiny_model import tiny_tokenizer
from transformers import AutoModelForCausalLM

from courtside.api import train, write_report
from courtside.artifacts.weights import load_student, merge_student
from courtside.errors import GateFailedError, RecipeError, TaskError, UserError
from courtside.evaluate.intervals import paired_difference
from courtside.recipe.pipeline import parse_pipeline
from courtside.report.console import PlainConsole
from courtside.report.folder import toml
from courtside.report.folder.folder import RunFolder
from courtside.training import checkpoints
from courtside.training.weights import StudentWeights

Tree = dict[str, Any]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of two days, demonstrations of one digit, and questions that others answer."""
    folder = tmp_path_factory.mktemp("files")
    for day in (1, 2):
        (folder / f"day-{day}").mkdir()
        (folder / f"day-{day}" / "news.txt").write_text(
            f"on day {day} the red door opened at ten\n"
        )
    write_jsonl(
        folder / "sevens.jsonl",
        [{"prompt": f"say {n}", "completion": "7777777777", "split": "train"} for n in range(4)],
    )
    write_jsonl(
        folder / "questions.jsonl",
        [{"prompt": f"ask {n}", "grader": "regex", "grader_args": {"pattern": "[^7 ]"},
          "split": "test"} for n in range(32)],
    )  # fmt: skip
    return folder


@pytest.fixture
def tree(tiny_folder: Path, files: Path) -> Tree:
    """Learn documents without harm; then sevens, which the questions notice."""
    return {
        "base": {
            "student": {"model": str(tiny_folder)},
            "rollout": {"student_fraction": 0, "max_new_tokens": 4},
            "losses": [{"kind": "cross_entropy", "on": "dataset"}],
            "train": {"steps": 2, "prompts_per_step": 2, "learning_rate": 1e-5},
            "evaluate": {"num_tasks": 32, "temperature": 0,
                         "suites": {"talk": {"kind": "jsonl",
                                             "path": str(files / "questions.jsonl")}}},
        },
        "stages": [
            {"name": "learn", "tasks": {"kind": "documents", "path": str(files / "day-1"),
                                        "max_tokens": 16},
             "gate": {"suite": "talk", "max_loss": 0.2}},
            {"name": "sevens", "student": {"model": "stage:learn"},
             "tasks": {"kind": "jsonl", "path": str(files / "sevens.jsonl")},
             "evaluate": {"before": False}, "gate": {"suite": "talk", "max_loss": 0.2},
             "train": {"steps": 12, "prompts_per_step": 4, "learning_rate": 3e-2}},
        ],
    }  # fmt: skip


def run(tree: Tree, path: Path) -> Any:
    return train(parse_pipeline(tree), path, quiet=True)


def test_a_gate_decides_what_is_promoted(tree: Tree, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.raises(GateFailedError, match="stage 'sevens': gate failed: talk") as error:
        run(tree, path)
    assert "It is not promoted" in str(error.value) and "All stages are kept" in str(error.value)
    assert (path / "promoted").resolve() == (path / "stages" / "01-learn" / "export").resolve()
    record = json.loads((path / "stages" / "02-sevens.json").read_text())
    before, after = (
        next(e.scores for e in RunFolder.read(path / "stages" / stage).evaluations() if e.step == n)
        for stage, n in (("01-learn", 0), ("02-sevens", 12))
    )
    mean, low, high, p_value = paired_difference(before, after)
    gate = record["gate"]
    assert (gate["mean"], gate["low"], gate["high"], gate["p_value"]) == (mean, low, high, p_value)
    assert mean < -0.2 and not gate["passed"] and record["is_done"]
    page = (path / "report.html").read_text()
    assert "It is not promoted; the pipeline ended after 02-sevens." in page
    # The same command says the same and trains nothing again.
    before_files = contents(path / "stages" / "02-sevens" / "checkpoints")
    with pytest.raises(GateFailedError):
        run(tree, path)
    assert contents(path / "stages" / "02-sevens" / "checkpoints") == before_files
    # Who accepts the loss goes on with the same weights.
    tree["stages"][1]["gate"]["max_loss"] = 1.0
    last = run(tree, path)
    assert contents(path / "stages" / "02-sevens" / "checkpoints") == before_files
    assert (path / "promoted").resolve() == (last.path / "export").resolve()


def test_a_gate_takes_the_evaluation_after_a_budget_is_spent(tree: Tree, tmp_path: Path) -> None:
    del tree["stages"][1]
    tree["base"]["train"]["max_student_tokens"] = 1
    path = tmp_path / "run"
    stage = run(tree, path)
    assert len(stage.metrics()) == 1
    assert json.loads((path / "stages" / "01-learn.json").read_text())["gate"]["passed"]
    # A stage that is done is not trained further by a larger budget.
    tree["base"]["train"]["max_student_tokens"] = 1_000_000
    with pytest.raises(UserError, match="max_student_tokens"):
        run(tree, path)


def test_the_gate_is_decided_by_the_lower_end(tree: Tree, tmp_path: Path) -> None:
    """Of an interval whose mean alone would pass."""
    from courtside.pipeline.gate import decide_gate
    from courtside.recipe.load import parse_recipe
    from courtside.recipe.pipeline_sections import GateConfig
    from courtside.types import Evaluation

    tree["base"]["tasks"] = tree["stages"][1]["tasks"]
    recipe = parse_recipe(tree["base"])
    scores = {
        "start": {str(n): 1.0 for n in range(40)},
        "end": {str(n): float(n >= 3) for n in range(40)},
    }
    folders = {}
    for step, (name, values) in zip((0, 2), scores.items(), strict=True):
        with RunFolder.open(tmp_path / name, recipe) as folder:
            folder.record_evaluation(
                Evaluation(step=step, policy="student:talk", split="test", scores=values,
                           mean_score=0.0, ci_low=0.0, ci_high=0.0, metrics={})
            )  # fmt: skip
        folders[name] = RunFolder.read(tmp_path / name)
    mean, low, _, _ = paired_difference(scores["start"], scores["end"])
    assert low < -0.1 < mean
    for max_loss, passed in ((0.1, False), (-low, True), (-low - 1e-6, False)):
        gate = GateConfig(suite="talk", max_loss=max_loss)
        assert decide_gate(gate, folders["start"], folders["end"]).passed is passed


def test_exit_code_three(tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(toml.dumps(tree))
    command = [sys.executable, "-m", "courtside", "train", "p.toml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert "stage 1 of 2: learn" in done.stdout and "learn: gate passed: talk" in done.stdout
    assert "sevens: none of its 4 prompts shares 6 words in a row with the documents of learn" in (
        done.stdout
    )
    assert "error: stage 'sevens': gate failed" in done.stderr


# ── edited stages ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def finished(tree: Tree, tmp_path: Path) -> Path:
    del tree["stages"][0]["gate"], tree["stages"][1]["gate"]
    run(tree, tmp_path / "run")
    return tmp_path / "run"


def test_an_edited_stage_is_refused_with_its_field_and_folder(
    tree: Tree, finished: Path, files: Path
) -> None:
    first = finished / "stages" / "01-learn"
    untouched = contents(finished)
    tree["stages"][0]["train"] = {"learning_rate": 1e-4}
    with pytest.raises(RecipeError) as error:
        run(tree, finished)
    assert "train.learning_rate: 1e-05 → 0.0001" in str(error.value)
    assert f"Delete or rename {first} to train it again" in str(error.value)
    # More steps of a stage that is done are another stage, too; fields that change nothing are not.
    tree["stages"][0]["train"] = {"steps": 3}
    with pytest.raises(RecipeError, match=r"train\.steps: 2 → 3"):
        run(tree, finished)
    tree["stages"][0]["train"] = {"micro_batch_tokens": 64}
    run(tree, finished)
    for stage in ("01-learn", "02-sevens"):
        weights = f"stages/{stage}/checkpoints"
        assert {k: v for k, v in contents(finished).items() if k.startswith(weights)} == {
            k: v for k, v in untouched.items() if k.startswith(weights)
        }


def test_a_changed_file_is_refused(tree: Tree, finished: Path, files: Path) -> None:
    document = files / "day-1" / "news.txt"
    text = document.read_text()
    try:
        document.write_text("something else\n")
        with pytest.raises(RecipeError, match=r"day-1: its contents changed \(\w{12} → \w{12}\)"):
            run(tree, finished)
    finally:
        document.write_text(text)
    run(tree, finished)


def test_a_deleted_stage_is_trained_again_and_what_started_from_it_refused(
    tree: Tree, finished: Path
) -> None:
    first = finished / "stages" / "01-learn"
    final = checkpoints.latest(first / "checkpoints")
    assert final is not None
    before = contents(final)
    shutil.rmtree(first)
    run(tree, finished)  # to the same weights, so the second stage still stands
    assert contents(final) == before
    shutil.rmtree(first)
    tree["stages"][0]["seed"] = 9
    tree["stages"][0]["train"] = {"learning_rate": 1e-4}
    with pytest.raises(
        RecipeError, match=r"stage 'sevens' was changed.*\n  stage:learn: its conte"
    ):
        run(tree, finished)
    shutil.rmtree(finished / "stages" / "02-sevens")
    run(tree, finished)
    assert contents(final) != before


def test_checkpoints_of_stages_that_are_done_may_be_deleted(tree: Tree, finished: Path) -> None:
    shutil.rmtree(finished / "stages" / "01-learn" / "checkpoints")
    run(tree, finished)
    shutil.rmtree(finished / "stages" / "02-sevens")
    run(tree, finished)  # from the export
    shutil.rmtree(finished / "stages" / "02-sevens")
    shutil.rmtree(finished / "stages" / "01-learn" / "export")
    with pytest.raises(UserError, match="its checkpoints were deleted, and a later stage needs"):
        run(tree, finished)


def test_a_moved_stage_is_refused(tree: Tree, finished: Path) -> None:
    tree["stages"].insert(0, {**tree["stages"][0], "name": "new"})
    with pytest.raises(UserError, match=r"this stage is now 02-learn\. Delete or rename"):
        run(tree, finished)


def test_a_stage_that_another_command_trained_on_is_refused(tree: Tree, finished: Path) -> None:
    stage = finished / "stages" / "01-learn"
    longer = RunFolder.read(stage).recipe()
    longer = longer.model_copy(update={"train": longer.train.model_copy(update={"steps": 4})})
    train(longer, stage, quiet=True)
    with pytest.raises(UserError, match="its last checkpoint is not the one that the pipeline"):
        run(tree, finished)


def test_missing_files_of_later_stages_are_refused_before_the_first(
    tree: Tree, tmp_path: Path
) -> None:
    tree["stages"][1]["tasks"]["path"] = str(tmp_path / "none.jsonl")
    with pytest.raises(TaskError, match=r"stage 'sevens': .*none.jsonl"):
        run(tree, tmp_path / "run")
    assert [*(tmp_path / "run" / "stages").iterdir()] == []


# ── repetition and report ────────────────────────────────────────────────────────────────────────


def test_days_one_after_the_other(tree: Tree, files: Path, tmp_path: Path) -> None:
    learn, _ = tree["stages"]
    learn |= {"student": {"model": "stage:previous"}}
    learn["tasks"]["path"] = str(files / "day-{iteration}")
    del learn["gate"]
    tree["stages"] = [{"repeat": 2, "stages": [learn]}]
    log = tmp_path / "log"
    with log.open("w") as stream:
        train(parse_pipeline(tree), tmp_path / "run", console=PlainConsole(stream))
    first, second = (
        RunFolder.read(tmp_path / "run" / "stages" / n) for n in ("01-learn-1", "02-learn-2")
    )
    assert second.recipe().student.model == str(first.path / "export")
    for day, stage in ((1, first), (2, second)):
        ids = [i for s in stage.trajectories(0) for i in s.trajectory.token_ids]
        text = tiny_tokenizer().decode(ids)
        assert f"day {day}" in text and f"day {3 - day}" not in text
    assert "stage 2 of 2: learn-2" in log.read_text()


def test_adapters_and_trajectories_are_handed_over(tree: Tree, tmp_path: Path) -> None:
    """A second stage starts from the first one's adapter and trains on its trajectories."""
    first, _ = tree["stages"]
    del first["gate"], tree["base"]["evaluate"], tree["base"]["rollout"]["max_new_tokens"]
    first["student"] = {"lora": {"rank": 2}}
    replay = {
        "name": "replay",
        "student": {"adapter": "stage:learn"},
        "tasks": {"kind": "trajectories", "path": "stage:learn"},
    }
    last = run({**tree, "stages": [first, replay]}, tmp_path / "run")
    source = RunFolder.read(tmp_path / "run" / "stages" / "01-learn")
    ids = {s.trajectory.id for step in (0, 1) for s in source.trajectories(step)}
    assert {s.trajectory.id for step in (0, 1) for s in last.trajectories(step)} <= ids
    # What trains on is the first stage's student: its loss on its last batch is where it begins.
    weights = StudentWeights(last.recipe().student, seed=0).model.state_dict()
    final = checkpoints.latest(source.checkpoints)
    assert final is not None
    trained = load_student(source.recipe().student, checkpoints.load(final).tensors["weights"])
    merged = merge_student(trained, torch.float32).state_dict()
    assert all(torch.allclose(weights[name], merged[name], atol=1e-6) for name in merged)
    before = AutoModelForCausalLM.from_pretrained(source.recipe().student.model).state_dict()
    assert not all(torch.allclose(weights[name], before[name], atol=1e-6) for name in before)
    assert last.recipe().student.adapter == source.path / "export-adapter"


def test_the_report_has_all_stages(tree: Tree, finished: Path) -> None:
    page = finished / "report.html"
    page.unlink()
    assert write_report(finished) == page
    text = page.read_text()
    for stage in ("01-learn", "02-sevens"):
        assert f'<a href="stages/{stage}/report.html">{stage}</a>' in text
        assert f"after {stage}" in text
    assert re.search(r"<tr><th>talk</th><td>32 test</td>(<td><b>[\d.]+%.*?</td>){3}", text)
    # The second stage has evaluate.before = false: its only score is not one before training.
    later = (finished / "stages" / "02-sevens" / "report.html").read_text()
    assert re.search(r"<tr><th>student:talk</th><td>32 test</td><td>–</td><td><b>[\d.]+%", later)
    costs = [
        json.loads((finished / "stages" / s / "costs.json").read_text())["update"]["input_tokens"]
        for s in ("01-learn", "02-sevens")
    ]
    assert f"<td>{sum(costs):,}</td>" in text
    with pytest.raises(UserError, match=r"is the folder of a pipeline\. Give one of its stages"):
        RunFolder.read(finished)


def test_a_teacher_learns_to_go_on_from_the_students_states(
    tiny_folder: Path, tiny_teacher_folder: Path, tmp_path: Path
) -> None:
    """Draft, adapt the teacher to the student's prefixes, distil from the adapted teacher."""
    reward = [{"kind": "policy_gradient", "advantage": "reward"}]
    tasks_file = write_jsonl(
        tmp_path / "words.jsonl",
        [{"prompt": f"say {n}", "completion": "yes no yes no", "answer": "yes",
          "grader": "contains"} for n in range(40)],
    )  # fmt: skip
    tree = {
        "base": {
            "tasks": {"kind": "jsonl", "path": str(tasks_file)},
            "rollout": {"samples_per_prompt": 2, "max_new_tokens": 14},
            "train": {"steps": 2, "prompts_per_step": 4, "learning_rate": 1e-3},
            "evaluate": {"num_tasks": 1},
            "student": {"model": str(tiny_folder)},
        },
        "stages": [
            {"name": "sft", "rollout": {"student_fraction": 0},
             "losses": [{"kind": "cross_entropy", "on": "dataset"}],
             "train": {"steps": 60, "prompts_per_step": 8, "learning_rate": 3e-2}},
            {"name": "draft", "student": {"model": "stage:sft"}, "losses": reward},
            {"name": "adapt", "student": {"model": str(tiny_teacher_folder)},
             "tasks": {"kind": "prefixes", "path": "stage:draft", "depths": [0.0, 1.0], "cuts": 3},
             "losses": reward},
            {"name": "distil", "student": {"model": "stage:draft"},
             "teacher": {"kind": "model", "model": "stage:adapt"},
             "losses": [{"kind": "divergence"}]},
        ],
    }  # fmt: skip
    path = tmp_path / "run"
    last = run(tree, path)
    draft, adapt = (RunFolder.read(path / "stages" / n) for n in ("02-draft", "03-adapt"))
    answers = {
        s.trajectory.response for step in draft.trajectory_steps() for s in draft.trajectories(step)
    }
    for step in adapt.trajectory_steps():
        for stored in adapt.trajectories(step):
            prefix = stored.trajectory.task.messages[-1].content
            assert any(a.startswith(prefix) and len(a) > len(prefix) for a in answers)
            grade, whole = stored.trajectory.grade, prefix + stored.trajectory.response
            assert grade is not None and grade.passed == ("yes" in whole)
    assert len(last.metrics()) == 2 and last.path.name == "04-distil"
    before = contents(path / "stages" / "03-adapt")
    run(tree, path)  # all stages are done
    assert contents(path / "stages" / "03-adapt") == before
