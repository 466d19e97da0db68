"""Runs that imitate corrected turns: a batch in which nothing went wrong is no step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_runs import small_recipe

from courtside.api import rescore, train
from courtside.assemble import assemble
from courtside.errors import RunError
from courtside.report.alarms import check_empty_update
from courtside.runtime import Runtime

WORLD = '''
from courtside.types import Event, Grade, Message, Observation, Task

class Moods:
    """Takes offence at every reply to an odd number, and says what would have pleased it."""

    size = 40

    def __init__(self, odd: bool = True, corrects: bool = True) -> None:
        self.odd, self.corrects = odd, corrects

    def task(self, index):
        split = "train" if index < 30 else "test"
        return Task(id=f"moods-{index}", split=split, grader_args={"number": index},
                    messages=(Message(role="user", content=str(index)),))

    def start(self, task):
        return Mood(self.odd and task.grader_args["number"] % 2 == 1, self.corrects)

class Mood:
    def __init__(self, offended, corrects):
        self.offended, self.details = offended, {"correct": "yes"} if corrects else {}

    def step(self, reply):
        events = (Event(kind="rude", details=self.details),) if self.offended else ()
        return Observation(messages=(), done=True, events=events)

    def grade(self):
        return Grade(score=float(not self.offended), passed=not self.offended, feedback="")
'''


@pytest.fixture(autouse=True)
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "moods.py").write_text(WORLD)
    monkeypatch.syspath_prepend(str(tmp_path))


def recipe(folder: Path, *, settings: Any = None, **changes: Any) -> Any:
    tree: dict[str, Any] = {
        "tasks": {"kind": "environment", "path": "moods:Moods", "settings": settings or {}},
        "rollout": {"samples_per_prompt": 2, "max_new_tokens": 4, "corrections": True},
        "losses": [{"kind": "cross_entropy", "on": "dataset"}],
        "train": {"steps": 6, "prompts_per_step": 1, "learning_rate": 1e-2},
        "run": {"checkpoint_every": 1, "trajectories_every": 1, "keep_checkpoints": 9},
    }
    return small_recipe(folder, **(tree | changes))


def weights_of(parts: Runtime) -> list[torch.Tensor]:
    return [p.detach().clone() for p in parts.student.weights.trained.values()]


def test_only_batches_with_a_mistake_are_steps(tiny_folder: Path, tmp_path: Path) -> None:
    run = train(recipe(tiny_folder), tmp_path / "run")
    rows = run.metrics()
    wrong = [row["error_rate"] > 0 if "error_rate" in row else False for row in rows]
    assert len(rows) == 6 and 0 < sum(wrong) < 6, "some batches of each kind"
    for row, any_wrong in zip(rows, wrong, strict=True):
        if any_wrong:
            assert row["grad_norm"] > 0 and row["loss"] > 0
            assert row["tokens/cross_entropy"] == 2 * len(b"yes") + 2  # and their end tokens
        else:
            assert row["grad_norm"] == 0 and row["loss"] == 0
            assert row["tokens/cross_entropy"] == 0 and row["loss/cross_entropy"] is None
        assert row["learning_rate"] > 0
    read = json.loads((run.path / "costs.json").read_text())["update"]["input_tokens"]
    corrected = [
        len(s.trajectory.token_ids) - 1
        for step in range(6)
        for s in run.trajectories(step)
        if s.trajectory.source == "dataset"
    ]
    assert len(corrected) == 2 * sum(wrong) and read == sum(corrected)
    assert len(rescore(run.path)) == 6


def test_a_batch_without_a_mistake_changes_no_weight(tiny_folder: Path) -> None:
    parts = assemble(recipe(tiny_folder, settings={"odd": False}))
    scored = parts.teacher(parts.rollout(parts.tasks.batch(0, 2), 0))
    before = weights_of(parts)
    update = parts.student.step(3, scored)
    assert (update.step, update.loss, update.student_logp) == (3, 0.0, {})
    assert update.num_tokens == {"cross_entropy": 0} and update.metrics["grad_norm"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(parts), strict=True))
    assert not parts.student.optimizer.state
    check_empty_update(parts.recipe, scored, update)
    with pytest.raises(RunError, match="not a zero loss"):
        check_empty_update(parts.recipe, [], parts.student.step(3, []))


def test_mistakes_without_a_correction_are_an_error(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"\d turns went wrong.*says of none.*`correct`"):
        train(recipe(tiny_folder, settings={"corrects": False}), tmp_path / "run")


def test_other_losses_train_on_what_was_right(tiny_folder: Path, tmp_path: Path) -> None:
    losses = [
        {"kind": "cross_entropy", "on": "dataset"},
        {"kind": "policy_gradient", "advantage": "reward", "on": "student"},
    ]
    changed = recipe(tiny_folder, settings={"odd": False}, losses=losses, train={"steps": 1})
    (row,) = train(changed, tmp_path / "run").metrics()
    assert row["tokens/policy_gradient"] > 0 and row["tokens/cross_entropy"] == 0
