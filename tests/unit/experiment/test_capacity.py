"""How many runs fit: by the sizes of models, GPU memory and cores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from courtside.engines.loading import load_model
from courtside.experiment.capacity import (
    WORKSPACE_BYTES,
    Machine,
    choose_num_workers,
    count_parameters,
    inspect_machine,
    limit_threads,
    run_bytes,
)
from courtside.experiment.plan import Plan, read_plan
from courtside.recipe.load import parse_recipe

GIB = 2**30
ROOT = Path(__file__).resolve().parents[3]


def plan_with(folder: Path, model: str) -> Plan:
    (folder / "recipe.toml").write_text(
        f'[student]\nmodel = "{model}"\n[tasks]\nkind = "arithmetic"\n'
        '[[losses]]\nkind = "policy_gradient"\nadvantage = "reward"\n'
    )
    file = folder / "experiment.toml"
    file.write_text('seeds = [0]\nlearning_rates = [1e-5]\n[arms.a]\nrecipe = "recipe.toml"\n')
    return read_plan(file, folder / "runs")


def test_a_gpu_takes_as_many_as_its_memory_and_cores(tmp_path: Path) -> None:
    plan = plan_with(tmp_path, "smollm2-135m")
    choose = [
        choose_num_workers(plan, Machine(num_cores=cores, free_gpu_bytes=free * GIB))[0]
        for cores, free in ((16, 138), (4, 138), (16, 24), (16, 2))
    ]
    assert choose == [13, 4, 2, 1]


def test_without_a_gpu_four_cores_are_one_run(tmp_path: Path) -> None:
    plan = plan_with(tmp_path, "smollm2-135m")
    for cores, num_workers in ((1, 1), (7, 1), (64, 16)):
        assert choose_num_workers(plan, Machine(num_cores=cores, free_gpu_bytes=None))[0] == (
            num_workers
        )


def test_a_model_of_unknown_size_runs_alone(tmp_path: Path) -> None:
    plan = plan_with(tmp_path, "somebody/some-model")
    number, reason = choose_num_workers(plan, Machine(num_cores=16, free_gpu_bytes=100 * GIB))
    assert number == 1 and "--jobs" in reason


def test_models_that_are_prepared_have_the_size_of_their_student() -> None:
    plan = read_plan(ROOT / "recipes/distil-back/experiment.toml", Path("runs"))
    number, reason = choose_num_workers(plan, Machine(num_cores=16, free_gpu_bytes=100 * GIB))
    assert number > 4, reason
    plan = read_plan(ROOT / "recipes/fixes-one-by-one/experiment.toml", Path("runs"))
    number, reason = choose_num_workers(plan, Machine(num_cores=16, free_gpu_bytes=100 * GIB))
    assert number > 4, f"also of those that start from one prepared before: {reason}"


def test_parameters_are_those_of_the_model(tiny_folder: Path) -> None:
    model = load_model(str(tiny_folder), dtype=torch.float32, device=torch.device("cpu"))
    stored = {p.data_ptr(): p.numel() for p in model.parameters()}  # a tied head is stored once
    assert count_parameters(str(tiny_folder), {}) == sum(stored.values())
    tree = {
        "tasks": {"kind": "arithmetic"},
        "losses": [{"kind": "policy_gradient", "advantage": "reward"}],
    }
    full, lora = (
        run_bytes(parse_recipe({**tree, "student": {"model": str(tiny_folder), **more}}), {})
        for more in ({}, {"lora": {}})
    )
    assert full is not None and lora is not None and WORKSPACE_BYTES < lora < full


def test_the_machine_has_cores() -> None:
    machine = inspect_machine()
    assert machine.num_cores >= 1
    assert (machine.free_gpu_bytes is None) == (not torch.cuda.is_available())


def test_workers_share_the_cores_unless_the_user_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    limit_threads(1, 8)
    assert "OMP_NUM_THREADS" not in os.environ
    limit_threads(3, 8)
    assert os.environ["OMP_NUM_THREADS"] == "2"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    limit_threads(3, 8)
    assert os.environ["OMP_NUM_THREADS"] == "5"
