from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from support.small_runs import contents

from courtside.errors import CheckpointError, UserError
from courtside.training import checkpoints
from courtside.types import SCHEMA_VERSION


def tensors(value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "weights": {"w": torch.full((3, 2), value), "b": torch.tensor(value)},
        "optimizer": {"w/step": torch.tensor(7.0)},
    }


def save(folder: Path, step: int, *, keep: int = 2) -> Path:
    return checkpoints.save(folder, step, tensors(float(step)), keep=keep)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_saved_tensors_are_loaded_unchanged(tmp_path):
    path = save(tmp_path / "new" / "checkpoints", 3)
    saved = checkpoints.load(path)
    assert saved.num_steps == 3
    assert torch.equal(saved.tensors["weights"]["w"], torch.full((3, 2), 3.0))
    assert saved.tensors["weights"]["b"].shape == ()
    assert saved.tensors["optimizer"]["w/step"] == 7.0
    assert names(path) == ["checkpoint.json", "optimizer.safetensors", "weights.safetensors"]


def test_only_the_newest_checkpoints_stay(tmp_path):
    for step in (8, 9, 10, 11):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-000010", "step-000011"]
    save(tmp_path, 12, keep=1)
    assert names(tmp_path) == ["step-000012"]
    save(tmp_path, 13, keep=5)
    assert names(tmp_path) == ["step-000012", "step-000013"]


def test_a_million_steps_are_newer_than_a_thousand(tmp_path):
    save(tmp_path, 999_999)
    assert save(tmp_path, 1_000_000) == checkpoints.latest(tmp_path)


def test_a_users_own_copies_are_not_checkpoints(tmp_path):
    path = save(tmp_path, 4)
    shutil.copytree(path, tmp_path / "step-000004-before-the-change")
    (tmp_path / "step-notes").mkdir()
    assert checkpoints.latest(tmp_path) == path
    save(tmp_path, 5, keep=1)
    assert names(tmp_path) == ["step-000004-before-the-change", "step-000005", "step-notes"]


def test_there_may_be_none(tmp_path):
    assert checkpoints.latest(tmp_path) is None
    assert checkpoints.latest(tmp_path / "nowhere") is None


def test_one_that_is_not_there_is_answered_with_those_that_are(tmp_path):
    save(tmp_path, 2)
    save(tmp_path, 4)
    assert checkpoints.at(tmp_path, 2).name == "step-000002"
    with pytest.raises(UserError, match="no checkpoint of step 3; there are: 2, 4"):
        checkpoints.at(tmp_path, 3)


@pytest.mark.parametrize(
    "name", ["checkpoint.json", "optimizer.safetensors", "weights.safetensors"]
)
def test_any_changed_byte_is_noticed(name, tmp_path):
    save(tmp_path, 2)
    file = save(tmp_path, 4) / name
    whole = file.read_bytes()
    for place in range(0, len(whole), 1 + len(whole) // 60):
        for bit in (1, 0x80):
            damaged = bytearray(whole)
            damaged[place] ^= bit
            file.write_bytes(damaged)
            with pytest.raises(CheckpointError) as caught:
                checkpoints.load(file.parent)
            assert "step-000004 is damaged" in str(caught.value)
            assert "Delete it to go on from step-000002" in str(caught.value)
    file.write_bytes(whole)
    assert checkpoints.load(file.parent).num_steps == 4


@pytest.mark.parametrize(
    "name", ["checkpoint.json", "optimizer.safetensors", "weights.safetensors"]
)
def test_short_and_missing_files_are_noticed(name, tmp_path):
    file = save(tmp_path, 4) / name
    whole = file.read_bytes()
    for size in (0, 1, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"step-000004 is damaged.*start anew"):
            checkpoints.load(file.parent)
    file.unlink()
    with pytest.raises(CheckpointError, match="step-000004 is damaged"):
        checkpoints.load(file.parent)


def test_a_newer_schema_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
    path = save(tmp_path, 1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"newer courtside.*Update courtside"):
        checkpoints.load(path)


def test_leftovers_of_a_kill_are_swept_away(tmp_path):
    save(tmp_path, 1)
    for name in (".writing-000002", ".deleting-step-000000"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights.safetensors").write_bytes(b"half")
    assert checkpoints.latest(tmp_path).name == "step-000001"
    save(tmp_path, 2)
    assert names(tmp_path) == ["step-000001", "step-000002"]


@pytest.mark.parametrize("moment", ["save_file", "fsync", "rename", "checkpoint.json"])
def test_a_full_disk_leaves_the_older_ones(moment, tmp_path, monkeypatch):
    save(tmp_path, 2)
    before = contents(tmp_path)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    if moment == "save_file":
        monkeypatch.setattr(checkpoints, "save_file", full)
    elif moment == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    elif moment == "rename":
        monkeypatch.setattr(Path, "rename", full)
    else:
        monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path, 4)
    monkeypatch.undo()
    message = str(caught.value)
    assert "step-000004 could not be written" in message and "No space left" in message
    assert "go on from step-000002, which is intact" in message and "Free some space" in message
    assert contents(tmp_path) == before
    assert checkpoints.load(checkpoints.latest(tmp_path)).num_steps == 2
    save(tmp_path, 4)


def test_nothing_is_pickled(tmp_path):
    path = save(tmp_path, 1)
    for file in path.iterdir():
        if file.suffix == ".json":
            json.loads(file.read_text())
        else:
            size = int.from_bytes(file.read_bytes()[:8], "little")
            json.loads(file.read_bytes()[8 : 8 + size])


def test_the_optimizer_is_restored_bit_by_bit():
    def fresh():
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(4, 4))
        return {"w": parameter}, torch.optim.AdamW([parameter], lr=0.1)

    def go(trained, optimizer, steps):
        for n in steps:
            trained["w"].grad = torch.sin(trained["w"].detach() * (n + 1))
            optimizer.step()

    trained, optimizer = fresh()
    assert checkpoints.optimizer_tensors(optimizer, trained) == {}
    go(trained, optimizer, range(3))
    saved = {k: v.clone() for k, v in checkpoints.optimizer_tensors(optimizer, trained).items()}
    weights = trained["w"].detach().clone()
    go(trained, optimizer, range(3, 6))

    other, restored = fresh()
    other["w"].data.copy_(weights)
    checkpoints.restore_optimizer(restored, other, saved)
    go(other, restored, range(3, 6))
    assert torch.equal(other["w"], trained["w"])
