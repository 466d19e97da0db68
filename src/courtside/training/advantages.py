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
from courtside.recipe.rewards import Reward
from courtside.types import Scored, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardAdvantages:
    """Of one loss in one step."""

    by_token: Mapping[str, tuple[float, ...]]
    """By trajectory id: the advantage of each completion token."""
    zero_variance: frozenset[str]
    """Ids of trajectories in groups where every advantage is 0: equal rewards, and no turn that
    answers for an error of its own. They train nothing; empty with a reward of single tokens."""
    mean: float | None
    """Of the sums of rewards; None: no trajectory has one, or the reward is the grade."""
    reference_kl: float
    """β of −β·(log μ − log ref), which the update adds to the advantage of each token; 0: none."""
    num_groups: int
    num_zero_variance_groups: int


def compute_advantages(
    loss: PolicyGradientLoss, on: Sequence[Scored], rewards: Mapping[str, Reward]
) -> RewardAdvantages:
    """A group is all trajectories of one task. `rewards`: by name; empty: the grade counts."""
    reference_kl = sum(r.weight for r in rewards.values() if r.kind == "reference_kl")
    rewards = {name: r for name, r in rewards.items() if r.kind != "reference_kl"}
    # Without a reward (a bug ended the episode, or user code raised) there is nothing to compare.
    totals = {s.trajectory.id: sum_rewards(s.trajectory, rewards) for s in on}
    compared = [s.trajectory for s in on if totals[s.trajectory.id] is not None]
    whole = _compare_rewards(loss, compared, [totals[t.id] or 0.0 for t in compared])
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
        zero_variance=frozenset(id for ids in flat_groups if not reference_kl for id in ids),
        reference_kl=reference_kl,
        mean=_mean([totals[t.id] or 0.0 for t in compared]) if rewards else None,
        num_groups=len(groups),
        num_zero_variance_groups=len(flat_groups),
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def sum_rewards(trajectory: Trajectory, rewards: Mapping[str, Reward]) -> float | None:
    """Σ weight · reward; None: there is none."""
    if trajectory.fault is not None:
        return None
    if not rewards:
        if trajectory.grade is None:
            raise TaskError(
                f"task {trajectory.task.id} has no grader, so it gives no reward. Name a grader "
                "on the tasks, or use advantage = 'teacher_gap'"
            )
        return trajectory.grade.score
    if missing := rewards.keys() - trajectory.rewards.keys():
        raise TaskError(
            f"trajectory {trajectory.id} has no reward {sorted(missing)[0]!r}: they are given to "
            "the student's samples when they are sampled. Set the loss's on = 'student'; rescore a "
            "run with the rewards that it had"
        )
    values = {name: trajectory.rewards[name] for name in rewards}
    if None in values.values():
        return None
    return sum(rewards[name].weight * (value or 0.0) for name, value in values.items())


def _compare_rewards(
    loss: PolicyGradientLoss, trajectories: Sequence[Trajectory], rewards: Sequence[float]
) -> Mapping[str, float]:
    """By trajectory id."""
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
