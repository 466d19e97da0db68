"""From a recipe's losses to streams: which tokens each component trains on, and with what numbers.

Everything here is decided for a whole optimiser step at once, before it is cut into micro-batches:
denominators and group-relative advantages must not depend on the cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from courtside.config import Loss
from courtside.errors import TaskError
from courtside.losses.policy_gradient import group_advantage
from courtside.types import Scored


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One loss of the recipe, for one optimiser step."""

    name: str
    loss: Loss
    on: frozenset[str]
    """Ids of the trajectories it is taken on."""
    denominator: int
    """Trained tokens over the whole step; for preferences, pairs."""
    advantage: Mapping[str, float]
    """By trajectory id: the advantage from rewards, or a preference's coefficient (see `step`)."""


def components(
    losses: Sequence[Loss], names: Sequence[str], scored: Sequence[Scored]
) -> list[Component]:
    result = []
    for loss, name in zip(losses, names, strict=True):
        on = [s for s in scored if applies(loss, s)]
        tokens = sum(s.trajectory.num_chosen for s in on)
        result.append(
            Component(
                name=name,
                loss=loss,
                on=frozenset(s.trajectory.id for s in on),
                denominator=len(pairs(on)) if loss.kind == "preference" else tokens,
                advantage=_rewards(loss, on),
            )
        )
    return result


def applies(loss: Loss, scored: Scored) -> bool:
    """Whether a trajectory has what the loss needs; where not, it is no part of its mean."""
    trajectory = scored.trajectory
    if loss.kind == "preference":
        return trajectory.preference is not None
    if loss.on not in ("all", trajectory.source):
        return False
    if loss.kind == "cross_entropy":
        return trajectory.preference != "worse"
    if loss.kind == "policy_gradient" and loss.advantage == "reward":
        return True
    return scored.target is not None


def pairs(scored: Sequence[Scored]) -> list[tuple[Scored, Scored]]:
    """(better, worse) of each preference pair. A task that is in the batch twice has two pairs."""
    sides: dict[str, tuple[list[Scored], list[Scored]]] = {}
    for s in scored:
        if s.trajectory.preference is not None:
            better, worse = sides.setdefault(s.trajectory.task.id, ([], []))
            (better if s.trajectory.preference == "better" else worse).append(s)
    return [pair for two in sides.values() for pair in zip(*two, strict=True)]


def _rewards(loss: Loss, on: Sequence[Scored]) -> Mapping[str, float]:
    if loss.kind != "policy_gradient" or loss.advantage != "reward" or not on:
        return {}
    rewards = []
    for s in on:
        if s.trajectory.grade is None:
            raise TaskError(
                f"task {s.trajectory.task.id} has no grader, so it gives no reward. Name a grader "
                "on the tasks, or use advantage = 'teacher_gap'"
            )
        rewards.append(s.trajectory.grade.score)
    task_ids = sorted({s.trajectory.task.id for s in on})
    number = {id: i for i, id in enumerate(task_ids)}
    advantage = group_advantage(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor([number[s.trajectory.task.id] for s in on]),
        scale_by_std=loss.scale_by_std,
    )
    return dict(zip((s.trajectory.id for s in on), advantage.tolist(), strict=True))
