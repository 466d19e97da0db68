"""Code that takes the process along, data that is something else, run folders that were damaged."""

from __future__ import annotations

import gzip
import html
import json
import lzma
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_runs import small_recipe, small_tree, write_jsonl
from typer.testing import CliRunner, Result

from courtside.api import rescore, train
from courtside.cli.app import app
from courtside.errors import TaskError
from courtside.report.folder import toml
from courtside.report.folder.folder import RunFolder
from courtside.tasks import base
from courtside.tasks.graders import grade
from courtside.tasks.parsing import read_jsonl_tasks
from courtside.types import SCHEMA_VERSION, Task

WORLD = """
import ctypes, os, sys
from courtside.types import Grade, Message, Observation, Task

class World:
    size = 20
    def task(self, index):
        prompt = (Message(role="user", content=f"Say {index}."),)
        return Task(id=f"t{index}", split="train", messages=prompt)
    def start(self, task): return self
    def grade(self): return Grade(score=0.5, passed=False)
    def step(self, reply):
        if os.environ.get("WORLD_DOES"): exec(os.environ["WORLD_DOES"])
        return Observation(messages=(Message(role="user", content="Again."),), done=True)
"""


@pytest.fixture
def folder(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With the recipe of an environment that does what WORLD_DOES says."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stray_world.py").write_text(WORLD)
    tree = small_tree(
        tiny_folder, teacher={"kind": "self", "weights": "frozen"}, evaluate=None,
        tasks={"kind": "environment", "path": "stray_world:World"},
        train={"steps": 1, "prompts_per_step": 1},
    )  # fmt: skip
    del tree["evaluate"]
    (tmp_path / "recipe.toml").write_text(toml.dumps(tree))
    return tmp_path


def run_process(folder: Path, does: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "courtside", "train", "recipe.toml", *overrides, "--run", "run"],
        cwd=folder, capture_output=True, text=True, timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "WORLD_DOES": does},
    )  # fmt: skip


# ── code that takes the process along ────────────────────────────────────────────────────────────


def test_a_process_that_ended_without_a_word_is_told_by_the_next_one(folder: Path) -> None:
    assert run_process(folder, "os._exit(3)").returncode == 3
    next_start = run_process(folder, "")
    assert next_start.returncode == 0, next_start.stderr
    assert "run: the last process ended without a word: killed" in next_start.stdout
    assert "tasks.workers = 1 makes it cost an episode, not the run" in next_start.stdout
    longer = run_process(folder, "", "train.steps=2")
    assert longer.returncode == 0 and "without a word" not in longer.stdout


def test_a_crash_in_c_names_the_line_of_the_environment(folder: Path) -> None:
    done = run_process(folder, "ctypes.string_at(0)")
    assert done.returncode < 0
    assert "Segmentation fault" in done.stderr and "stray_world.py" in done.stderr


def test_a_crash_costs_its_episode_with_workers(folder: Path) -> None:
    overrides = ("tasks.workers=1", "rollout.limits={max_fault_fraction=1.0}")
    done = run_process(folder, "os._exit(3)", *overrides)
    assert done.returncode == 0 and "environment_faults 2" in done.stdout, done.stderr


def test_closing_standard_output_does_not_end_the_run(folder: Path) -> None:
    done = run_process(folder, "sys.stdout.close(); sys.stderr.close()")
    assert done.returncode == 0 and "step 1/1" in done.stdout, done.stderr


def test_leaving_the_working_directory_is_a_fault(folder: Path) -> None:
    """The run's folder is relative to it."""
    done = run_process(folder, "os.chdir('/')", "rollout.limits={max_fault_fraction=1.0}")
    assert done.returncode == 0, done.stderr
    assert f"step(reply): changed the working directory from '{folder}' to '/'" in done.stderr
    assert (folder / "run" / "report.html").is_file()
    (folder / "stray_world.py").write_text(f"import os\nos.chdir('/')\n{WORLD}")
    shutil.rmtree(folder / "run")
    done = run_process(folder, "")
    assert done.returncode == 2
    assert "importing 'stray_world' changed the working directory to '/'" in done.stderr


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_of_the_caller_are_not_those_of_the_run(
    trained: Path, tmp_path: Path, mode: Any
) -> None:
    recipe = RunFolder.read(trained).recipe()
    with mode():
        run = train(recipe, tmp_path / "run", quiet=True)
    assert [row["kl"] for row in run.metrics()] == [
        row["kl"] for row in RunFolder.read(trained).metrics()
    ]
    with torch.no_grad():
        assert len(rescore(trained, ["losses.0.divergence=forward_kl"], quiet=True)) == 1


def test_what_a_module_switches_off_is_on_again(folder: Path) -> None:
    lines = "import sys, torch\ntorch.set_grad_enabled(False)\nsys.stdout = sys.stderr = None\n"
    (folder / "stray_world.py").write_text(lines + WORLD)
    done = run_process(folder, "")
    assert done.returncode == 0, done.stderr
    assert "step 1/1" in done.stdout and "Report: run/report.html" in done.stdout


def test_an_exception_of_megabytes_is_cut(folder: Path) -> None:
    """Those of parsers hold what could not be parsed."""
    done = run_process(folder, "raise ValueError(10**6 * 'x' + 'end')")
    assert done.returncode == 1 and "raised ValueError: xxx" in done.stderr
    assert len(done.stderr) < 10_000


# ── tasks ────────────────────────────────────────────────────────────────────────────────────────


def test_a_pattern_that_backtracks_for_years_costs_its_answer() -> None:
    prompt = ()
    task = Task(
        id="t", split="train", messages=prompt, grader="regex",
        grader_args={"pattern": r"(x+x+)+y"},
    )  # fmt: skip
    result = grade(task, "x" * 60, seconds=0.1)
    assert result is not None and result.score == 0.0
    assert result.error == "did not return within 0.1 seconds (tasks.grader_seconds)"
    result = grade(task, "xxy", seconds=5)
    assert result is not None and result.passed


def test_an_endless_space_without_a_split_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "MAX_MISSES", 100)
    space = base.TaskSpace(
        name="space", size=10**12, split=lambda _: "train",
        task=lambda index: Task(id=f"{index % 7}", split="train", messages=()),
    )  # fmt: skip
    source = base.GeneratedSource(space, seed=0, limit=None)
    with pytest.raises(TaskError, match=r"none of 100 of its 1000000000000 tasks falls into the t"):
        source.held_out("test", 1)
    assert len({task.id for task in source.batch(0, 50)}) == 7  # numbers that give the same tasks


FOREIGN = {
    "gzip": (gzip.compress(b'{"prompt": "Hi."}\n'), "the file is compressed by gzip"),
    "zip": (b"PK\x03\x04", "the file is a ZIP archive"),
    "Parquet": (b"PAR1abc", "the file is a Parquet file"),
    "xz": (lzma.compress(b'{"prompt": "Hi."}\n'), "the file is compressed by xz"),
    "Git LFS": (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS"),
    "UTF-16": ('{"prompt": "Hi."}\n'.encode("utf-16"), "the file is UTF-16 text"),
    "an array": (b'[{"prompt": "Hi."}]\n', "a JSON array becomes lines with `jq -c .[]`"),
    "an array of lines": (b'[\n{"prompt": "Hi."}\n]\n', "a JSON array becomes lines with `jq"),
}


@pytest.mark.parametrize(("data", "message"), FOREIGN.values(), ids=FOREIGN)
def test_a_file_of_another_format_is_named(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(data)
    with pytest.raises(TaskError) as caught:
        read_jsonl_tasks(path)
    assert message in str(caught.value)


def test_the_key_of_the_file_is_named_where_there_are_two_prompts(tmp_path: Path) -> None:
    row = {"prompt": "Hi.", "conversations": [{"from": "human", "value": "Hi."}]}
    with pytest.raises(TaskError, match="both `prompt` and `conversations`"):
        read_jsonl_tasks(write_jsonl(tmp_path / "tasks.jsonl", [row]))


def test_scored_pairs_of_trl_are_taken_as_they_are(tmp_path: Path) -> None:
    hello = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
    rude = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Go."}]
    row = {"chosen": hello, "rejected": rude, "score_chosen": 8.5, "score_rejected": 2.0}
    (task,) = read_jsonl_tasks(write_jsonl(tmp_path / "tasks.jsonl", [row]))
    assert (task.completion, task.rejected) == ("Hello.", "Go.")


# ── run folders ──────────────────────────────────────────────────────────────────────────────────


def run_cli(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.fixture(scope="module")
def trained(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = small_recipe(
        tiny_folder, teacher={"kind": "self", "weights": "frozen"},
        train={"steps": 1, "prompts_per_step": 1},
    )  # fmt: skip
    return train(recipe, tmp_path_factory.mktemp("damage") / "run", quiet=True).path


NAN = float("nan")
EVALUATION = {
    "schema_version": SCHEMA_VERSION, "step": 0, "policy": "student", "split": "validation",
    "mean_score": 0.5, "ci_low": 0.1, "ci_high": 0.9, "metrics": {}, "scores": {}, "samples": [],
}  # fmt: skip


def replace_weights_by_a_pipe(run: Path) -> None:
    weights = run / "checkpoints/step-000001/weights.safetensors"
    weights.unlink()
    os.mkfifo(weights)


def replace_recipe_by_a_folder(run: Path) -> None:
    (run / "recipe.toml").unlink()
    (run / "recipe.toml").mkdir()


def write_json(name: str, value: Any) -> Any:
    return lambda run: (run / name).write_text(json.dumps(value))


def append(name: str, row: dict[str, Any]) -> Any:
    def add(run: Path) -> None:
        with (run / name).open("a") as file:
            file.write(json.dumps(row) + "\n")

    return add


DAMAGE = {
    "a pipe": (replace_weights_by_a_pipe, "it is a pipe, not a regular file"),
    "a folder": (replace_recipe_by_a_folder, "recipe.toml: Is a directory"),
    "costs": (
        write_json("costs.json", {"rollout": {"seconds": "1"}}),
        "costs.json: not as courtside writes it (seconds = '1'). Remove it",
    ),
    "costs of numbers": (write_json("costs.json", {"rollout": 1}), "costs.json: not as courtside"),
    "a metric that is NaN": (append("metrics.jsonl", {"step": 1, "kl": NAN}), "`kl` is no number"),
    "a metric that no float holds": (
        append("metrics.jsonl", {"step": 1, "kl": 10**400}),
        "`kl` is no number",
    ),
    "a step twice": (
        append("metrics.jsonl", {"step": 0, "kl": 1.0}),
        "metrics.jsonl, line 2: `step` = 0 stands after 0",
    ),
    "costs without end": (
        lambda run: (run / "costs.json").write_text("[" * 10**5),
        "costs.json: not valid JSON",
    ),
    "a step beyond all": (append("metrics.jsonl", {"step": 10**20}), "no `step` with a whole n"),
    "an evaluation of something else": (
        append("evaluations.jsonl", {"step": 0, "policy": 5}),
        "evaluations.jsonl: carries no schema version",
    ),
    "an evaluation of other types": (
        append("evaluations.jsonl", EVALUATION | {"mean_score": "good"}),
        "'good' is no number",
    ),
    "threads": (write_json("environment.json", {"threads": "2"}), "threads = '2' is no number of"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_run_is_refused_with_the_file(
    trained: Path, tmp_path: Path, damage: Any, message: str
) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    recipe = tmp_path / "recipe.toml"
    shutil.copy(trained / "recipe.toml", recipe)
    damage(run)
    done = run_cli("train", recipe, "train.steps=2", "--run", run)
    assert done.exit_code in (1, 2) and message in done.stderr, done.output
    assert "loading models" not in done.output
    if "costs" in message or "metrics" in message:  # the rest of the report is written
        assert run_cli("report", run).exit_code == 0
        assert message in html.unescape((run / "report.html").read_text())


@pytest.mark.parametrize("verb", ["plan", "compare"])
def test_a_page_that_cannot_be_written_is_refused(trained: Path, verb: str) -> None:
    recipe = trained / "recipe.toml"
    page = recipe / "page.html"
    args = (recipe, "--html", page) if verb == "plan" else (trained, "--out", page)
    done = run_cli(verb, *args)
    assert done.exit_code == 2, done.output
    assert "page.html: cannot be written (" in done.stderr and "checkpoint" not in done.stderr
