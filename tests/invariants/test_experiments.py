"""Whole experiments with a tiny model: cut off, killed, resumed, with an arm that fails."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import courtside
from courtside.errors import UserError
from courtside.experiment.episode_counts import resampled_rates

Tree = dict[str, Any]

RECIPE = """
[tasks]
kind = "toolbox"
num_tools = 2
turns = 1
[rollout]
samples_per_prompt = 2
max_new_tokens = 6
corrections = true
[student]
model = "MODEL"
[[losses]]
kind = "cross_entropy"
on = "dataset"
[train]
steps = 2
prompts_per_step = 1
[evaluate]
num_tasks = 2
every = 2
suites = { held_out = { names = "held_out" } }
"""
EXPERIMENT = """
learning_rates = [1e-4, 1e-2]
seeds = [0, 1]
goals = [0.0, 1.1]
choose_by = "error_rate"
sweep_on = "B"
keep = false
[prepare]
base = "base.toml"
[variants.A]
with = []
[variants.B]
with = ["rollout.max_new_tokens=5"]
[arms.good]
recipe = "recipe.toml"
[arms.bad]
recipe = "recipe.toml"
with = ["student.keep_layers=[7]"]
learning_rates = [1e-4]
variants = ["A"]
seeds = [0]
"""


def run_command(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "courtside", "experiment", str(folder)]
    return subprocess.run(
        [*program, "--out", str(folder / "runs"), *options],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def start_command(folder: Path, *options: str) -> subprocess.Popen[str]:
    program = [sys.executable, "-m", "courtside", "experiment", str(folder)]
    return subprocess.Popen(
        [*program, "--out", str(folder / "runs"), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def wait_until(condition: Callable[[], bool], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.05)


def numbers(outcome: Path) -> Tree:
    """Without clocks."""
    tree = json.loads(outcome.read_text())
    del tree["seconds"], tree["wall_seconds"], tree["environment"], tree["spent"]["seconds"]
    return tree


def test_an_experiment_goes_on_where_it_was_cut_off_and_past_what_fails(
    tmp_path: Path, roomy_folder: Path
) -> None:
    folder = tmp_path / "little"
    folder.mkdir()
    runs = folder / "runs" / "little"
    (folder / "base.toml").write_text(RECIPE.replace("MODEL", str(roomy_folder)))
    (folder / "recipe.toml").write_text(RECIPE.replace("MODEL", str(runs / "base")))
    (folder / "experiment.toml").write_text(EXPERIMENT)
    assert "no run of the experiment is finished" in run_command(folder, "--summarize").stderr
    # The bad arm comes in the middle: a fresh worker goes on behind it.
    done = run_command(folder)
    assert done.returncode == 1 and "FAILED bad-A-lr0.0001-seed0" in done.stdout, done.stdout
    results = json.loads((folder / "results.json").read_text())
    assert list(results["failed"]) == ["bad-A-lr0.0001-seed0"]
    assert "keep_layers" in (runs / "bad-A-lr0.0001-seed0.log").read_text()
    rate = results["learning_rates"]["good"]
    scores = {trial["learning_rate"]: trial["validation"][4] for trial in results["sweep"]}
    assert scores.keys() == {1e-4, 1e-2} and scores[rate] == min(scores.values())
    for variant in ("A", "B"):
        row = results["variants"][variant]["arms"]["good"]
        assert row["error_rate_after"]["seeds"] == row["held_out/error_rate_before"]["seeds"] == 2
        assert row["tokens_until"] == {"0": [0, 0], "1.1": [None, None]}
        assert [point["step"] for point in row["error_rate_curve"]] == [0, 2]
    assert not list(runs.glob("good-*/checkpoints")) and list(runs.glob("good-*/report.html"))

    # The counts of test episodes are those that the evaluation's rates were made of.
    first_outcome = json.loads((runs / "outcomes" / f"good-A-lr{rate:g}-seed0.json").read_text())
    for suite, part in {"": first_outcome, **first_outcome["suites"]}.items():
        counts = first_outcome["episodes"][suite]
        for name, value in {"score": part["after"], **part["metrics_after"]}.items():
            if name in ("score", "error_rate"):
                rates = resampled_rates(counts, name, np.ones((1, 2)))
                assert rates[0] == pytest.approx(value), name

    # Cut off: one outcome is missing, and its run with it. A worker of its own makes the same.
    missing = runs / "outcomes" / f"good-A-lr{rate:g}-seed1.json"
    expected, times = numbers(missing), {p: p.stat().st_mtime_ns for p in missing.parent.iterdir()}
    missing.unlink()
    assert run_command(folder, "--summarize").returncode == 0
    results = json.loads((folder / "results.json").read_text())
    assert results["variants"]["A"]["arms"]["good"]["after"]["seeds"] == 1
    second_run = run_command(folder, "--only", "^good")
    assert second_run.returncode == 0, second_run.stdout + second_run.stderr
    assert second_run.stdout.count(" done ") == 1, "what was prepared is there, too"
    assert numbers(missing) == expected
    del times[missing]
    assert all(path.stat().st_mtime_ns == when for path, when in times.items())

    # The same outcomes under other settings are not taken for theirs.
    other = run_command(folder, "--summarize", "train.steps=4")
    assert other.returncode == 2 and "measured with other settings" in other.stderr


KILLED = """
learning_rates = [1e-3]
seeds = [0]
with = ["train.steps=30", "run.checkpoint_every=5", "evaluate.every=0", "rollout.max_new_tokens=4"]
[arms.only]
recipe = "recipe.toml"
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_experiment_ends_its_workers_and_goes_on(
    tmp_path: Path, roomy_folder: Path, number: int
) -> None:
    folder = tmp_path / "little"
    folder.mkdir()
    (folder / "recipe.toml").write_text(RECIPE.replace("MODEL", str(roomy_folder)))
    (folder / "experiment.toml").write_text(KILLED)
    run = folder / "runs" / "little" / "only-lr0.001-seed0"
    command = start_command(folder, "--jobs", "1")
    wait_until(lambda: (run / "checkpoints" / "step-000005").exists())
    os.kill(command.pid, number)
    text = command.communicate()[0]
    if number == signal.SIGKILL:
        wait_until(lambda: is_unlocked(run))
    else:
        assert command.returncode == 128 + number and "goes on" in text, text
        assert is_unlocked(run), "the workers have ended"
    assert not list(folder.glob("runs/little/outcomes/*")), "it had not finished"
    done = run_command(folder, "--jobs", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(30))
    assert "at step 0 of" not in (run.with_name(f"{run.name}.log")).read_text()
    if number != signal.SIGKILL:
        return
    # The same as one that nobody killed.
    whole = tmp_path / "whole"
    shutil.copytree(folder, whole, ignore=shutil.ignore_patterns("runs", "results.json"))
    assert run_command(whole, "--jobs", "1").returncode == 0
    resumed, unbroken = (
        numbers(place / "runs" / place.name / "outcomes" / f"{run.name}.json")
        for place in (folder, whole)
    )
    resumed.pop("costs"), unbroken.pop("costs")  # steps that were done twice are paid twice
    assert resumed == unbroken


DOCUMENTS = """
[tasks]
kind = "documents"
path = "FOLDER/documents"
max_tokens = 32
[rollout]
student_fraction = 0
max_new_tokens = 6
[student]
model = "MODEL"
[[losses]]
kind = "cross_entropy"
on = "dataset"
[train]
steps = 2
prompts_per_step = 1
[evaluate]
num_tasks = 2
suites = { sums = { kind = "arithmetic" }, words = { kind = "instructions" } }
"""
LEARNED = """
learning_rates = [1e-3]
seeds = [0, 1]
contrasts = [["fast", "slow"]]
outcomes = { "sums/score" = 0.1 }
[arms.slow]
recipe = "recipe.toml"
[arms.fast]
recipe = "recipe.toml"
learning_rates = [1e-2]
"""


def test_arms_that_learn_documents_are_compared_by_their_suites(
    tmp_path: Path, roomy_folder: Path
) -> None:
    folder = tmp_path / "texts"
    (folder / "documents").mkdir(parents=True)
    for number in range(3):
        (folder / "documents" / f"{number}.txt").write_text(f"The town {number} is old. " * 9)
    recipe = DOCUMENTS.replace("MODEL", str(roomy_folder)).replace("FOLDER", str(folder))
    (folder / "recipe.toml").write_text(recipe)
    swept = LEARNED.replace("[1e-2]", "[1e-2, 1e-3]")
    (folder / "experiment.toml").write_text(swept)
    refused = run_command(folder, "evaluate.every=1")
    assert refused.returncode == 2 and "which documents lack" in refused.stderr
    (folder / "experiment.toml").write_text(LEARNED)
    done = run_command(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(", sums 0.") == 4
    results = json.loads((folder / "results.json").read_text())
    row = results["arms"]["slow"]
    assert row["sums/after"]["seeds"] == 2 and "after" not in row
    (contrast,) = results["contrasts"]
    assert contrast["outcome"] == "sums/score" and contrast["seeds"] == 2
    runs = folder / "runs" / "texts"
    with pytest.raises(
        UserError, match=r"evaluations of suites alone\. Name one with --suite: sums"
    ):
        courtside.compare([runs])
    with pytest.raises(UserError, match="no evaluation of the suite 'sum'"):
        courtside.compare([runs], suite="sum")
    ids = [set(courtside.compare([runs], suite=s).tasks.ids) for s in ("sums", "words")]
    assert len(ids[0]) == len(ids[1]) == 2 and ids[0].isdisjoint(ids[1])
    comparison = courtside.compare([runs], suite="sums")
    assert [arm.seeds for arm in comparison.arms] == [(0, 1), (0, 1)]
    assert comparison.arms[0].after.mean == results["arms"]["fast"]["sums/after"]["mean"]
    assert comparison.notes[0] == "Scores are those of the suite 'sums'."


CROWDED = """
learning_rates = [1e-3]
seeds = [0, 1, 2]
with = ["evaluate.every=0", "rollout.max_new_tokens=4"]
[arms.only]
recipe = "recipe.toml"
"""
CROWD = """
import sys
from pathlib import Path
if "--multiprocessing-fork" in sys.argv:
    import torch
    from courtside.training.student import Student
    plain = Student.step
    def step(self, *args):
        for number in range(NUM_ERRORS):
            try:
                Path(f"FOLDER/error-{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return plain(self, *args)
    Student.step = step
"""
"""Imported by every process at its start: so many updates in all find no memory."""


@pytest.mark.parametrize("num_errors", [1, 2])
def test_runs_without_memory_start_again_with_fewer_at_a_time(
    tmp_path: Path, roomy_folder: Path, num_errors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "crowded"
    folder.mkdir()
    (folder / "recipe.toml").write_text(RECIPE.replace("MODEL", str(roomy_folder)))
    (folder / "experiment.toml").write_text(CROWDED)
    crowd = CROWD.replace("NUM_ERRORS", str(num_errors)).replace("FOLDER", str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text(crowd)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    done = run_command(folder, "--jobs", "2")
    restarts = [line for line in done.stdout.splitlines() if " again only-" in line]
    assert len(restarts) == 1, done.stdout + done.stderr
    assert "beside 1 others. From now on 1 at a time" in restarts[0]
    if num_errors == 1:
        assert done.returncode == 0 and "(3 of 3)" in done.stdout
        return
    # One alone that finds none has failed, and another start of the experiment tries it again.
    assert done.returncode == 1 and done.stdout.count("FAILED only-") == 1
    assert "out of GPU memory at step 0: CUDA out of memory" in done.stdout
    assert "(1 of 3, 1 failed)" in done.stdout and "(2 of 3, 1 failed)" in done.stdout
    done = run_command(folder, "--jobs", "2")
    assert done.returncode == 0 and "(3 of 3)" in done.stdout


BUDGET = """
learning_rates = [1e-3]
seeds = [0, 1]
budget = { student_tokens = 3000 }
with = ["evaluate.every=1", "train.steps=40", "evaluate.suites={}"]
[arms.small]
recipe = "recipe.toml"
[arms.large]
recipe = "recipe.toml"
with = ["train.prompts_per_step=3"]
[arms.short]
recipe = "recipe.toml"
with = ["train.steps=1"]
seeds = [0]
"""


def test_arms_spend_the_same_and_are_compared(tmp_path: Path, roomy_folder: Path) -> None:
    folder = tmp_path / "equal"
    folder.mkdir()
    runs = folder / "runs" / "equal"
    (folder / "recipe.toml").write_text(RECIPE.replace("MODEL", str(roomy_folder)))
    (folder / "experiment.toml").write_text(BUDGET)
    done = run_command(folder, "--jobs", "2")
    assert done.returncode == 1, done.stdout + done.stderr
    results = json.loads((folder / "results.json").read_text())
    # It ran out of steps, so it did not spend what the others did.
    (reason,) = results["failed"].values()
    assert "budget.student_tokens = 3000: the run ended after 1 steps" in reason
    spent = {name: arm["spent"] for name, arm in results["arms"].items()}
    assert spent.keys() == {"small", "large"}
    for name, units in spent.items():
        per_step = units["student_tokens"]["mean"] / units["steps"]["mean"]
        assert all(
            3000 <= value < 3000 + 2 * per_step for value in units["student_tokens"]["values"]
        )
        assert results["arms"][name]["runs"][0]["validation"][-1][0] == units["steps"]["values"][0]
    assert spent["small"]["steps"]["mean"] > spent["large"]["steps"]["mean"]

    comparison = courtside.compare([runs])
    assert [(arm.name, arm.seeds) for arm in comparison.arms] == [
        ("small", (0, 1)),
        ("large", (0, 1)),
    ]
    assert comparison.arms[0].spent["student_tokens"] == spent["small"]["student_tokens"]["mean"]
    whole = [b for b in comparison.budgets if b.unit == "student_tokens"][-1]
    assert whole.budget >= 3000 and None not in whole.scores.values()


def is_unlocked(run: Path) -> bool:
    from courtside.errors import UserError
    from courtside.report.folder.locking import acquire_lock

    try:
        os.close(acquire_lock(run))
    except UserError:
        return False
    return True
