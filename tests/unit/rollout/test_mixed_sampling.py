"""Which prompts are sampled by student and teacher together, and what their trajectories say."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
from support.tiny_model import tiny_tokenizer

from courtside.chat.template import ChatTemplate
from courtside.engines.base import SampleRequest, Sampling
from courtside.engines.mixed_sampling import MixedRequest, MixedSample
from courtside.recipe.rollout import MixedSamplingConfig, Ramp, RolloutConfig
from courtside.rollout.mixed_sampling import MixedSamplingRollout
from courtside.rollout.single_turn import SingleTurnRollout
from courtside.types import Grade, Message, Sample, Task

RENDERER = ChatTemplate(tiny_tokenizer(), name="tiny", eos_ids={1})
TASKS = [
    Task(id=f"t{n}", split="train", messages=(Message(role="user", content=f"Question {n}?"),))
    for n in range(8)
]


class Scribe:
    def sample(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Sample]:
        return [make_sample(request.seed) for request in requests]


def make_sample(seed: int) -> Sample:
    return Sample(token_ids=(10 + seed % 90, 1), logp=(-1.0, -0.5), stop="eos", text=str(seed))


@dataclass
class NamedTeacher:
    name: str
    engine: Any = None
    weights: Any = nullcontext

    def prompt_ids(self, task: Task) -> tuple[int, ...]:
        return (7, 7, *RENDERER.prompt_ids(task.messages))


def make_rollout(fraction: Any, calls: list[tuple[str, list[MixedRequest]]]) -> Any:
    teachers = [NamedTeacher("even"), NamedTeacher("odd")]

    def sample_mixed(teacher: Any, requests: Any, sampling: Sampling) -> list[MixedSample]:
        assert sampling.max_new_tokens == 128
        calls.append((teacher.name, list(requests)))
        return [MixedSample(make_sample(request.seed), request.seed % 2) for request in requests]

    student = SingleTurnRollout(
        engine=Scribe(),  # type: ignore[arg-type]
        template=RENDERER,
        config=RolloutConfig(samples_per_prompt=2),
        grade=lambda task, text: Grade(score=0.5, passed=False, feedback=text),
        seed=3,
    )
    return MixedSamplingRollout(
        student=student,
        config=MixedSamplingConfig(fraction=fraction),
        choose_teacher=lambda task: teachers[int(task.id[1:]) % 2],
        sample_mixed=sample_mixed,
    )


@pytest.mark.parametrize(("fraction", "num"), [(0.0, 0), (0.5, 4), (1.0, 8)])
def test_a_share_of_the_prompts_is_mixed(fraction: float, num: int) -> None:
    calls: list[tuple[str, list[MixedRequest]]] = []
    trajectories = make_rollout(fraction, calls)(TASKS, 0)
    assert [t.id for t in trajectories] == [f"000000-00{i}-{n}" for i in range(8) for n in (0, 1)]
    mixed = [t for t in trajectories if t.num_replaced is not None]
    assert len({t.task.id for t in mixed}) == num and len(mixed) == 2 * num
    assert all(t.source == "student" and t.policy_version == 0 for t in trajectories)
    assert sum(len(requests) for _, requests in calls) == 2 * num
    for t in mixed:
        assert t.sampler_logp == (-1.0, -0.5) and t.grade is not None
        assert t.num_replaced == int(t.turns[1].text) % 2
        assert t.turns[0].token_ids == RENDERER.prompt_ids(t.task.messages)
    for _, requests in calls:
        for request in requests:
            assert request.teacher_prompt_ids == (7, 7, *request.prompt_ids)
    seeds = [request.seed for _, requests in calls for request in requests]
    assert len(set(seeds)) == len(seeds)
    if num == 8:
        assert sorted(name for name, _ in calls) == ["even", "odd"], "each task with its teacher"


def test_a_schedule_changes_the_share_and_steps_the_prompts() -> None:
    rollout = make_rollout(Ramp(start=1.0, end=0.0, steps=4), [])
    chosen = [
        {t.task.id for t in rollout(TASKS, step) if t.num_replaced is not None} for step in range(6)
    ]
    assert [len(ids) for ids in chosen] == [8, 6, 4, 2, 0, 0]
    half = make_rollout(0.5, [])
    assert len({frozenset(t.task.id for t in half(TASKS, step) if t.num_replaced is not None)
                for step in range(6)}) > 1  # fmt: skip
