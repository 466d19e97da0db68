"""Atomic checkpoints with checksums.

A checkpoint is written to a temporary folder, flushed to disk and renamed, so a run that is killed
in the middle leaves the older ones intact. Every file's checksum is stored and verified on loading,
that of `checkpoint.json` inside itself. Only safetensors and JSON are written or read.

Several ranks write their own shards, side by side and at the same time: rows of each tensor, in the
order of the ranks (`weights-00001-of-00002.safetensors`). Whoever loads a checkpoint gets whole
tensors, so it resumes with any number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from courtside.errors import CheckpointError, UserError
from courtside.files import read_regular_file, require_regular_file
from courtside.ranks import ALONE, Ranks
from courtside.training.optimizer import OffloadedAdamW
from courtside.training.shards import is_sharded, local_rows, shard_like
from courtside.types import SCHEMA_VERSION

Tensors = Mapping[str, Mapping[str, Tensor]]
"""Group (weights, optimizer, average-…) → name → tensor."""

NAME = re.compile(r"step-(\d+)")
"""A checkpoint's folder; others, such as a user's renamed copy, are ignored."""
PART = re.compile(r"-\d{5}-of-\d{5}$")
"""What the file of one rank's shards has after its group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    num_steps: int
    """Optimizer steps done: the next one has this number."""
    tensors: Tensors


def save(
    folder: Path, num_steps: int, tensors: Tensors, *, keep: int, ranks: Ranks = ALONE
) -> Path:
    """All ranks call it, each with its shards; the leader publishes what they wrote."""
    target = folder / f"step-{num_steps:06d}"
    work = folder / f".writing-{num_steps:06d}"
    try:
        if ranks.is_leader:
            folder.mkdir(parents=True, exist_ok=True)
            _sweep(folder)
            work.mkdir()
        ranks.exchange(None)  # the folder is there
        sums = ranks.gather_dicts(_write_files(work, tensors, ranks))
        if not ranks.is_leader:
            return target
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
        if ranks.size == 1:  # else the others may still write there, and the next save sweeps it
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


def _write_files(work: Path, tensors: Tensors, ranks: Ranks) -> dict[str, str]:
    """A file for each group; returns their checksums."""
    sums = {}
    suffix = "" if ranks.size == 1 else f"-{ranks.rank + 1:05d}-of-{ranks.size:05d}"
    for group, group_tensors in tensors.items():
        file = work / f"{group}{suffix}.safetensors"
        save_file(
            {
                name: local_rows(tensor).detach().contiguous().cpu()
                for name, tensor in group_tensors.items()
                if ranks.is_leader or is_sharded(tensor)
            },
            file,
        )
        _sync(file)
        sums[file.name] = _checksum(file)
    return sums


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


def load(path: Path, *, lazily: bool = False) -> Checkpoint:
    """`lazily`: a tensor is read when it is asked for, and not held."""
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
        files: dict[str, list[Path]] = {}
        for name in sorted(about["sums"]):  # shards in the order of the ranks
            group = PART.sub("", name.removesuffix(".safetensors"))
            files.setdefault(group, []).append(path / name)
        tensors: Tensors = {group: WholeTensors(files[group]) for group in sorted(files)}
        if not lazily:
            tensors = {group: dict(whole.items()) for group, whole in tensors.items()}
    except (OSError, KeyError, ValueError, SafetensorError) as error:  # ValueError: not JSON
        raise CheckpointError(_damaged(path, f"{type(error).__name__}: {error}")) from error
    return Checkpoint(num_steps=about["num_steps"], tensors=tensors)


class WholeTensors(Mapping[str, Tensor]):
    """The tensors of one group, from a file or from the shards of several ranks."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = [safe_open(file, framework="pt") for file in files]
        self._parts: dict[str, list[Any]] = {}
        for file in self._files:
            names: list[str] = file.keys()  # type: ignore[no-untyped-call]
            for name in names:
                self._parts.setdefault(name, []).append(file)

    def __getitem__(self, name: str) -> Tensor:
        parts: list[Tensor] = [file.get_tensor(name) for file in self._parts[name]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


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
            state = {
                key: shard_like(parameter, tensor) if tensor.ndim else tensor.to(parameter.device)
                for key, tensor in state.items()
            }
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
    require_regular_file(path)
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
