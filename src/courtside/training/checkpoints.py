"""Atomic checkpoints with checksums.

A checkpoint is written to a temporary folder, flushed to disk and renamed, so a run that is killed
in the middle leaves the older ones intact. Every file's checksum is stored and verified on loading,
that of `checkpoint.json` inside itself. Only safetensors and JSON are written or read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from courtside.errors import CheckpointError, UserError
from courtside.files import read_regular_file
from courtside.training.optimizer import OffloadedAdamW
from courtside.types import SCHEMA_VERSION

Tensors = Mapping[str, Mapping[str, Tensor]]
"""Group (weights, optimizer, average-…) → name → tensor."""

NAME = re.compile(r"step-(\d+)")
"""A checkpoint's folder; others, such as a user's renamed copy, are ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    num_steps: int
    """Optimizer steps done: the next one has this number."""
    tensors: Tensors


def save(folder: Path, num_steps: int, tensors: Tensors, *, keep: int) -> Path:
    target = folder / f"step-{num_steps:06d}"
    work = folder / f".writing-{num_steps:06d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        work.mkdir()
        sums = {}
        for group, group_tensors in tensors.items():
            file = work / f"{group}.safetensors"
            save_file(
                {name: t.detach().contiguous().cpu() for name, t in group_tensors.items()}, file
            )
            _sync(file)
            sums[file.name] = _checksum(file)
        about: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "num_steps": num_steps}
        about |= {"sums": sums}
        about |= {"sum": _checksum_of_json(about)}
        (work / "checkpoint.json").write_text(json.dumps(about, indent=1))
        _sync(work / "checkpoint.json")
        if target.exists():  # the same step, saved again after a resume
            _delete(target)
        work.rename(target)
        _sync(folder)
        _prune(folder, keep)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(work, ignore_errors=True)
        older = _all(folder)
        fallback = "There is no older checkpoint"
        if older:
            fallback = f"The run can go on from {older[-1].name}, which is intact"
        raise CheckpointError(
            f"{target} could not be written: {error}. {fallback}. Free some space or make the "
            "folder writable, then run the same command again"
        ) from error
    return target


def tidy(folder: Path, *, keep: int) -> None:
    """Remove what an interrupted `save` left."""
    try:
        _sweep(folder)
        _prune(folder, keep)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: old checkpoints could not be removed: {error}. The newest is intact. Make "
            "the folder writable, then run the same command again"
        ) from error


def latest(folder: Path) -> Path | None:
    paths = _all(folder)
    return paths[-1] if paths else None


def at(folder: Path, num_steps: int) -> Path:
    path = folder / f"step-{num_steps:06d}"
    if not path.is_dir():
        have = ", ".join(str(num_steps_of(p)) for p in _all(folder)) or "none"
        raise UserError(
            f"{folder}: no checkpoint of step {num_steps}; there are: {have}. Name one of those"
        )
    return path


def load(path: Path) -> Checkpoint:
    try:
        about = json.loads(read_regular_file(path / "checkpoint.json"))
        if about.pop("sum") != _checksum_of_json(about):
            raise CheckpointError(_damaged(path, "the checksum of checkpoint.json is wrong"))
        if about["schema_version"] > SCHEMA_VERSION:
            raise CheckpointError(
                f"{path}: written by a newer courtside (schema {about['schema_version']}, this one "
                f"reads {SCHEMA_VERSION}). Update courtside"
            )
        for name, expected in about["sums"].items():
            if _checksum(path / name) != expected:
                raise CheckpointError(_damaged(path, f"the checksum of {name} is wrong"))
        tensors = {
            name.removesuffix(".safetensors"): load_file(path / name) for name in about["sums"]
        }
    except (OSError, KeyError, ValueError, SafetensorError) as error:  # ValueError: not JSON
        raise CheckpointError(_damaged(path, f"{type(error).__name__}: {error}")) from error
    return Checkpoint(num_steps=about["num_steps"], tensors=tensors)


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, trained: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """`name/exp_avg` and so on; empty before the first step."""
    return {
        f"{name}/{key}": torch.as_tensor(value)
        for name, parameter in trained.items()
        for key, value in (
            optimizer.state_tensors(parameter)
            if isinstance(optimizer, OffloadedAdamW)
            else optimizer.state.get(parameter, {})
        ).items()
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    trained: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
) -> None:
    states: dict[str, dict[str, Tensor]] = {}
    for full, tensor in tensors.items():
        name, _, key = full.rpartition("/")
        states.setdefault(name, {})[key] = tensor
    for name, state in states.items():
        parameter = trained[name]
        if isinstance(optimizer, OffloadedAdamW):
            optimizer.load_state_tensors(parameter, state)
        else:
            # All of it: the step counter of a fused AdamW is on the device of the parameter.
            state = {key: tensor.to(parameter.device) for key, tensor in state.items()}
            optimizer.state[parameter].update(state)


def _damaged(path: Path, reason: str) -> str:
    remaining = [p.name for p in _all(path.parent) if p != path]
    fix = "Delete the run folder to start anew"
    if remaining:
        fix = f"Delete it to go on from {remaining[-1]}"
    return f"checkpoint {path} is damaged ({reason}). {fix}; nothing else was touched"


def num_steps_of(path: Path) -> int:
    """Optimizer steps of a checkpoint, from its name."""
    match = NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _all(folder: Path) -> list[Path]:
    paths = [p for p in folder.glob("step-*") if NAME.fullmatch(p.name) and p.is_dir()]
    return sorted(paths, key=num_steps_of)


def _sweep(folder: Path) -> None:
    for leftover in (*folder.glob(".writing-*"), *folder.glob(".deleting-*")):
        shutil.rmtree(leftover)


def _prune(folder: Path, keep: int) -> None:
    for old in _all(folder)[:-keep]:
        _delete(old)


def _delete(path: Path) -> None:
    """Renamed first, so that an interruption leaves no incomplete checkpoint under its name."""
    hidden = path.with_name(f".deleting-{path.name}")
    path.rename(hidden)
    shutil.rmtree(hidden)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksum_of_json(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
