"""Whole episodes of the teacher: off-policy trajectories in an environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from courtside.environments.base import EpisodeRequest
from courtside.rollout.continuations import SamplingTeacher
from courtside.rollout.episodes import EpisodeRollout
from courtside.seeds import seed_for, trajectory_id
from courtside.types import Task, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherEpisodes:
    """The teacher plays in the student's place; what trains has the student's prompt."""

    choose_teacher: Callable[[Task], SamplingTeacher]
    episodes: EpisodeRollout
    """The student's, with which these share the count of the environment's faults."""

    def __call__(self, tasks: Mapping[int, Task], step: int) -> list[Trajectory]:
        teachers: dict[str, SamplingTeacher] = {}
        requests: dict[str, list[EpisodeRequest]] = {}
        """By the teacher's name."""
        for index, task in tasks.items():
            teacher = self.choose_teacher(task)
            teachers[teacher.name] = teacher
            group = requests.setdefault(teacher.name, [])
            for n in range(self.episodes.config.samples_per_prompt):
                request = EpisodeRequest(
                    id=trajectory_id(step, index, n),
                    task=task,
                    seed=seed_for(self.episodes.seed, "teacher", step, index, n),
                    start=self.episodes.start,
                    prompt_ids=teacher.prompt_ids(task),
                )
                group.append(request)
        trajectories: list[Trajectory] = []
        for name, teacher in teachers.items():
            rollout = self.episodes.with_engine(teacher.engine)
            rollout.faults, rollout.names = self.episodes.faults, self.episodes.names
            with teacher.weights():
                trajectories += rollout.run_episodes(requests[name], rollout.sampling, step)
        return [trajectory.as_teacher() for trajectory in trajectories]
