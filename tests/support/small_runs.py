"""Recipes over the tiny models that train in a fraction of a second, and how to look at a run."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from courtside.api import train
from courtside.recipe import Recipe
from courtside.recipe.load import parse_recipe
from courtside.report.folder.folder import RunFolder


def small_tree(student: Path, teacher: Path | None = None, /, **changes: Any) -> dict[str, Any]:
    """A recipe's plain tree; `changes` replace whole sections."""
    tree: dict[str, Any] = {
        "student": {"model": str(student)},
        "tasks": {"kind": "instructions", "instruction_in_prompt": False},
        "rollout": {"samples_per_prompt": 2, "max_new_tokens": 6},
        "losses": [{"kind": "divergence"}],
        "train": {"steps": 5, "prompts_per_step": 2, "learning_rate": 1e-3},
        "evaluate": {"num_tasks": 2},
        "run": {"checkpoint_every": 2},
    }
    if teacher is not None:
        tree["teacher"] = {"kind": "model", "model": str(teacher)}
    return tree | changes


def small_recipe(student: Path, teacher: Path | None = None, /, **changes: Any) -> Recipe:
    return parse_recipe(small_tree(student, teacher, **changes))


def train_until_killed(recipe: Recipe, folder: Path, step: int) -> None:
    """In a process of its own, which is killed when it records that step.

    Not a fork: torch's threads of the parent do not exist in one, and a child waits for them. As
    many threads as here: another number rounds otherwise.
    """
    args = (recipe, folder, step, torch.get_num_threads())
    child = get_context("spawn").Process(target=_train_until_killed, args=args)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL


def _train_until_killed(recipe: Recipe, folder: Path, step: int, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    record = RunFolder.record

    def record_or_kill(self: RunFolder, current: int, *args: Any, **kwargs: Any) -> Any:
        if current == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return record(self, current, *args, **kwargs)

    RunFolder.record = record_or_kill  # type: ignore[method-assign]
    train(recipe, folder)


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def contents(folder: Path) -> dict[str, str]:
    """A digest of every file below a folder, to see that nothing was touched."""
    return {
        str(path.relative_to(folder)): digest(path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def digest(content: bytes) -> str:
    """Short: pytest would spend minutes on what is different in two megabytes."""
    return hashlib.sha256(content).hexdigest()[:16]


def without_clocks(folder: RunFolder) -> list[dict[str, Any]]:
    """Metrics, but what depends on the clock."""
    return [
        {key: v for key, v in row.items() if not key.startswith(("seconds/", "tokens_per_second"))}
        for row in folder.metrics()
    ]
