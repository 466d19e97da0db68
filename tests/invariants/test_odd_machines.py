"""Runs on machines where files vanish, models are broken and nobody listens: no traceback."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.small_runs import small_recipe, small_tree
from support.tiny_model import tiny_tokenizer
from typer.testing import CliRunner

from courtside.api import evaluate_student, train
from courtside.chat.template import ChatTemplate
from courtside.cli.app import app
from courtside.cli.machine import is_shared, limit_spinning
from courtside.errors import ModelError, RecipeError, UserError
from courtside.recipe import Recipe
from courtside.report.alarms import check_missing_metrics
from courtside.report.console import RunConsole
from courtside.report.costs import check_slowdown
from courtside.report.folder import toml
from courtside.report.folder.folder import RunFolder


class Lines(RunConsole):
    def __init__(self, on_step: Any = None) -> None:
        self.texts: list[str] = []
        self.on_step = on_step

    def print_line(self, text: str) -> None:
        self.texts.append(text)

    def step(self, row: Any) -> None:
        if self.on_step:
            self.on_step(row)


def make_recipe(model: Path, **changes: Any) -> Recipe:
    return small_recipe(
        model,
        **{"teacher": {"kind": "self", "weights": "frozen"},
           "train": {"steps": 3, "prompts_per_step": 1},
           "run": {"checkpoint_every": 1}, **changes},
    )  # fmt: skip


@pytest.fixture(scope="module")
def finished(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(make_recipe(tiny_folder), tmp_path_factory.mktemp("odd") / "run").path


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


# ── files that vanish ────────────────────────────────────────────────────────────────────────────


def test_deleted_checkpoints_are_not_trained_over(run, tiny_folder):
    shutil.rmtree(run / "checkpoints")
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"metrics of 3 steps and no checkpoint; .* was deleted\."):
        train(make_recipe(tiny_folder), run)
    assert (run / "metrics.jsonl").read_bytes() == before
    # Also where the run was too short for a checkpoint but the last.
    (run / "recipe.toml").write_text(
        (run / "recipe.toml").read_text().replace("checkpoint_every = 1", "checkpoint_every = 9")
    )
    with pytest.raises(UserError, match="was deleted"):
        train(make_recipe(tiny_folder, run={"checkpoint_every": 9}), run)


def test_a_run_killed_before_its_first_checkpoint_starts_again(tiny_folder, tmp_path):
    class KilledError(Exception):
        pass

    def kill(row: Any) -> None:
        raise KilledError

    recipe = make_recipe(tiny_folder, run={"checkpoint_every": 9})
    with pytest.raises(KilledError):
        train(recipe, tmp_path / "run", console=Lines(kill))
    assert len(train(recipe, tmp_path / "run").metrics()) == 3


def test_deleted_metrics_are_told_when_resuming_and_in_the_report(run, tiny_folder):
    (run / "metrics.jsonl").unlink()
    longer = make_recipe(tiny_folder, train={"steps": 4, "prompts_per_step": 1})
    console = Lines()
    folder = train(longer, run, console=console)
    message = "metrics.jsonl has no row of 3 of 4 steps (from 0 to 2)"
    assert any("no row of 3 of 3 steps" in text for text in console.texts)
    assert any(message in text for text in console.texts)
    assert [alarm["message"].startswith(message) for alarm in folder.alarms()] == [True]
    assert message in (run / "report.html").read_text()


def test_metrics_deleted_under_a_run(tiny_folder, tmp_path):
    def delete(row: Any) -> None:
        if row["step"] == 1:
            (tmp_path / "run" / "metrics.jsonl").unlink()

    folder = train(make_recipe(tiny_folder), tmp_path / "run", console=Lines(delete))
    assert [row["step"] for row in folder.metrics()] == [2]
    (alarm,) = folder.alarms()
    assert "no row of 2 of 3 steps (from 0 to 1): the file was deleted" in alarm["message"]
    assert check_missing_metrics([*folder.metrics(), {"step": 0}, {"step": 1}], 3) is None


def test_trajectories_and_checkpoints_deleted_under_a_run(tiny_folder, tmp_path):
    def delete(row: Any) -> None:
        if row["step"] == 1:
            shutil.rmtree(tmp_path / "run" / "trajectories")
            shutil.rmtree(tmp_path / "run" / "checkpoints")

    folder = train(make_recipe(tiny_folder), tmp_path / "run", console=Lines(delete))
    assert folder.trajectory_steps() == [2]
    assert [path.name for path in sorted(folder.checkpoints.iterdir())][-1] == "step-000003"


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        ("evaluations.jsonl", '{"policy": "student"}', "line 1: no `step` with a whole number"),
        ("evaluations.jsonl", '{"step": "one"}', "line 1: no `step` with a whole number"),
        ("evaluations.jsonl", '{"step": 0, "schema_version": 1}', "of step 0 is incomplete"),
        ("evaluations.jsonl", "[1, 2]", "line 1: not a JSON object"),
        ("metrics.jsonl", '{"loss": 1.0}', "line 1: no `step` with a whole number"),
        ("metrics.jsonl", "7", "line 1: not a JSON object"),
        ("alarms.jsonl", '"hm"', "line 1: not a JSON object"),
    ],
)
def test_changed_logs_are_named_with_file_and_line(run, tiny_folder, file, line, message):
    path = run / file
    log_text = path.read_text() if path.exists() else ""
    path.write_text(line + "\n" + log_text)
    with pytest.raises(UserError, match=message) as caught:
        train(make_recipe(tiny_folder), run)
    assert str(path) in str(caught.value)
    assert "remove that line, or restore the file" in str(caught.value)


def test_a_run_without_checkpoints_is_still_a_run(run, tiny_folder, monkeypatch):
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(UserError, match=r"has no checkpoint\. None was saved yet"):
        evaluate_student(make_recipe(tiny_folder), run=run)
    monkeypatch.chdir(run.parent)
    done = CliRunner().invoke(app, ["evaluate", "run"])
    assert done.exit_code == 2 and "run: has no checkpoint" in done.stderr
    for target, message in ((".", "is a folder"), ("run", "Its recipe is run/recipe")):
        done = CliRunner().invoke(app, ["train", target])
        assert done.exit_code == 2 and message in done.stderr


# ── longer runs ──────────────────────────────────────────────────────────────────────────────────


def test_a_finished_run_can_be_extended(run, tiny_folder, tmp_path):
    """The same metrics as a run that was as long from the start."""
    longer = {"steps": 5, "prompts_per_step": 1}
    console = Lines()
    folder = train(make_recipe(tiny_folder, train=longer), run, console=console)
    assert console.texts[0] == "train.steps: 3 → 5"
    whole = train(make_recipe(tiny_folder, train=longer), tmp_path / "whole")

    def results(folder: RunFolder) -> list[Any]:
        rows = folder.metrics()
        return [{k: v for k, v in row.items() if "second" not in k} for row in rows]

    assert results(folder) == results(whole)
    tests = [(e.step, e.split) for e in folder.evaluations() if e.policy == "student"]
    assert tests == [(0, "test"), (3, "test"), (5, "test")]
    assert folder.recipe().train.steps == 5
    assert "5 of 5 steps" in (run / "report.html").read_text()


def test_a_schedule_that_had_ended_is_told(tiny_folder, tmp_path):
    decay = {"steps": 2, "prompts_per_step": 1, "lr_schedule": "cosine"}
    train(make_recipe(tiny_folder, train=decay), tmp_path / "run")
    console = Lines()
    train(make_recipe(tiny_folder, train=decay | {"steps": 3}), tmp_path / "run", console=console)
    message = "the cosine schedule reaches zero at step 3, so the learning rate jumps"
    assert message in console.texts[0]


def test_a_run_cannot_become_shorter_than_it_is(run, tiny_folder):
    shorter = make_recipe(tiny_folder, train={"steps": 2, "prompts_per_step": 1})
    with pytest.raises(RecipeError, match=r"train\.steps = 2: .* has done 3 steps already"):
        train(shorter, run)
    assert RunFolder.read(run).recipe().train.steps == 3


# ── broken models ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite(tiny_folder, tmp_path, value):
    model = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 5] = value
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"{name} holds NaN or infinite values"):
        train(make_recipe(model), tmp_path / "run")


def test_a_chat_template_that_loops() -> None:
    loop = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
    begin = time.monotonic()
    with pytest.raises(ModelError, match=r"odd: its chat template renders .* it seems to loop"):
        ChatTemplate(tiny_tokenizer(template=loop), name="odd", eos_ids=[1], render_seconds=0.2)
    assert time.monotonic() - begin < 5
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for i in range(1000000000) %}{% endfor %}", "OverflowError|too big"),
        ("{{ messages[0]['content'] + 1 }}", "concatenate"),
        ("{{ messages[7]['content'] }}", "messages|undefined|no element"),
        ("{{ 1 // 0 }}", "division"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_a_chat_template_that_raises(template: str, message: str) -> None:
    with pytest.raises(ModelError, match="odd: its chat template refuses messages") as caught:
        ChatTemplate(tiny_tokenizer(template=template), name="odd", eos_ids=[1])
    assert re.search(message, str(caught.value))


# ── speed ────────────────────────────────────────────────────────────────────────────────────────


def test_a_collapse_of_speed_is_told_once() -> None:
    rates = [100.0, 90.0, 110.0, 100.0, 30.0, 20.0, 25.0, 95.0, 100.0, 10.0, 12.0]
    notes = [check_slowdown(rates[: n + 1], 2) for n in range(len(rates))]
    assert [n for n, note in enumerate(notes) if note] == [5, 10]
    assert "20 tokens/s, where this run's median is 100" in str(notes[5])
    assert "OMP_NUM_THREADS=1" in str(notes[5])
    assert check_slowdown([100.0, 1.0, 1.0], 2) is None  # no median yet
    assert "OMP_NUM_THREADS" not in str(check_slowdown(rates, 1))


def test_a_run_remembers_its_number_of_threads(run, tiny_folder, monkeypatch):
    """Also through a start that failed."""
    folder = RunFolder.read(run)
    assert folder.environment()["threads"] == torch.get_num_threads()
    other = torch.get_num_threads() + 1
    with RunFolder.open(run, make_recipe(tiny_folder)) as opened:
        opened.record_threads(other)
    with RunFolder.open(run, make_recipe(tiny_folder)) as opened:
        assert opened.environment()["threads"] == other
    console = Lines()
    longer = make_recipe(tiny_folder, train={"steps": 4, "prompts_per_step": 1})
    train(longer, run, console=console)
    assert any(f"the steps so far ran with {other}." in text for text in console.texts)


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        ("0.26 1.56 2.25 1/79 1256\n", {"GOMP_SPINCOUNT": "10000"}),
        ("0.26 1.56 2.25 2/79 1256\n", {"OMP_WAIT_POLICY": "passive"}),
        ("0.26 1.56\n", {"GOMP_SPINCOUNT": "10000"}),
        (None, {"GOMP_SPINCOUNT": "10000"}),
    ],
)
def test_threads_wait_passively_where_other_processes_run(
    load: str | None, expected: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "loadavg"
    if load is not None:
        file.write_text(load)
    environment: dict[str, str] = {}
    limit_spinning(environment, file)
    assert environment == expected


def test_a_busy_process_is_noticed_and_a_moment_of_one_is_not(tmp_path: Path) -> None:
    """By the machine's own numbers, in a process of its own: others may run beside this test."""
    code = "print('started', flush=True)\nwhile True: pass"
    busy = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert busy.stdout is not None and busy.stdout.readline()
        assert is_shared(Path("/proc/loadavg"))
    finally:
        busy.kill()
        busy.wait()
    looks = iter(["0 0 0 3/9 1", "0 0 0 3/9 1", "0 0 0 1/9 1"])
    load: Any = SimpleNamespace(read_text=lambda: next(looks))
    assert not is_shared(load)


def test_waiting_is_settled_before_torch_is_loaded_unless_the_user_did() -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        environment = {name: "active"}
        limit_spinning(environment)
        assert environment == {name: "active"}
    code = (
        "import os, sys; from courtside.cli import commands\n"
        "names = {'GOMP_SPINCOUNT', 'OMP_WAIT_POLICY'}\n"
        "def recipes(): print(len(names & os.environ.keys()), 'torch' in sys.modules)\n"
        "commands.recipes = recipes\n"
        "from courtside.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "recipes"], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "1 False\n", done.stderr


# ── the process ──────────────────────────────────────────────────────────────────────────────────


def start(*args: str, **options: Any) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **options.pop("env", {})}
    return subprocess.Popen(
        [sys.executable, "-m", "courtside", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        **options,
    )


def test_a_closed_pipe_ends_a_listing_quietly() -> None:
    process = start("schema")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()  # before the first line, as `| true` does
    errors = process.stderr.read()
    assert (process.wait(timeout=60), errors) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_listing_on_a_full_disk_says_so() -> None:
    command = f"exec {sys.executable} -m courtside recipes > /dev/full"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: standard output could not be written (No space left on")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_run_goes_on_where_its_output_is_on_a_full_disk(
    tiny_folder: Path, tmp_path: Path
) -> None:
    tree = small_tree(
        tiny_folder, teacher={"kind": "self", "weights": "frozen"},
        train={"steps": 1, "prompts_per_step": 1},
    )  # fmt: skip
    (tmp_path / "small.toml").write_text(toml.dumps(tree))
    command = f"exec {sys.executable} -m courtside train small.toml > /dev/full"
    done = subprocess.run(
        ["sh", "-c", command], stderr=subprocess.PIPE, timeout=120, cwd=tmp_path, text=True
    )
    assert done.returncode == 2 and done.stderr.count("could not be written") == 1
    assert "Traceback" not in done.stderr
    assert (tmp_path / "runs" / "small" / "report.html").is_file()


@pytest.mark.parametrize(
    "command", ["recipes", "evaluate no.toml", "train shared-rule", "init shared-rule", "--version"]
)
def test_a_command_is_refused_without_standard_output(command: str, tmp_path: Path) -> None:
    """Before it works for minutes or writes anything."""
    command = f"exec {sys.executable} -m courtside {command} >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, timeout=60, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        b"error: standard output is closed, and a command says there what it does and what came "
        b"out. Send it to a file, or to /dev/null\n"
    )
    assert not list(tmp_path.iterdir())


ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


def test_a_run_in_an_ascii_locale_whose_pipe_closes(tiny_folder: Path, tmp_path: Path) -> None:
    """`courtside train … | head -1`: the run goes on, under a name that ASCII does not have."""
    tree = small_tree(
        tiny_folder, teacher={"kind": "self", "weights": "frozen"},
        train={"steps": 2, "prompts_per_step": 1},
    )  # fmt: skip
    (tmp_path / "ä.toml").write_text(toml.dumps(tree), "utf-8")
    process = start("train", "ä.toml", cwd=tmp_path, env=ASCII)
    assert process.stdout is not None and process.stderr is not None
    first = process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read().decode()
    assert process.wait(timeout=120) == 0, errors
    assert b"2 steps" in first and "Traceback" not in errors
    run = tmp_path / "runs" / "ä"
    assert len(RunFolder.read(run).metrics()) == 2
    assert (run / "report.html").is_file()


def test_a_process_that_is_terminated_before_training_says_so() -> None:
    code = (
        "import os, signal; from courtside.cli import commands\n"
        "def recipes(): os.kill(os.getpid(), signal.SIGTERM)\n"
        "commands.recipes = recipes\n"
        "from courtside.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "recipes"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (143, "stopped by SIGTERM\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_while_it_starts_ends_it_without_a_traceback(number: int) -> None:
    code = (
        "import os, signal, sys\n"
        "class Kill:\n"
        "    def find_spec(self, name, *args):\n"
        "        if name == 'courtside.cli.app': os.kill(os.getpid(), int(os.environ['NUMBER']))\n"
        "sys.meta_path.insert(0, Kill())\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from courtside.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "recipes"], capture_output=True, text=True, timeout=60,
        env={**os.environ, "NUMBER": str(int(number))},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (-number, "")
