"""One prompt, one answer: sampled by the student or, off-policy, from data or the teacher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from courtside.chat.template import ChatTemplate
from courtside.chat.trajectories import make_trajectory
from courtside.engines.base import Engine, SampleRequest, Sampling
from courtside.errors import TaskError
from courtside.recipe import RolloutConfig
from courtside.rollout.mixing import choose_student_tasks, make_sampling, trajectory_id
from courtside.seeds import seed_for
from courtside.types import Grade, Sample, Source, Task, Trajectory

Writer = Callable[[Sequence[Task], Sampling, Sequence[int]], list[Sample]]


class Attempt(NamedTuple):
    """One of the samples of a prompt."""

    number: int
    """Of the task in its batch."""
    task: Task
    sample: int


class SingleTurnRollout:
    def __init__(
        self,
        *,
        engine: Engine,
        renderer: ChatTemplate,
        config: RolloutConfig,
        grade: Callable[[Task, str], Grade | None],
        teacher_writes: Writer | None,
        seed: int,
        pairs: bool = True,
    ):
        self.engine = engine
        self.renderer = renderer
        self.config = config
        self.grade = grade
        self.teacher_writes = teacher_writes
        self.seed = seed
        self.pairs = pairs
        """Whether a loss takes the `rejected` texts; nothing else may train on them."""
        self.sampling = make_sampling(config)

    def __call__(self, tasks: Sequence[Task], step: int) -> list[Trajectory]:
        on_policy = choose_student_tasks(self.config, tasks, seed=self.seed, step=step)
        attempts = [
            Attempt(index, task, sample)
            for index, task in enumerate(tasks)
            for sample in range(self.config.samples_per_prompt)
        ]
        trajectories = self._student([a for a in attempts if a.number in on_policy], step)
        off_policy = [a for a in attempts if a.number not in on_policy]
        if self.config.off_policy_source == "dataset":
            for index, task in {a.number: a.task for a in off_policy}.items():
                trajectories += self._from_data(task, f"{step:06d}-{index:03d}")
        elif off_policy:
            trajectories += self._teacher(off_policy, step)
        return sorted(trajectories, key=lambda trajectory: trajectory.id)

    def _student(self, attempts: Sequence[Attempt], step: int) -> list[Trajectory]:
        requests = [
            SampleRequest(
                prompt_ids=self.renderer.prompt_ids(task.messages),
                seed=seed_for(self.seed, "student", step, index, sample),
            )
            for index, task, sample in attempts
        ]
        samples = self.engine.sample(requests, self.sampling) if requests else []
        return [
            self._trajectory(
                attempt, request.prompt_ids, sample, "student", step, sample.oldest_version(step)
            )
            for attempt, request, sample in zip(attempts, requests, samples, strict=True)
        ]

    def _teacher(self, attempts: Sequence[Attempt], step: int) -> list[Trajectory]:
        assert self.teacher_writes is not None, "the recipe was checked"
        seeds = [seed_for(self.seed, "teacher", step, a.number, a.sample) for a in attempts]
        samples = self.teacher_writes([a.task for a in attempts], self.sampling, seeds)
        return [
            self._trajectory(
                attempt, self.renderer.prompt_ids(attempt.task.messages), sample, "teacher", step
            )
            for attempt, sample in zip(attempts, samples, strict=True)
        ]

    def _trajectory(
        self,
        attempt: Attempt,
        prompt_ids: tuple[int, ...],
        sample: Sample,
        source: Source,
        step: int,
        version: int | None = None,
    ) -> Trajectory:
        return make_trajectory(
            attempt.task,
            prompt_ids,
            sample,
            id=trajectory_id(step, attempt.number, attempt.sample),
            source=source,
            policy_version=version,
            temperature=self.config.temperature,
            grade=self.grade(attempt.task, sample.text),
        )

    def _from_data(self, task: Task, id: str) -> list[Trajectory]:
        if task.completion is None:
            raise TaskError(
                f"task {task.id}: rollout.student_fraction < 1 with off_policy_source = 'dataset' "
                "needs a `completion` on every task, and this one has none. Add it, or use "
                "off_policy_source = 'teacher'"
            )
        texts: list[tuple[str, Literal["better", "worse"] | None]] = [(task.completion, None)]
        if self.pairs and task.rejected is not None:
            texts = [(task.completion, "better"), (task.rejected, "worse")]
        return [
            make_trajectory(
                task,
                self.renderer.prompt_ids(task.messages),
                Sample(
                    token_ids=self.renderer.completion_ids(task.messages, text),
                    logp=(),
                    stop="dataset",
                    text=text,
                ),
                id=f"{id}-{number}",
                source="dataset",
                policy_version=None,
                temperature=self.config.temperature,
                grade=self.grade(task, text),
                preference=preference,
            )
            for number, (text, preference) in enumerate(texts)
        ]
