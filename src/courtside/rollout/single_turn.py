"""One prompt, one answer, sampled by the student."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from courtside.chat.messages import make_trajectory
from courtside.chat.template import ChatTemplate
from courtside.engines.base import Engine, SampleRequest, Sampling
from courtside.progress import PhaseProgress, ProgressMeter
from courtside.recipe.rollout import RolloutConfig
from courtside.rollout.shares import index_tasks
from courtside.seeds import seed_for, trajectory_id
from courtside.types import Grade, Sample, Task, Trajectory


def make_sampling(config: RolloutConfig) -> Sampling:
    return Sampling(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        stop=config.stop,
    )


class Answer(NamedTuple):
    """What the student sampled for a prompt, before anybody has looked at it."""

    id: str
    task: Task
    prompt_ids: tuple[int, ...]
    sample: Sample
    step: int


@dataclass(kw_only=True)
class SingleTurnRollout:
    engine: Engine
    template: ChatTemplate
    config: RolloutConfig
    grade: Callable[[Task, str], Grade | None]
    seed: int
    progress: ProgressMeter = field(default_factory=ProgressMeter)

    def __post_init__(self) -> None:
        self.sampling = replace(make_sampling(self.config), return_routed_experts=True)

    def __call__(self, tasks: Sequence[Task], step: int) -> list[Trajectory]:
        return sorted(self.sample(index_tasks(tasks), step), key=lambda t: t.id)

    def sample(self, tasks: Mapping[int, Task], step: int) -> list[Trajectory]:
        """`tasks`: by their index in the batch, which ids and seeds follow."""
        return self.grade_answers(self.generate(tasks, step))

    def generate(self, tasks: Mapping[int, Task], step: int) -> list[Answer]:
        keys = [(index, n) for index in tasks for n in range(self.config.samples_per_prompt)]
        requests = [
            SampleRequest(
                prompt_ids=self.template.prompt_ids(tasks[index].messages),
                seed=seed_for(self.seed, "student", step, index, n),
            )
            for index, n in keys
        ]
        self.progress.phase = PhaseProgress(
            total=len(requests), unit="answers", max_tokens=self.sampling.max_new_tokens
        )
        samples = self.engine.sample(requests, self.sampling) if requests else []
        return [
            Answer(trajectory_id(step, index, n), tasks[index], request.prompt_ids, sample, step)
            for (index, n), request, sample in zip(keys, requests, samples, strict=True)
        ]

    def grade_answers(self, answers: Sequence[Answer]) -> list[Trajectory]:
        return [
            make_trajectory(
                answer.task,
                answer.prompt_ids,
                answer.sample,
                id=answer.id,
                source="student",
                policy_version=answer.sample.oldest_version(answer.step),
                temperature=self.config.temperature,
                grade=self.grade(answer.task, answer.sample.text),
            )
            for answer in answers
        ]
