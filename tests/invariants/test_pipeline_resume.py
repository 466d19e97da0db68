"""A pipeline that was killed and started again ends as one that never was: bit by bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.run_server import RunServer
from support.small_runs import digest

from courtside.api import train
from courtside.recipe.pipeline import parse_pipeline
from courtside.training import checkpoints

Tree = dict[str, Any]


@pytest.fixture(scope="module")
def server() -> Iterator[RunServer]:
    server = RunServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def tree(tiny_folder: Path, tiny_teacher_folder: Path) -> Tree:
    """SFT of all weights, an RL teacher from it with LoRA, distillation into the SFT student."""
    return {
        "base": {
            "student": {"model": str(tiny_folder), "lora": {"rank": 4, "dropout": 0.2}},
            "tasks": {"kind": "arithmetic", "digits": 1, "scratchpad": False},
            "rollout": {"samples_per_prompt": 2, "max_new_tokens": 4},
            "train": {"steps": 3, "prompts_per_step": 2, "learning_rate": 5e-3},
            "evaluate": {"num_tasks": 1, "teacher": False,
                         "suites": {"minus": {"operation": "subtract"}}},
            "run": {"checkpoint_every": 2},
        },
        "stages": [
            {"name": "sft", "remove": ["student.lora"], "rollout": {"student_fraction": 0},
             "losses": [{"kind": "cross_entropy", "on": "dataset"}]},
            {"name": "teacher", "student": {"model": "stage:sft"},
             "rollout": {"student_fraction": 0.5},
             "losses": [{"kind": "policy_gradient", "advantage": "reward", "on": "student"},
                        {"kind": "cross_entropy", "on": "dataset"}]},
            {"name": "distil", "student": {"model": "stage:sft"},
             "teacher": {"kind": "model", "model": "stage:sft", "adapter": "stage:teacher"},
             "losses": [{"kind": "divergence", "support": {"kind": "top_k", "k": 8}}],
             "gate": {"suite": "minus", "max_loss": 1.0}},
        ],
    }  # fmt: skip


STAGES = ("01-sft", "02-teacher", "03-distil")


def state(path: Path) -> dict[str, Any]:
    """All weights of all stages and exports, by digest; records and gate."""
    files = {}
    for stage in STAGES:
        final = checkpoints.latest(path / "stages" / stage / "checkpoints")
        assert final is not None, f"{stage} has no checkpoint"
        files |= {f"{stage}/{f.name}": digest(f.read_bytes()) for f in final.glob("*.safetensors")}
        for export in sorted((path / "stages" / stage).glob("export*")):
            for file in export.glob("*.safetensors"):
                files[f"{stage}/{export.name}/{file.name}"] = digest(file.read_bytes())
        leftovers = [p.name for p in (path / "stages" / stage).glob(".export*")]
        assert leftovers == []
    record = json.loads((path / "stages" / f"{STAGES[-1]}.json").read_text())
    return {"files": files, "gate": record["gate"], "inputs": sorted(record["inputs"].values())}


@pytest.fixture(scope="module")
def unbroken(tree: Tree, server: RunServer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """In this process; and how many calls of the package a child makes."""
    place = tmp_path_factory.mktemp("unbroken")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    last = train(parse_pipeline(tree), place / "run", quiet=True)
    torch.set_num_threads(threads)
    assert last.path == place / "run" / "stages" / "03-distil"
    code, log = server.run(tree, place / "again", "count_calls")
    assert code == 0, log
    assert state(place / "again") == state(place / "run")
    return state(place / "run"), int(log.rsplit("calls: ", 1)[1])


def test_it_is_worth_comparing(unbroken: Any) -> None:
    files, gate = unbroken[0]["files"], unbroken[0]["gate"]
    assert {
        "01-sft/export/model.safetensors",
        "02-teacher/export-adapter/adapter_model.safetensors",
        "03-distil/export/model.safetensors",
        "03-distil/weights.safetensors",
    } <= files.keys()
    assert len(set(files.values())) == len(files)
    assert gate["passed"] is True


@pytest.mark.parametrize("seed", range(3))
def test_killed_anywhere(
    seed: int, tree: Tree, unbroken: Any, server: RunServer, tmp_path: Path
) -> None:
    expected, calls = unbroken
    draw = random.Random(seed)
    kills = 0
    for _ in range(4):
        code, log = server.run(
            tree, tmp_path / "run", "at_call", draw.randint(calls // 8, calls // 2)
        )
        if code == 0:
            break
        assert code == -signal.SIGKILL, log
        kills += 1
    else:
        code, log = server.run(tree, tmp_path / "run")
        assert code == 0, log
    assert kills >= 1
    assert state(tmp_path / "run") == expected


BETWEEN_STAGES = [
    ("train_run", 1, "after"),  # the stage is trained, and nobody has written that it is done
    ("write_record", 1, "before"),  # the same command says that it is done
    ("hand_over", 1, "before"),  # before the export
    ("write_export", 1, "before"),
    ("merge_student", 1, "after"),  # inside it: weights are in memory
    ("write_model_card", 1, "after"),  # weights are written, nothing is renamed
    ("write_export", 1, "after"),  # after it, before the next stage
    ("train_run", 1, "after"),
    ("write_export", 1, "before"),  # the adapter of the second stage
    ("write_model_card", 1, "before"),
    ("train_run", 1, "before"),
    ("train_run", 1, "after"),
    ("promote", 1, "before"),
]


def test_killed_between_stages(
    tree: Tree, unbroken: Any, server: RunServer, tmp_path: Path
) -> None:
    """One life after the other, each a step further."""
    path = tmp_path / "run"
    for fault in BETWEEN_STAGES:
        code, log = server.run(tree, path, "in_handover", *fault)
        assert code == -signal.SIGKILL, f"{fault}: {log}"
        assert not (path / "promoted").exists()
    code, log = server.run(tree, path)
    assert code == 0, log
    assert state(path) == unbroken[0]
    assert (path / "promoted" / "config.json").is_file()


@pytest.mark.parametrize("fault", [("hand_over", 1, "before"), ("merge_student", 1, "after")])
def test_killed_once_at_the_export(
    fault: tuple[Any, ...], tree: Tree, unbroken: Any, server: RunServer, tmp_path: Path
) -> None:
    code, log = server.run(tree, tmp_path / "run", "in_handover", *fault)
    assert code == -signal.SIGKILL, log
    code, log = server.run(tree, tmp_path / "run")
    assert code == 0, log
    assert "stage 1 of 3: sft, done before" in log
    assert state(tmp_path / "run") == unbroken[0]


def test_the_export_is_the_checkpoint(tree: Tree, server: RunServer, tmp_path: Path) -> None:
    """Full weights are handed over as they are, bit for bit."""
    code, log = server.run(tree, tmp_path / "run")
    assert code == 0, log
    stage = tmp_path / "run" / "stages" / "01-sft"
    final = checkpoints.latest(stage / "checkpoints")
    assert final is not None
    trained = checkpoints.load(final).tensors["weights"]
    exported = load_file(stage / "export" / "model.safetensors")
    assert trained.keys() == exported.keys()
    assert all(torch.equal(trained[name], exported[name]) for name in trained)
    assert {tensor.dtype for tensor in exported.values()} == {torch.float32}


CHILD = """
import os, sys
from courtside.engines import precision
from courtside.engines.cpu import threads
threads.busy_cores = lambda: 0.0
precision.has_native_bf16 = lambda: False
if sys.argv[3] == "killed":
    from courtside.pipeline import runner
    runner.hand_over = lambda *_: os._exit(9)
import courtside
courtside.train(sys.argv[1], sys.argv[2], quiet=True)
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_a_new_process_takes_the_threads_of_the_first(tree: Tree, tmp_path: Path) -> None:
    """Another number rounds otherwise. A process that begins with an export has trained nothing yet
    that would have set it."""
    from courtside.report.folder import toml

    small = {**tree, "stages": tree["stages"][:2]}
    (tmp_path / "p.toml").write_text(toml.dumps(small))
    variables = {
        k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    }

    def start(mode: str, **more: str) -> int:
        command = [
            sys.executable,
            "-c",
            CHILD,
            str(tmp_path / "p.toml"),
            str(tmp_path / "run"),
            mode,
        ]
        return subprocess.run(command, env=variables | more, check=False).returncode

    assert start("killed", OMP_NUM_THREADS="1") == 9
    assert start("whole") == 0
    for stage in STAGES[:2]:
        file = tmp_path / "run" / "stages" / stage / "environment.json"
        assert json.loads(file.read_text())["threads"] == 1
