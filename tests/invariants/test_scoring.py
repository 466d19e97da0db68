"""One number, computed in several places: the log-prob of a token that the student wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from courtside.assemble import assemble
from courtside.engines.base import ScoreRequest
from courtside.recipe.load import parse_recipe
from courtside.runtime import Runtime
from courtside.types import Trajectory

Prepare = Callable[..., Runtime]


@pytest.fixture
def prepare(tiny_folder: Path, tmp_path: Path) -> Prepare:
    def make(
        *,
        lora: dict[str, Any] | None = None,
        teacher: dict[str, Any] | None = None,
        rollout: dict[str, Any] | None = None,
        train: dict[str, Any] | None = None,
    ) -> Runtime:
        # Prompts of different lengths, so that batches need padding.
        lines = [
            {"prompt": "Why? " * n, "split": "train", "privileged": {"rule": "Be brief. " * n}}
            for n in range(1, 6)
        ]
        (tmp_path / "tasks.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
        adapter = {"lora": lora} if lora else {}
        tree: dict[str, Any] = {
            "student": {"model": str(tiny_folder), "device": "cpu", **adapter},
            "tasks": {"kind": "jsonl", "path": str(tmp_path / "tasks.jsonl")},
            "rollout": {
                "samples_per_prompt": 3, "max_new_tokens": 8, "temperature": 0.8, **(rollout or {})
            },
            "train": {"prompts_per_step": 4, "learning_rate": 0.01, **(train or {})},
            "teacher": teacher or {"kind": "self", "weights": "frozen"},
            "losses": [{"kind": "divergence"}],
        }  # fmt: skip
        return assemble(parse_recipe(tree))

    return make


def sample_trajectories(parts: Runtime, step: int = 0) -> list[Trajectory]:
    return parts.rollout(parts.tasks.batch(step, 4), step)


def rescored(parts: Runtime, trajectories: list[Trajectory]) -> list[list[float]]:
    requests = [
        ScoreRequest(token_ids=t.token_ids, scored=t.completion_mask, temperature=t.temperature)
        for t in trajectories
    ]
    return [scores.logp_T.tolist() for scores in parts.engine.score(requests)]


@pytest.mark.parametrize("lora", [{"rank": 2}, None])
def test_sampler_scorer_and_trainer_agree_also_after_steps(
    prepare: Prepare, lora: dict[str, Any] | None
) -> None:
    """Token by token with a cache, padded in one pass, and padded with a graph: the same number."""
    parts = prepare(lora=lora, teacher={"kind": "self", "weights": "frozen", "context": SHOUT})
    changes = []
    for step in range(3):
        trajectories = sample_trajectories(parts, step)
        scored = parts.teacher(trajectories)
        rescored_logps = rescored(parts, trajectories)
        update = parts.student.step(step, scored)
        for t, logp in zip(trajectories, rescored_logps, strict=True):
            assert t.sampler_logp == pytest.approx(logp, abs=2e-5)
            assert update.student_logp[t.id] == pytest.approx(logp, abs=2e-5)
        changes.append(sum(map(sum, rescored(parts, trajectories))) - sum(map(sum, rescored_logps)))
    assert all(abs(change) > 1e-3 for change in changes), "the steps did change the numbers"


SHOUT = {"kind": "system", "text": "SHOUT!"}


def test_a_frozen_teacher_without_context_agrees_with_the_untrained_student(
    prepare: Prepare,
) -> None:
    """The zero of the scale: no context, no training, no gap."""
    parts = prepare(lora={"rank": 2})
    trajectories = sample_trajectories(parts)
    update = parts.student.step(0, parts.teacher(trajectories))
    assert update.components["divergence"] == pytest.approx(0.0, abs=1e-6)
    for s in parts.teacher(trajectories):
        assert s.target is not None
        assert s.target.logp_T.tolist() == pytest.approx(s.trajectory.sampler_logp, abs=2e-5)


@pytest.mark.parametrize("budget", [1, 150, 400])
def test_memory_budgets_change_neither_samples_nor_scores(prepare: Prepare, budget: int) -> None:
    teacher = {"kind": "self", "weights": "live", "context": {"kind": "field", "field": "rule"}}
    wide = prepare(teacher=teacher)
    narrow = prepare(
        teacher=teacher, rollout={"kv_cache_tokens": budget}, train={"micro_batch_tokens": budget}
    )
    expected, narrow_scored = (
        wide.teacher(sample_trajectories(wide)),
        narrow.teacher(sample_trajectories(narrow)),
    )
    for a, b in zip(expected, narrow_scored, strict=True):
        assert a.trajectory.id == b.trajectory.id
        assert a.trajectory.token_ids == b.trajectory.token_ids
        assert a.trajectory.sampler_logp == pytest.approx(b.trajectory.sampler_logp, abs=2e-5)
        assert a.target is not None and b.target is not None
        torch.testing.assert_close(a.target.logp_T, b.target.logp_T, rtol=0, atol=2e-5)
    wide_update, narrow_update = (
        wide.student.step(0, expected),
        narrow.student.step(0, narrow_scored),
    )
    assert wide_update.loss == pytest.approx(narrow_update.loss, rel=1e-4)
    assert wide_update.metrics["grad_norm"] == pytest.approx(
        narrow_update.metrics["grad_norm"], rel=1e-3
    )


def test_a_trajectory_scored_alone_is_scored_the_same(prepare: Prepare) -> None:
    parts = prepare(
        teacher={"kind": "self", "weights": "live", "context": {"kind": "field", "field": "rule"}}
    )
    trajectories = sample_trajectories(parts)
    together = parts.teacher(trajectories)
    for s in together:
        (alone,) = parts.teacher([s.trajectory])
        assert s.target is not None and alone.target is not None
        torch.testing.assert_close(s.target.logp_T, alone.target.logp_T, rtol=0, atol=2e-5)
        assert s.target.num_context_tokens == alone.target.num_context_tokens > 0
