"""A run that was killed and started again ends as one that never was: bit by bit."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.run_server import RunServer
from support.small_runs import contents, digest, small_tree, without_clocks, write_jsonl

from courtside.api import train
from courtside.recipe.load import parse_recipe
from courtside.report.folder.folder import RunFolder
from courtside.training import checkpoints

Tree = dict[str, Any]


@pytest.fixture(scope="module")
def server() -> Iterator[RunServer]:
    server = RunServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def recipes(tiny_folder: Path, tiny_teacher_folder: Path, place: Path) -> dict[str, Tree]:
    student = {"model": str(tiny_folder)}
    short = {"samples_per_prompt": 2, "max_new_tokens": 4}
    texts = write_jsonl(
        place / "texts.jsonl",
        [{"prompt": f"say {n}", "completion": "yes" * n, "split": "train"} for n in range(1, 8)],
    )
    average = {"kind": "self", "weights": "ema", "ema_decay": 0.7}
    context = {"kind": "system", "text": "be brief"}
    return {
        "full": small_tree(
            tiny_folder,
            tiny_teacher_folder,
            train={"steps": 6, "prompts_per_step": 2, "learning_rate": 3e-3,
                   "lr_schedule": "cosine",
                   "warmup_steps": 2, "weight_decay": 0.1},
            rollout=short,
            evaluate={"num_tasks": 1, "every": 3},
        ),
        "lora": small_tree(
            tiny_folder,
            student=student | {"lora": {"rank": 4, "dropout": 0.3}},
            teacher=average | {"context": context},
            rollout=short | {"off_policy_source": "teacher",
                             "student_fraction": {"start": 0.0, "end": 1.0, "steps": 4}},
            losses=[{"kind": "divergence", "on": "student"},
                    {"kind": "cross_entropy", "on": "teacher"}],
            train={"steps": 5, "prompts_per_step": 4, "learning_rate": 1e-2},
        ),
        "average": small_tree(
            tiny_folder,
            tasks={"kind": "jsonl", "path": str(texts), "limit": 3},
            teacher=average,
            rollout=short | {"student_fraction": 0.5},
            losses=[{"kind": "divergence", "extrapolate": 1.3, "on": "dataset"},
                    {"kind": "policy_gradient", "on": "student", "baseline": True}],
            train={"steps": 5, "prompts_per_step": 2, "learning_rate": 3e-3},
        ),
        "routes": small_tree(
            tiny_folder,
            tasks={"kind": "instructions", "instruction_in_prompt": False,
                   "checks": ["lower_case", "json"]},
            student=student | {"lora": {"rank": 2, "dropout": 0.5}},
            teacher={"kind": "routes", "routes": {
                "json": {"kind": "model", "model": str(tiny_teacher_folder)},
                "lower_case": average | {"context": context},
            }},
            rollout=short,
            train={"steps": 4, "prompts_per_step": 3, "learning_rate": 1e-2},
        ),
        "takeover": small_tree(
            tiny_folder,
            tasks={"kind": "arithmetic"},
            teacher=average | {"context": context},
            rollout=short | {"mixed_sampling": {"top_k": 30, "fraction": 0.5}},
            takeover={"select": "all", "require": "none", "pair": True},
            losses=[{"kind": "divergence", "on": "all"}, {"kind": "preference", "weight": 0.1}],
            train={"steps": 4, "prompts_per_step": 2, "learning_rate": 3e-3},
        ),
    }  # fmt: skip


@pytest.fixture(scope="module")
def unbroken(
    recipes: dict[str, Tree], server: RunServer, place: Path
) -> dict[str, tuple[dict[str, Any], int]]:
    """Of each recipe: what a run leaves that nobody killed, and how many calls it makes.

    In this process, whose hashes and addresses are others than those of the server's children.
    """
    results = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, recipe in recipes.items():
        train(parse_recipe(recipe), place / name)
        code, log = server.run(recipe, place / f"{name}-again", "count_calls")
        assert code == 0, log
        results[name] = (state(place / name), int(log.rsplit("calls: ", 1)[1]))
    torch.set_num_threads(threads)
    return results


def state(path: Path) -> dict[str, Any]:
    """Everything about a run that must not depend on how often it was started."""
    folder = RunFolder.read(path)
    final = max((path / "checkpoints").glob("step-*"))
    return {
        "tensors": {f.name: digest(f.read_bytes()) for f in sorted(final.glob("*.safetensors"))},
        "checkpoints": sorted(p.name for p in (path / "checkpoints").glob("step-*")),
        "metrics": without_clocks(folder),
        "evaluations": [repr(e) for e in folder.evaluations()],
        "trajectories": {
            step: digest(repr(folder.trajectories(step)).encode())
            for step in folder.trajectory_steps()
        },
    }


def assert_same(path: Path, unbroken: dict[str, Any]) -> None:
    ours = state(path)
    for part, expected in unbroken.items():
        assert ours[part] == expected, f"{part} differ"


def test_the_runs_are_worth_comparing(unbroken):
    for name, (result, _) in unbroken.items():
        groups = set(result["tensors"])
        assert {"weights.safetensors", "optimizer.safetensors"} <= groups
        averages = {group for group in groups if group.startswith("average-")}
        assert bool(averages) == (name != "full")
        assert len(result["metrics"]) >= 4 and len(result["trajectories"]) >= 4
        assert all(row["grad_norm"] > 0 for row in result["metrics"])
    shares = [row["tokens/cross_entropy"] for row in unbroken["lora"][0]["metrics"]]
    assert shares[0] > 0 and shares[-1] == 0  # the ramp
    steps = [e for e in unbroken["full"][0]["evaluations"] if "validation" in e]
    assert len(steps) == 3


NAMES = ["full", "lora", "average", "routes", "takeover"]


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_do_the_same(name, unbroken, place):
    assert_same(place / f"{name}-again", unbroken[name][0])


@pytest.mark.parametrize("name", NAMES)
def test_killed_anywhere(name, recipes, unbroken, server, tmp_path):
    """SIGKILL at calls drawn at random, again and again, until a start survives."""
    expected, calls = unbroken[name]
    draw = random.Random(name)
    kills = 0
    while kills < 4:
        code, log = server.run(
            recipes[name], tmp_path / "run", "at_call", draw.randint(calls // 8, calls * 3 // 4)
        )
        if code == 0:
            break
        assert code == -signal.SIGKILL, log
        kills += 1
    else:
        code, log = server.run(recipes[name], tmp_path / "run")
        assert code == 0, log
    assert kills >= 1
    assert_same(tmp_path / "run", expected)


IN_A_CHECKPOINT = [
    # The fault of each life, and the checkpoints that it leaves.
    (("half_file", 1), []),
    (("in_checkpoint", "save_file", 2, "before"), []),
    (("in_checkpoint", "rename", 1, "before"), []),
    (("in_checkpoint", "rename", 1, "after"), [2]),
    (("half_file", 2), [2]),
    (("in_checkpoint", "fsync", 3, "after"), [2]),  # all is written, nothing renamed
    (("in_checkpoint", "rename", 2, "after"), [2, 4, 6]),  # one too many
    (("in_checkpoint", "rename", 1, "after"), [4, 6]),  # the oldest is on its way out
    (("in_checkpoint", "rmtree", 1, "before"), [4, 6]),
]


def test_killed_inside_checkpoints(recipes, unbroken, server, tmp_path):
    path = tmp_path / "run"
    for fault, num_steps in IN_A_CHECKPOINT:
        code, log = server.run(recipes["full"], path, *fault)
        assert code == -signal.SIGKILL, log
        whole = sorted((path / "checkpoints").glob("step-*"))
        assert [checkpoints.load(p).num_steps for p in whole] == num_steps, fault
    code, log = server.run(recipes["full"], path)
    assert code == 0, log
    assert_same(path, unbroken["full"][0])
    names = sorted(p.name for p in (path / "checkpoints").iterdir())
    assert names == ["step-000004", "step-000006"]  # nothing hidden either


def test_killed_in_the_middle_of_a_line(recipes, unbroken, server, tmp_path):
    for line in (2, 4):
        code, log = server.run(recipes["full"], tmp_path / "run", "half_line", line)
        assert code == -signal.SIGKILL, log
    code, log = server.run(recipes["full"], tmp_path / "run")
    assert code == 0, log
    assert_same(tmp_path / "run", unbroken["full"][0])


def test_killed_from_outside(recipes, unbroken, server, tmp_path):
    """By the clock, as a scheduler would."""
    draw = random.Random(0)
    for _ in range(2):
        pid = server.start(recipes["lora"], tmp_path / "run")
        time.sleep(draw.uniform(0.05, 0.25))
        os.kill(pid, signal.SIGKILL)
        server.wait()
    code, log = server.run(recipes["lora"], tmp_path / "run")
    assert code == 0, log
    assert_same(tmp_path / "run", unbroken["lora"][0])


def test_an_interrupt_saves_and_explains_how_to_resume(recipes, unbroken, server, tmp_path):
    expected, calls = unbroken["lora"]
    path = tmp_path / "run"
    code, log = server.run(recipes["lora"], path, "at_call", calls * 2 // 3, "SIGINT")
    assert code == 130, log
    done = len(RunFolder.read(path).metrics())
    assert 1 <= done < 5
    assert "stopping after this step; press Ctrl-C again" in log
    stopped = f"stopped by Ctrl-C after {done} of 5 steps; everything is saved in {path}"
    assert f"Interrupted: {stopped}" in log
    assert "The same command goes on from there" in log
    assert (path / "checkpoints" / f"step-{done:06d}").is_dir()
    code, log = server.run(recipes["lora"], path)
    assert code == 0, log
    ours = state(path)
    for part in ("tensors", "metrics", "evaluations", "trajectories"):
        assert ours[part] == expected[part]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_terminated_anywhere(name, recipes, unbroken, server, tmp_path):
    """As a scheduler or a closed terminal does: every step that was recorded is also saved."""
    expected, calls = unbroken["average"]
    draw, path = random.Random(name), tmp_path / "run"
    stops = 0
    for _ in range(5):
        call = draw.randint(calls // 10, calls // 2)
        code, log = server.run(recipes["average"], path, "at_call", call, name)
        if code == 0:
            break
        assert code == 128 + getattr(signal, name), log
        assert f"stopped by {name}" in log and "Traceback" not in log
        done = len(RunFolder.read(path).metrics())
        latest = checkpoints.latest(path / "checkpoints")
        assert (checkpoints.num_steps_of(latest) if latest else 0) == done
        stops += 1
    assert stops >= 1
    if code != 0:
        code, log = server.run(recipes["average"], path)
        assert code == 0, log
    ours = state(path)
    for part in ("tensors", "metrics", "evaluations", "trajectories"):
        assert ours[part] == expected[part]


def test_a_finished_run_does_nothing_and_reports_it(recipes, unbroken, server, place, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(place / "full", path)
    before = contents(path)
    code, log = server.run(recipes["full"], path)
    assert code == 0
    assert "all 6 steps are done; nothing to train" in log
    after = contents(path)
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed <= {"environment.json", "report.html"}
    assert_same(path, unbroken["full"][0])


# ── damage ───────────────────────────────────────────────────────────────────────────────────────


def test_a_damaged_checkpoint_is_named_with_the_one_to_go_on_from(
    recipes, unbroken, server, place, tmp_path
):
    for number, damage in enumerate(("flip", "delete")):
        path = tmp_path / f"run-{number}"
        shutil.copytree(place / "full", path)
        saved = path / "checkpoints"
        file = saved / "step-000006" / "weights.safetensors"
        whole = file.read_bytes()
        if damage == "flip":
            file.write_bytes(whole[:-100] + bytes([whole[-100] ^ 4]) + whole[-99:])
        else:
            file.unlink()
        before = contents(path)
        code, log = server.run(recipes["full"], path)
        assert code == 1
        assert "CheckpointError" in log and "step-000006 is damaged" in log
        assert "Delete it to go on from step-000004" in log
        after = contents(path)
        assert {n for n in before if after[n] != before[n]} <= {"environment.json"}
        shutil.rmtree(saved / "step-000006")
        code, log = server.run(recipes["full"], path)
        assert code == 0, log
        assert_same(path, unbroken["full"][0])


@pytest.mark.parametrize("fault", ["full_disk", "read_only"])
def test_a_checkpoint_that_cannot_be_written(fault, recipes, unbroken, server, open_place):
    """The second of three; the first stays, and the run goes on from it."""
    path = open_place / "run"
    code, log = server.run(recipes["full"], path, fault, 2)
    (path / "checkpoints").chmod(0o755)
    assert code == 1, log
    assert "CheckpointError" in log and "step-000004 could not be written" in log
    assert {"full_disk": "File too large", "read_only": "Permission denied"}[fault] in log
    assert "go on from step-000002, which is intact" in log
    assert [p.name for p in (path / "checkpoints").iterdir()] == ["step-000002"]
    code, log = server.run(recipes["full"], path)
    assert code == 0, log
    assert_same(path, unbroken["full"][0])


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A folder that an unprivileged user may look into, unlike pytest's own."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


# ── what may change ──────────────────────────────────────────────────────────────────────────────


def test_the_run_section_may_change_and_checkpoints_follow_it(recipes, unbroken, server, tmp_path):
    path, recipe = tmp_path / "run", recipes["full"]
    code, log = server.run(recipe | {"run": {"checkpoint_every": 3}}, path, "half_line", 8)
    assert code == -signal.SIGKILL, log
    assert [p.name for p in (path / "checkpoints").iterdir()] == ["step-000003"]
    changed = recipe | {"run": {"checkpoint_every": 1, "keep_checkpoints": 3}}
    code, log = server.run(changed, path)
    assert code == 0, log
    names = sorted(p.name for p in (path / "checkpoints").iterdir())
    assert names == ["step-000004", "step-000005", "step-000006"]
    assert state(path)["tensors"] == unbroken["full"][0]["tensors"]


def test_another_recipe_is_refused_and_nothing_is_touched(recipes, server, place, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(place / "full", path)
    before = contents(path)
    changed = recipes["full"] | {"seed": 1}
    code, log = server.run(changed, path)
    assert code == 2
    assert "RecipeError" in log and "seed: 0 → 1" in log
    assert contents(path) == before
