"""What a checkpoint of a run holds: trained weights, moving averages and optimizer state."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from courtside.recipe.run import CHECKPOINT_STEPS
from courtside.runtime import Runtime
from courtside.training import checkpoints
from courtside.training.shards import copy_into

MAX_SAVING_FRACTION = 0.1
"""Of the time since the last checkpoint, where the recipe does not say how often to save."""


class CheckpointSchedule:
    """When checkpoints are due: every so many steps, or, where a recipe does not say how many, as
    often as they take little of the time."""

    def __init__(self, every: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.every, self._clock = every, clock
        self._seconds, self._ended = 0.0, -math.inf
        """Of the last checkpoint that this process saved."""

    def is_due(self, num_steps: int) -> bool:
        if num_steps % (self.every or CHECKPOINT_STEPS):
            return False
        since = self._clock() - self._ended
        return self.every is not None or self._seconds <= MAX_SAVING_FRACTION * since

    @contextmanager
    def time_save(self) -> Iterator[None]:
        began = self._clock()
        yield
        self._ended = self._clock()
        self._seconds = self._ended - began


def model_tensors(parts: Runtime) -> dict[str, dict[str, Any]]:
    """Trained weights and moving averages, by the name of their file in a checkpoint."""
    weights = {name: p.data for name, p in parts.student.weights.trained.items()}
    averages = {f"average-{_file_name(n)}": a.shadow for n, a in sorted(parts.averages.items())}
    return {"weights": weights, **averages}


def save_checkpoint(parts: Runtime, folder: Path, num_steps: int) -> None:
    """All ranks call it, and each writes its shards."""
    student = parts.student
    optimizer = checkpoints.optimizer_tensors(student.optimizer, student.weights.trained)
    checkpoints.save(
        folder,
        num_steps,
        {**model_tensors(parts), "optimizer": optimizer},
        keep=parts.recipe.run.keep_checkpoints,
        ranks=parts.ranks,
    )


def restore_from(parts: Runtime, path: Path) -> int:
    """Restore a checkpoint on every rank; returns its number of steps."""
    saved = checkpoints.load(path, lazily=parts.ranks.is_sharded)
    parts.ranks.exchange(None)  # all have read it: from here on they wait for each other's tensors
    restore(parts, saved)
    return saved.num_steps


def restore(parts: Runtime, saved: checkpoints.Checkpoint) -> None:
    """Copy a checkpoint's weights, optimizer state and moving averages into the parts."""
    with parts.ranks.work_apart():
        _restore_tensors(parts, saved)
    parts.engine.load_weights(saved.num_steps)


def _restore_tensors(parts: Runtime, saved: checkpoints.Checkpoint) -> None:
    for name, tensors in model_tensors(parts).items():
        copy_tensors(tensors, saved.tensors[name])
    student = parts.student
    trained = student.weights.trained
    checkpoints.restore_optimizer(student.optimizer, trained, saved.tensors["optimizer"])
    student.weights.publish()
    for average in parts.averages.values():
        average.publish()


def copy_tensors(tensors: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    assert tensors.keys() == saved.keys(), "the recipe decides the names, and it is the same"
    for name, tensor in tensors.items():
        copy_into(tensor, saved[name])


def _file_name(label: str) -> str:
    """Different labels stay different, whatever a user calls a route."""
    return quote(label, safe="")
