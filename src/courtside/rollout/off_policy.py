"""Batches that are not the student's alone: completions from data, a teacher or an expert.

A source is called as `source(tasks, step)`, with the tasks by their index in the batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Literal, Protocol

from courtside.chat.answer_boundary import PROBE_PROMPT
from courtside.chat.chat_log_rendering import trajectory_from_chat_log
from courtside.chat.incremental import IncrementalTemplate
from courtside.chat.messages import make_trajectory, message_tree
from courtside.chat.template import ChatTemplate
from courtside.engines.base import Sampling
from courtside.errors import TaskError
from courtside.progress import PhaseProgress, ProgressMeter
from courtside.recipe.rollout import RolloutConfig
from courtside.rollout.shares import batch_size, index_tasks
from courtside.rollout.single_turn import make_sampling
from courtside.seeds import seed_for, trajectory_id
from courtside.types import Grade, Message, Sample, Task, Trajectory

Grader = Callable[[Task, str], Grade | None]


class Source(Protocol):
    def __call__(self, tasks: Mapping[int, Task], step: int) -> list[Trajectory]: ...


class StudentRollout(Protocol):
    def __call__(self, tasks: Sequence[Task], step: int) -> list[Trajectory]: ...

    def sample(self, tasks: Mapping[int, Task], step: int) -> list[Trajectory]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedRollout:
    """The student samples a share of each batch, another in each step; `source` gives the rest."""

    student: StudentRollout
    source: Source
    config: RolloutConfig
    seed: int

    def __call__(self, tasks: Sequence[Task], step: int) -> list[Trajectory]:
        order, present = list(range(batch_size(tasks))), index_tasks(tasks)
        random.Random(seed_for(self.seed, "share", step)).shuffle(order)
        num_student = round(self.config.student_fraction_at(step) * len(order))
        by_student, by_source = (
            {index: present[index] for index in sorted(part) if index in present}
            for part in (order[:num_student], order[num_student:])
        )
        trajectories = self.student.sample(by_student, step) + self.source(by_source, step)
        return sorted(trajectories, key=lambda t: t.id)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetCompletions:
    """The tasks' own completions, once each."""

    template: ChatTemplate
    grade: Grader
    temperature: float
    pairs: bool = True
    """Whether a loss takes the `rejected` texts; nothing else may train on them."""

    def __call__(self, tasks: Mapping[int, Task], step: int) -> list[Trajectory]:
        return [t for index, task in tasks.items() for t in self._completions(task, index, step)]

    def _completions(self, task: Task, index: int, step: int) -> Iterator[Trajectory]:
        if task.completion is None:
            raise TaskError(
                f"task {task.id}: rollout.student_fraction < 1 with off_policy_source = 'dataset' "
                "needs a `completion` on every task, and this one has none. Add it, or use "
                "off_policy_source = 'teacher'"
            )
        answers = task.given_answers if self.pairs else task.given_answers[:1]
        preferences: Sequence[Literal["better", "worse"] | None] = (
            (None,) if len(answers) == 1 else ("better", "worse")
        )
        for number, ((text, thoughts), preference) in enumerate(
            zip(answers, preferences, strict=True)
        ):
            ids = self.template.completion_ids(task.messages, text, thoughts)
            turn_text = self.template.text(ids) if thoughts else text
            yield make_trajectory(
                task,
                self.template.prompt_ids(task.messages),
                Sample(token_ids=ids, logp=(), stop="dataset", text=turn_text),
                id=trajectory_id(step, index, number),
                source="dataset",
                policy_version=None,
                temperature=self.temperature,
                grade=self.grade(task, text),
                preference=preference,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherCompletions:
    """Samples of the teacher; what trains has the student's prompt, not the teacher's."""

    write: Callable[[Sequence[Task], Sampling, Sequence[int]], list[Sample]]
    template: ChatTemplate
    grade: Grader
    config: RolloutConfig
    seed: int
    progress: ProgressMeter = field(default_factory=ProgressMeter)

    def __call__(self, tasks: Mapping[int, Task], step: int) -> list[Trajectory]:
        keys = [(index, n) for index in tasks for n in range(self.config.samples_per_prompt)]
        if not keys:
            return []
        seeds = [seed_for(self.seed, "teacher", step, index, n) for index, n in keys]
        sampling = make_sampling(self.config)
        self.progress.phase = PhaseProgress(
            total=len(keys), unit="answers", max_tokens=sampling.max_new_tokens
        )
        samples = self.write([tasks[index] for index, _ in keys], sampling, seeds)
        return [
            make_trajectory(
                tasks[index],
                self.template.prompt_ids(tasks[index].messages),
                sample,
                id=trajectory_id(step, index, n),
                source="teacher",
                policy_version=None,
                temperature=self.config.temperature,
                grade=self.grade(tasks[index], sample.text),
            )
            for (index, n), sample in zip(keys, samples, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """Whole episodes of an environment's expert, once each."""

    expert: Callable[[Task], Sequence[Message]]
    template: IncrementalTemplate
    temperature: float

    def __call__(self, tasks: Mapping[int, Task], step: int) -> list[Trajectory]:
        return [self._demonstrate(t, trajectory_id(step, i, 0)) for i, t in tasks.items()]

    def _demonstrate(self, task: Task, id: str) -> Trajectory:
        messages = self.expert(task)
        # The expert may put messages before its first reply that are not in the task's prompt.
        prompt = tuple(takewhile(lambda message: message.role != "assistant", messages))
        log = [message_tree(message) for message in messages]
        return trajectory_from_chat_log(
            replace(task, messages=prompt), log, self.template, id=id, temperature=self.temperature
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectedRollout:
    """Adds a trajectory to imitate for each turn with an event that names the correct reply: the
    turns before it, and that reply."""

    rollout: Callable[[Sequence[Task], int], list[Trajectory]]
    template: IncrementalTemplate

    def __call__(self, tasks: Sequence[Task], step: int) -> list[Trajectory]:
        trajectories = self.rollout(tasks, step)
        corrections = [c for t in trajectories for c in self._corrections(t)]
        return sorted([*trajectories, *corrections], key=lambda t: t.id)

    def _corrections(self, trajectory: Trajectory) -> Iterator[Trajectory]:
        for index, turn in enumerate(trajectory.turns):
            texts = [text for e in turn.events if (text := e.detail("correct"))]
            if not texts:
                continue
            context = tuple(t.as_context() for t in trajectory.turns[:index])
            ids = self.template.renderer.completion_ids((PROBE_PROMPT,), texts[0])
            reply = Sample(token_ids=ids, logp=(), stop="dataset", text=texts[0])
            yield replace(
                trajectory,
                id=f"{trajectory.id}+{index:03d}",
                turns=(*context, self.template.assistant_turn(reply)),
                source="dataset",
                policy_version=None,
                stop="dataset",
                grade=None,
            )
