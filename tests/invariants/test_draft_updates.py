"""An update from corrected drafts is the textbook's update on the same data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.gradients import accumulate, assert_equal_gradients, make_float64, take_gradients
from support.small_runs import small_recipe
from support.textbook import naive_loss

from courtside.api import train
from courtside.assemble import assemble
from courtside.runtime import Runtime
from courtside.training.loss_terms import preference_pairs
from courtside.types import Grade, Scored, Trajectory

LOSSES: dict[str, list[dict[str, Any]]] = {
    "dpo": [{"kind": "preference", "beta": 0.4}],
    "ipo": [{"kind": "preference", "beta": 0.4, "form": "ipo"}],
    "rejection sampling": [{"kind": "cross_entropy", "on": "chosen"}],
}


def with_rewards(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Sample n of a prompt has the reward n/4: no random model solves anything."""
    return [
        replace(t, grade=Grade(score=int(t.id.rpartition("-")[2]) / 4, passed=False))
        for t in trajectories
    ]


def naive(parts: Runtime, scored: list[Scored], losses: list[dict[str, Any]]) -> Any:
    pairs = [s for pair in preference_pairs(scored) for s in pair]
    reference = parts.teacher.reference
    model = parts.student.weights.model
    total, values = naive_loss(
        losses, pairs, model, {}, reference.engine.model if reference else model
    )
    total.backward()
    return take_gradients(parts.student.weights.trained), values


@pytest.mark.parametrize("budget", [1, 8192])
@pytest.mark.parametrize("name", LOSSES)
def test_chosen_pairs(name: str, budget: int, tiny_folder: Path) -> None:
    losses = LOSSES[name]
    recipe = small_recipe(
        tiny_folder,
        tasks={"kind": "arithmetic"},
        rollout={"samples_per_prompt": 3, "max_new_tokens": 6},
        drafts=[{"kind": "choose"}],
        losses=losses,
        train={"micro_batch_tokens": budget},
    )
    parts = make_float64(assemble(recipe))
    tasks = parts.tasks.batch(0, 2)
    batch = with_rewards(parts.rollout([*tasks, tasks[0]], 0))  # a task twice
    drafts = parts.drafts(batch)
    scored = parts.teacher(drafts.trajectories)
    assert drafts.counts["choose/pairs"] == 3 and len(preference_pairs(scored)) == 3
    gradients, metrics = accumulate(parts, scored)
    expected, values = naive(parts, scored, losses)
    assert_equal_gradients(gradients, expected)
    assert metrics.losses == pytest.approx(values, rel=1e-9)


def test_a_run_that_chooses_by_its_teacher(
    tiny_folder: Path, tiny_teacher_folder: Path, tmp_path: Path
) -> None:
    recipe = small_recipe(
        tiny_folder,
        tiny_teacher_folder,
        rollout={"samples_per_prompt": 4, "max_new_tokens": 6},
        drafts=[{"kind": "choose", "by": "teacher_logp"}],
        losses=[{"kind": "preference"}],
        train={"steps": 3, "prompts_per_step": 2, "learning_rate": 1e-3},
        run={"trajectories_every": 1},
    )
    run = train(recipe, tmp_path / "run")
    rows = run.metrics()
    assert [row["drafts/choose/pairs"] for row in rows] == [2, 2, 2]
    assert rows[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert run.read_costs()["drafts"].flops > 0
    stored = [item.trajectory for item in run.trajectories(2)]
    better = [t for t in stored if t.preference == "better"]
    assert len(better) == 2 and all(t.correction == "choose" for t in better)
    assert {t.draft for t in better} == {t.id for t in stored if t.preference == "worse"}
    frame = run.trajectories_frame(2)
    assert set(frame["correction"].dropna()) == {"choose"}
    assert {o.trajectory.draft for o in run.outlines(2)} == {None, *(t.draft for t in better)}


def test_a_batch_of_ties_is_no_step_and_the_run_says_so(tiny_folder: Path, tmp_path: Path) -> None:
    recipe = small_recipe(
        tiny_folder,
        tasks={"kind": "arithmetic"},
        drafts=[{"kind": "choose"}],
        losses=[{"kind": "cross_entropy", "on": "chosen"}],
        train={"steps": 2, "prompts_per_step": 2, "learning_rate": 1e-3},
    )
    run = train(recipe, tmp_path / "run")
    assert [row["drafts/choose/dropped/tie"] for row in run.metrics()] == [2, 2]
    assert any("choose/dropped/tie 4" in row["message"] for row in run.alarms())
