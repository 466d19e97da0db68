"""One prompt, one answer: by the student or, off-policy, from data or the teacher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from courtside.chat.template import ChatTemplate
from courtside.chat.trajectories import make_trajectory
from courtside.engines.base import Engine, SampleRequest, Sampling
from courtside.errors import TaskError
from courtside.recipe import RolloutConfig
from courtside.rollout.mixing import choose_student_tasks, make_sampling, trajectory_id
from courtside.seeds import seed_for
from courtside.types import Grade, Sample, Source, Task, Trajectory

Writer = Callable[[Sequence[Task], Sampling, Sequence[int]], list[Sample]]


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
        own = choose_student_tasks(self.config, tasks, seed=self.seed, step=step)
        slots = [
            (index, task, sample)
            for index, task in enumerate(tasks)
            for sample in range(self.config.samples_per_prompt)
        ]
        mine = [slot for slot in slots if slot[0] in own]
        rest = [(i, task) for i, task in enumerate(tasks) if i not in own]
        trajectories = self._student(mine, step)
        if rest and self.config.off_policy_source == "dataset":
            for index, task in rest:
                trajectories += self._from_data(task, f"{step:06d}-{index:03d}")
        elif rest:
            trajectories += self._teacher([slot for slot in slots if slot[0] not in own], step)
        return sorted(trajectories, key=lambda trajectory: trajectory.id)

    def _student(self, slots: Sequence[tuple[int, Task, int]], step: int) -> list[Trajectory]:
        prompts = {index: self.renderer.prompt_ids(task.messages) for index, task, _ in slots}
        requests = [
            SampleRequest(
                prompt_ids=prompts[index], seed=seed_for(self.seed, "student", step, index, sample)
            )
            for index, _, sample in slots
        ]
        written = self.engine.sample(requests, self.sampling) if requests else []
        return [
            self._trajectory(
                task, drawn, source="student", version=step, id=trajectory_id(step, index, sample)
            )
            for (index, task, sample), drawn in zip(slots, written, strict=True)
        ]

    def _teacher(self, slots: Sequence[tuple[int, Task, int]], step: int) -> list[Trajectory]:
        assert self.teacher_writes is not None, "the recipe was checked"
        seeds = [seed_for(self.seed, "teacher", step, index, sample) for index, _, sample in slots]
        written = self.teacher_writes([task for _, task, _ in slots], self.sampling, seeds)
        return [
            self._trajectory(
                task, drawn, source="teacher", version=None, id=trajectory_id(step, index, sample)
            )
            for (index, task, sample), drawn in zip(slots, written, strict=True)
        ]

    def _trajectory(
        self, task: Task, drawn: Sample, *, source: Source, version: int | None, id: str
    ) -> Trajectory:
        return make_trajectory(
            task,
            self.renderer.prompt_ids(task.messages),
            drawn,
            id=id,
            source=source,
            policy_version=version,
            temperature=self.config.temperature,
            grade=self.grade(task, drawn.text),
        )

    def _from_data(self, task: Task, id: str) -> list[Trajectory]:
        if task.completion is None:
            raise TaskError(
                f"task {task.id}: rollout.student_fraction < 1 with off_policy_source = "
                "'dataset' needs a "
                "`completion` on every task, and this one has none. Add it, or use "
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
