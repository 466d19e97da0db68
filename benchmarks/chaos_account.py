"""What became of every trajectory of a chaos run, from its folder alone.

Ids: each step has those of its batch, once. Weights: from each checkpoint the stored steps are
trained again, in this process and with a local copy of the teacher; where that leads to the next
checkpoint, its steps were trained once each and in order. On the way the sampler's log-probs are
compared with those of the version that a trajectory names, and the teacher's with the local ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from courtside.assemble import assemble
from courtside.engines.base import ScoreRequest
from courtside.recipe.load import parse_recipe
from courtside.report.folder.folder import RunFolder
from courtside.report.folder.parquet import StoredTrajectory
from courtside.run_state import model_tensors, restore
from courtside.runtime import Runtime
from courtside.seeds import trajectory_id
from courtside.training import checkpoints

MAX_LOGP_DIFFERENCE = 2e-3
"""Nats a token between float32 on a server and here."""
MAX_DRIFT = 0.02
"""Of the way between two checkpoints: the teacher's log-probs differ by rounding."""


@dataclass(kw_only=True)
class Account:
    problems: list[str] = field(default_factory=list)
    num_steps: int = 0
    num_trajectories: int = 0
    num_by_age: dict[int, int] = field(default_factory=dict)
    """Trajectories, by optimizer steps between their weights and those that they train."""
    num_intervals: int = 0
    """Between checkpoints, trained again."""
    drifts: list[float] = field(default_factory=list)
    differences: dict[str, list[float]] = field(default_factory=dict)
    """Largest of each step, in nats: sampler, teacher, trainer."""

    def check(self, holds: bool, problem: str) -> None:
        if not holds:
            self.problems.append(problem)

    def summarize(self) -> dict[str, Any]:
        largest = {name: max(values) for name, values in self.differences.items()}
        return {
            "steps": self.num_steps,
            "trajectories": self.num_trajectories,
            "trajectories_by_age": {str(k): n for k, n in sorted(self.num_by_age.items())},
            "intervals_trained_again": self.num_intervals,
            "largest_drift": max(self.drifts, default=None),
            "median_drift": statistics.median(self.drifts) if self.drifts else None,
            "largest_difference_nats": largest,
            "problems": self.problems,
        }


def account_for_run(
    folder: Path, tree: Mapping[str, Any], *, resumes: Sequence[int], teacher: Path
) -> Account:
    """`tree`: the recipe. `resumes`: steps from which its processes went on, in their order.
    `teacher`: the weights that its server has."""
    account, run = Account(), RunFolder.read(folder)
    local = {
        **tree,
        "rollout": {k: v for k, v in tree["rollout"].items() if k != "server"},
        "teacher": {"kind": "model", "model": str(teacher), "dtype": "float32"},
    }
    parts = assemble(parse_recipe(local), trains=True)
    staleness = tree["rollout"]["server"]["max_staleness"]
    stored = check_ids(account, run, parts, max_staleness=staleness, resumes=resumes)
    train_again(account, run, parts, stored)
    for name, values in account.differences.items():
        account.check(max(values) <= MAX_LOGP_DIFFERENCE, f"{name} differs by {max(values):.3g}")
    account.check(
        max(account.drifts, default=0.0) <= MAX_DRIFT,
        f"training again leads elsewhere: {max(account.drifts, default=0.0):.3g} of the way",
    )
    return account


def check_ids(
    account: Account,
    run: RunFolder,
    parts: Runtime,
    *,
    max_staleness: int,
    resumes: Sequence[int],
) -> list[list[StoredTrajectory]]:
    """Every step's trajectories."""
    steps = [row["step"] for row in run.metrics()]
    account.num_steps = len(steps)
    account.check(steps == [*range(len(steps))], "metrics: a step is missing or there twice")
    account.check(run.trajectory_steps() == steps, "trajectories of other steps than the metrics'")
    recipe = parts.recipe
    all_stored = []
    for step in sorted({*steps} & {*run.trajectory_steps()}):
        tasks = parts.tasks.batch(step, recipe.train.prompts_per_step)
        task_of = {
            trajectory_id(step, index, n): task
            for index, task in enumerate(tasks)
            for n in range(recipe.rollout.samples_per_prompt)
        }
        stored = run.trajectories(step)
        ids = [s.trajectory.id for s in stored]
        account.check(ids == sorted(task_of), f"step {step}: {len(ids)} ids, {len(set(ids))} apart")
        begin = [resume for resume in resumes if resume <= step][-1]
        version = max(begin, step - max_staleness)
        for s in stored:
            t = s.trajectory
            account.check(t.task.id == task_of[t.id].id, f"{t.id}: the task {t.task.id}")
            account.check(
                t.policy_version == version,
                f"{t.id}: sampled by version {t.policy_version}, and {version} is right",
            )
            account.check(s.student_logp is not None, f"{t.id}: not trained")
            account.check(s.teacher_logp is not None, f"{t.id}: not scored")
            age = step - (t.policy_version or 0)
            account.num_by_age[age] = account.num_by_age.get(age, 0) + 1
        account.num_trajectories += len(stored)
        all_stored.append(stored)
    return all_stored


def train_again(
    account: Account, run: RunFolder, parts: Runtime, stored: Sequence[Sequence[StoredTrajectory]]
) -> None:
    paths = sorted(run.checkpoints.glob("step-*"), key=checkpoints.num_steps_of)
    by_version: dict[int, list[StoredTrajectory]] = {}
    for s in (s for step in stored for s in step):
        by_version.setdefault(s.trajectory.policy_version or 0, []).append(s)
    points: list[tuple[int, Path | None]] = [(0, None)]
    points += [(checkpoints.num_steps_of(path), path) for path in paths]
    for (first, start), (end, goal) in pairwise(points):
        assert goal is not None
        if start is not None:
            restore(parts, checkpoints.load(start))
        begin = copy_weights(parts)
        for step in range(first, end):
            compare_sampler(account, parts, by_version.get(step, []))
            train_step_again(account, parts, step, stored[step])
        weights = checkpoints.load(goal).tensors["weights"]
        trained = copy_weights(parts)
        far = sum((weights[n] - begin[n]).pow(2).sum().item() for n in begin) ** 0.5
        off = sum((weights[n] - trained[n]).pow(2).sum().item() for n in begin) ** 0.5
        account.drifts.append(off / far)
        account.num_intervals += 1
    account.check(
        points[-1][0] == len(stored), f"{len(stored)} steps, and a checkpoint of {points[-1][0]}"
    )


def copy_weights(parts: Runtime) -> dict[str, Any]:
    return {name: w.clone() for name, w in model_tensors(parts)["weights"].items()}


def compare_sampler(account: Account, parts: Runtime, stored: Sequence[StoredTrajectory]) -> None:
    """Trajectories that say that the weights of this moment sampled them."""
    if not stored:
        return
    requests = [ScoreRequest.of_trajectory(s.trajectory) for s in stored]
    for s, scores in zip(stored, parts.local_engine.score(requests), strict=True):
        assert s.trajectory.sampler_logp is not None
        add_difference(account, "sampler", s.trajectory.sampler_logp, scores.logp_T.tolist())


def train_step_again(
    account: Account, parts: Runtime, step: int, stored: Sequence[StoredTrajectory]
) -> None:
    trajectories = [s.trajectory for s in stored]
    scored = parts.teacher(trajectories, parts.reader(trajectories).hints)
    update = parts.student.step(step, scored)
    parts.engine.load_weights(step + 1)
    for s in stored:
        id = s.trajectory.id
        assert s.student_logp is not None and s.teacher_logp is not None
        add_difference(account, "trainer", s.student_logp, update.student_logp[id])
    for s, rescored in zip(stored, scored, strict=True):
        assert rescored.target is not None and s.teacher_logp is not None
        if rescored.target.logp_T is not None:
            add_difference(account, "teacher", s.teacher_logp, rescored.target.logp_T.tolist())


def add_difference(
    account: Account, name: str, first: Sequence[float], second: Sequence[float]
) -> None:
    account.check(len(first) == len(second), f"{name}: {len(first)} and {len(second)} log-probs")
    largest = max((abs(a - b) for a, b in zip(first, second, strict=False)), default=0.0)
    account.differences.setdefault(name, []).append(largest)
