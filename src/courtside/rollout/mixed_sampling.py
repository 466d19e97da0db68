"""A share of the prompts is answered by student and teacher together, token by token."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from courtside.chat.messages import make_trajectory
from courtside.engines.base import Sampling
from courtside.engines.mixed_sampling import MixedRequest, MixedSample
from courtside.progress import PhaseProgress
from courtside.recipe.rollout import MixedSamplingConfig
from courtside.rollout.continuations import SamplingTeacher
from courtside.rollout.shares import index_tasks
from courtside.rollout.single_turn import SingleTurnRollout
from courtside.seeds import seed_for, trajectory_id
from courtside.types import Task, Trajectory

SampleMixed = Callable[[SamplingTeacher, Sequence[MixedRequest], Sampling], list[MixedSample]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedSamplingRollout:
    """Trajectories count as the student's: `sampler_logp` is that of the mixture."""

    student: SingleTurnRollout
    config: MixedSamplingConfig
    choose_teacher: Callable[[Task], SamplingTeacher]
    sample_mixed: SampleMixed

    def __call__(self, tasks: Sequence[Task], step: int) -> list[Trajectory]:
        return sorted(self.sample(index_tasks(tasks), step), key=lambda t: t.id)

    def sample(self, tasks: Mapping[int, Task], step: int) -> list[Trajectory]:
        """`tasks`: by their index in the batch, which ids and seeds follow."""
        order = sorted(tasks)
        random.Random(seed_for(self.student.seed, "mixed", step)).shuffle(order)
        num_mixed = round(self.config.fraction_at(step) * len(tasks))
        mixed = {index: tasks[index] for index in sorted(order[:num_mixed])}
        plain = {index: task for index, task in tasks.items() if index not in mixed}
        return self._sample_mixed(mixed, step) + self.student.sample(plain, step)

    def _sample_mixed(self, tasks: Mapping[int, Task], step: int) -> list[Trajectory]:
        teachers = {index: self.choose_teacher(task) for index, task in tasks.items()}
        by_name = {teacher.name: teacher for teacher in teachers.values()}
        trajectories: list[Trajectory] = []
        for name, teacher in by_name.items():
            group = [index for index in tasks if teachers[index].name == name]
            trajectories += self._sample_group(teacher, {i: tasks[i] for i in group}, step)
        return trajectories

    def _sample_group(
        self, teacher: SamplingTeacher, tasks: Mapping[int, Task], step: int
    ) -> list[Trajectory]:
        student = self.student
        keys = [(i, n) for i in tasks for n in range(student.config.samples_per_prompt)]
        requests = [
            MixedRequest(
                prompt_ids=student.template.prompt_ids(tasks[index].messages),
                teacher_prompt_ids=teacher.prompt_ids(tasks[index]),
                seed=seed_for(student.seed, "mixed", step, index, n),
            )
            for index, n in keys
        ]
        student.progress.phase = PhaseProgress(
            total=len(requests), unit="answers", max_tokens=student.sampling.max_new_tokens
        )
        samples = self.sample_mixed(teacher, requests, student.sampling)
        trajectories = []
        for (index, n), request, mixed in zip(keys, requests, samples, strict=True):
            trajectory = make_trajectory(
                tasks[index],
                request.prompt_ids,
                mixed.sample,
                id=trajectory_id(step, index, n),
                source="student",
                policy_version=step,
                temperature=student.config.temperature,
                grade=student.grade(tasks[index], mixed.sample.text),
            )
            trajectories.append(replace(trajectory, num_replaced=mixed.num_replaced))
        return trajectories
