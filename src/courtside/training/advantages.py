"""Advantages from rewards: each trajectory against the others of its prompt.

They are decided for a whole optimizer step, as they must not depend on micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from courtside.errors import TaskError
from courtside.losses.policy_gradient import group_advantage
from courtside.recipe.losses import PolicyGradientLoss
from courtside.types import Scored, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardAdvantages:
    """Of one loss in one step."""

    by_token: Mapping[str, tuple[float, ...]]
    """By trajectory id: the advantage of each completion token."""
    zero_variance: frozenset[str]
    """Ids of trajectories in groups where every advantage is 0: equal rewards, and no turn that
    answers for an error of its own. They train nothing."""
    num_groups: int
    num_zero_variance_groups: int


def compute_advantages(loss: PolicyGradientLoss, on: Sequence[Scored]) -> RewardAdvantages:
    """A group is all trajectories of one task."""
    # An episode that a bug of its environment ended has no reward, and is not compared.
    compared = [s.trajectory for s in on if s.trajectory.fault is None]
    whole = _compare_rewards(loss, compared)
    penalty = _penalties(loss, compared)
    by_token = {s.trajectory.id: (0.0,) * s.trajectory.num_completion_tokens for s in on} | {
        t.id: tuple(whole[t.id] + penalty.get((t.id, turn), 0.0) for turn in t.turn_of)
        for t in compared
    }
    groups: dict[str, list[str]] = {}
    for s in on:
        groups.setdefault(s.trajectory.task.id, []).append(s.trajectory.id)
    flat_groups = [ids for ids in groups.values() if not any(any(by_token[id]) for id in ids)]
    return RewardAdvantages(
        by_token=by_token,
        zero_variance=frozenset(id for ids in flat_groups for id in ids),
        num_groups=len(groups),
        num_zero_variance_groups=len(flat_groups),
    )


def _compare_rewards(
    loss: PolicyGradientLoss, trajectories: Sequence[Trajectory]
) -> Mapping[str, float]:
    rewards = []
    for trajectory in trajectories:
        if trajectory.grade is None:
            raise TaskError(
                f"task {trajectory.task.id} has no grader, so it gives no reward. Name a grader "
                "on the tasks, or use advantage = 'teacher_gap'"
            )
        rewards.append(trajectory.grade.score)
    task_ids = sorted({trajectory.task.id for trajectory in trajectories})
    number = {id: i for i, id in enumerate(task_ids)}
    advantage = group_advantage(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor([number[trajectory.task.id] for trajectory in trajectories]),
        scale_by_std=loss.scale_by_std,
        baseline=loss.group_baseline,
    )
    return dict(zip((t.id for t in trajectories), advantage.tolist(), strict=True))


def _penalties(
    loss: PolicyGradientLoss, trajectories: Sequence[Trajectory]
) -> dict[tuple[str, int], float]:
    """−penalty · (error − mean error of the group's turns): a turn answers for its own error."""
    if not loss.turn_penalty:
        return {}
    kinds = loss.penalized_events
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.task.id, []).append(trajectory)
    penalties: dict[tuple[str, int], float] = {}
    for group in groups.values():
        wrong = {
            (t.id, i): float(any(kinds is None or e.kind in kinds for e in turn.events))
            for t in group
            for i, turn in enumerate(t.turns)
            if any(turn.completion_mask)
        }
        mean = sum(wrong.values()) / len(wrong)
        penalties |= {turn: -loss.turn_penalty * (error - mean) for turn, error in wrong.items()}
    return penalties
