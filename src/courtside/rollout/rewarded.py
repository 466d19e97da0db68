"""Gives the student's trajectories their rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from courtside.types import Task, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardedRollout:
    rollout: Callable[[Sequence[Task], int], list[Trajectory]]
    rewards: Mapping[str, Callable[[Trajectory], float | None]]
    """By name; they are called in this order for each trajectory."""

    def __call__(self, tasks: Sequence[Task], step: int) -> list[Trajectory]:
        return [self._reward(trajectory) for trajectory in self.rollout(tasks, step)]

    def _reward(self, trajectory: Trajectory) -> Trajectory:
        # Nothing is compared that another policy wrote, or that a bug in its environment ended.
        if trajectory.source != "student" or trajectory.fault is not None:
            return trajectory
        values = {name: reward(trajectory) for name, reward in self.rewards.items()}
        return replace(trajectory, rewards=values)
