"""Sampling ahead of the update is training on samples of older weights, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_runs import small_recipe

from courtside.assemble import assemble
from courtside.engines.base import SampleRequest, Sampling
from courtside.progress import ProgressMeter
from courtside.rollout.overlapped import OverlappedRollout
from courtside.rollout.single_turn import SingleTurnRollout
from courtside.tasks.graders import make_grader
from courtside.types import Sample, VersionSpan

STEPS = 5


class Snapshots:
    """Samples with the student's weights as they were after some optimizer step, as a server does
    that has the adapters of several steps."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.models: dict[int, Any] = {}
        self.pinned: int | None = None

    def keep(self, version: int) -> None:
        self.models[version] = deepcopy(self.engine.model)

    def sample(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Sample]:
        assert self.pinned is not None
        engine = type(self.engine)(
            self.models[self.pinned], self.engine.tokenizer, name="snapshot",
            vocab_size=self.engine.head.vocab_size, autocast=self.engine.autocast,
        )  # fmt: skip
        version = self.pinned
        return [
            replace(s, policy_versions=(VersionSpan(0, len(s.token_ids), version),))
            for s in engine.sample(requests, sampling)
        ]


def train(tiny_folder: Path, teacher: Path, losses: Any, *, max_staleness: int, ahead: bool) -> Any:
    """Trained weights, and the versions that sampled each step. `ahead`: in a thread, while the
    student trains; else right before the step, with the weights of that many steps ago."""
    torch.manual_seed(0)
    recipe = small_recipe(
        tiny_folder, teacher, losses=losses,
        student={"model": str(tiny_folder), "dtype": "float32"},
        train={"steps": STEPS, "prompts_per_step": 2, "learning_rate": 1e-2},
    )  # fmt: skip
    parts = assemble(recipe)
    snapshots = Snapshots(parts.engine)
    snapshots.keep(0)
    rollout = SingleTurnRollout(
        engine=snapshots,  # type: ignore[arg-type]
        template=parts.renderer, config=recipe.rollout, grade=make_grader(recipe.tasks),
        seed=recipe.seed,
    )  # fmt: skip
    overlapped = OverlappedRollout(
        generate=rollout.generate,
        finish=lambda answers: sorted(rollout.grade_answers(answers), key=lambda t: t.id),
        batch=lambda step: parts.tasks.batch(step, 2),
        sampler=snapshots,
        find_weights=lambda: max(snapshots.models),
        close_sampler=lambda: None,
        num_steps=STEPS,
        max_staleness=max_staleness or 1,
        progress=ProgressMeter(),
        ahead=ProgressMeter(),
    )
    versions = []
    for step in range(STEPS):
        tasks = parts.tasks.batch(step, 2)
        if ahead:
            trajectories = overlapped(tasks, step)
        else:
            snapshots.pinned = max(0, step - max_staleness)
            trajectories = rollout(tasks, step)
        versions.append({t.policy_version for t in trajectories})
        parts.student.step(step, parts.teacher(trajectories, {}))
        snapshots.keep(step + 1)
    overlapped.close()
    weights = {n: p.detach().clone() for n, p in parts.student.weights.trained.items()}
    return weights, versions


@pytest.mark.parametrize("max_staleness", [1, 2])
@pytest.mark.parametrize(
    "losses",
    [
        [{"kind": "divergence"}],
        [{"kind": "policy_gradient", "truncate": 2.0}],
        [{"kind": "policy_gradient", "ratio_gate": [0.7, 1.5]}],
    ],
    ids=["divergence", "truncated", "gated"],
)
def test_a_run_with_samples_of_older_weights(
    tiny_folder: Path, tiny_teacher_folder: Path, losses: Any, max_staleness: int
) -> None:
    """Bit for bit the run that waits, and samples with the weights of so many steps ago."""
    folders = tiny_folder, tiny_teacher_folder
    ahead, versions = train(*folders, losses, max_staleness=max_staleness, ahead=True)
    plain, same_versions = train(*folders, losses, max_staleness=max_staleness, ahead=False)
    assert versions == same_versions
    assert versions == [{max(0, step - max_staleness)} for step in range(STEPS)]
    assert all(torch.equal(ahead[name], plain[name]) for name in plain)
    fresh, _ = train(*folders, losses, max_staleness=0, ahead=False)
    assert any(not torch.equal(ahead[name], fresh[name]) for name in fresh), "staleness matters"
