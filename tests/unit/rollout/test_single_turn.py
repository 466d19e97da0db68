"""Who writes which answers, under which name, with which random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.tiny_model import tiny_model, tiny_tokenizer

from courtside.chat.template import ChatTemplate
from courtside.engines.base import SampleRequest, Sampling, ScoreRequest
from courtside.engines.local import LocalEngine
from courtside.errors import TaskError
from courtside.recipe.rollout import Ramp, RolloutConfig
from courtside.rollout.off_policy import DatasetCompletions, MixedRollout, TeacherCompletions
from courtside.rollout.single_turn import SingleTurnRollout
from courtside.types import Grade, Message, Sample, Task, Trajectory

RENDERER = ChatTemplate(tiny_tokenizer(), name="tiny", eos_ids={1})


def task(number: int, **options: Any) -> Task:
    options.setdefault("completion", f"good {number}")
    content = f"Question {number}?"
    return Task(
        id=f"t{number}",
        split="train",
        messages=(Message(role="user", content=content),),
        **options,
    )


TASKS = [task(n) for n in range(8)]


class Scribe:
    """An engine that writes its seed, and remembers what it was asked."""

    def __init__(self) -> None:
        self.requests: list[SampleRequest] = []
        self.sampling: Sampling | None = None

    def sample(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Sample]:
        self.requests += requests
        self.sampling = sampling
        return [make_sample(request.seed) for request in requests]


def make_sample(seed: int) -> Sample:
    ids = tuple(10 + (seed >> shift) % 90 for shift in (0, 7, 14))[: 1 + seed % 3]
    logp = tuple(-float((seed >> shift) % 11) for shift in (3, 9, 17))[: len(ids)]
    return Sample(token_ids=(*ids, 1), logp=(*logp, -0.5), stop="eos", text=f"wrote {seed}")


def grade(task: Task, text: str) -> Grade:
    return Grade(score=0.25, passed=False, feedback=f"{task.id} on {text!r}")


def rollout(
    engine: Any = None,
    *,
    seed: int = 0,
    teacher_writes: Any = None,
    pairs: bool = True,
    **fields: Any,
) -> SingleTurnRollout | MixedRollout:
    config = RolloutConfig(**fields)
    parts: dict[str, Any] = {"template": RENDERER, "grade": grade}
    student = SingleTurnRollout(engine=engine or Scribe(), config=config, seed=seed, **parts)
    if "student_fraction" not in fields:
        return student
    source: Any = DatasetCompletions(temperature=config.temperature, pairs=pairs, **parts)
    if teacher_writes:
        source = TeacherCompletions(write=teacher_writes, config=config, seed=seed, **parts)
    return MixedRollout(student=student, source=source, config=config, seed=seed)


def test_a_student_fraction_of_one_is_the_students_rollout() -> None:
    assert rollout(student_fraction=1.0)(TASKS, step=3) == rollout()(TASKS, step=3)


def by_source(trajectories: Sequence[Trajectory], source: str) -> list[Trajectory]:
    return [t for t in trajectories if t.source == source]


# ── the student ──────────────────────────────────────────────────────────────────────────────────


def test_on_policy_every_sample_is_the_students_token_by_token() -> None:
    engine = Scribe()
    trajectories = rollout(engine, samples_per_prompt=3, temperature=0.7)(TASKS, step=5)
    assert len(trajectories) == len({t.id for t in trajectories}) == 8 * 3
    assert sorted(t.task.id for t in trajectories) == sorted(task.id for task in TASKS * 3)
    answers = {request.seed: make_sample(request.seed) for request in engine.requests}
    assert len(answers) == 8 * 3, "every sample has random numbers of its own"
    for t in trajectories:
        (answer,) = [a for a in answers.values() if a.text == t.response]
        prompt = RENDERER.prompt_ids(t.task.messages)
        assert t.token_ids == prompt + answer.token_ids
        assert t.completion_mask == (False,) * len(prompt) + (True,) * len(answer.token_ids)
        assert t.sampler_logp == answer.logp
        assert (t.source, t.policy_version, t.temperature) == ("student", 5, 0.7)
        assert t.token_versions == (5,) * t.num_completion_tokens
        assert t.stop == "eos" and t.preference is None
    calls = {request.prompt_ids for request in engine.requests}
    assert calls == {RENDERER.prompt_ids(task.messages) for task in TASKS}


def test_the_recipe_decides_how_tokens_are_sampled() -> None:
    engine = Scribe()
    config = dict(max_new_tokens=9, temperature=0.6, top_p=0.9, top_k=7, min_p=0.01, stop=("\n\n",))
    rollout(engine, **config)(TASKS[:1], step=0)
    expected = Sampling(**config, return_routed_experts=True)  # type: ignore[arg-type]
    assert engine.sampling == expected


def test_everything_follows_from_seed_and_step() -> None:
    first = rollout(seed=3)(TASKS, step=4)
    assert rollout(seed=3)(TASKS, step=4) == first
    other_step, other_seed = rollout(seed=3)(TASKS, step=5), rollout(seed=4)(TASKS, step=4)
    for variant in (other_step, other_seed):
        assert not {t.response for t in variant} & {t.response for t in first}
    assert {t.id for t in other_step}.isdisjoint(t.id for t in first)


def test_a_task_that_comes_twice_is_answered_anew() -> None:
    trajectories = rollout(samples_per_prompt=2)([TASKS[0], TASKS[0], TASKS[0]], step=0)
    assert len({t.id for t in trajectories}) == 6
    assert len({t.response for t in trajectories}) == 6


def test_grades_are_of_the_text_that_was_written() -> None:
    for share in (0.0, 0.5, 1.0):
        for t in rollout(student_fraction=share)(TASKS, step=0):
            assert t.grade is not None
            assert t.grade.feedback == f"{t.task.id} on {t.response!r}"


def test_with_a_model_the_sampler_log_probs_are_those_of_the_tokens() -> None:
    engine = LocalEngine(tiny_model().double(), tiny_tokenizer(), name="tiny")
    trajectories = rollout(engine, samples_per_prompt=2, max_new_tokens=6, temperature=1.4)(
        TASKS[:3], step=0
    )
    for t in trajectories:
        assert t.sampler_logp is not None
        with torch.no_grad():
            logp_LV = (engine.model(torch.tensor([t.token_ids])).logits[0] / 1.4).log_softmax(-1)
        where = [i for i, chosen in enumerate(t.completion_mask) if chosen]
        expected = [float(logp_LV[i - 1, t.token_ids[i]]) for i in where]
        assert t.sampler_logp == pytest.approx(expected, abs=1e-5)
    scores = engine.score(
        [
            ScoreRequest(token_ids=t.token_ids, scored=t.completion_mask, temperature=1.4)
            for t in trajectories
        ]
    )
    for t, score in zip(trajectories, scores, strict=True):
        assert score.logp_T.tolist() == pytest.approx(t.sampler_logp, abs=1e-5)


# ── the rest ─────────────────────────────────────────────────────────────────────────────────────


def test_off_policy_every_answer_is_the_data_sets() -> None:
    engine = Scribe()
    trajectories = rollout(engine, student_fraction=0.0, samples_per_prompt=4)(TASKS, step=2)
    assert not engine.requests
    assert [t.task.id for t in trajectories] == [task.id for task in TASKS], "once each"
    for t in trajectories:
        assert t.task.completion is not None
        assert t.response == t.task.completion
        assert t.completion_ids == RENDERER.completion_ids(t.task.messages, t.task.completion)
        assert t.token_ids == RENDERER.prompt_ids(t.task.messages) + t.completion_ids
        assert t.sampler_logp is None, "nobody sampled it"
        assert (t.source, t.stop, t.policy_version) == ("dataset", "dataset", None)


@pytest.mark.parametrize(
    ("share", "num_on_policy"), [(0.0, 0), (0.25, 2), (0.5, 4), (0.8, 6), (1.0, 8)]
)
def test_the_share_counts_prompts(share: float, num_on_policy: int) -> None:
    trajectories = rollout(student_fraction=share, samples_per_prompt=2)(TASKS, step=0)
    on_policy, off_policy = by_source(trajectories, "student"), by_source(trajectories, "dataset")
    assert (len(on_policy), len(off_policy)) == (2 * num_on_policy, 8 - num_on_policy)
    assert {t.task.id for t in on_policy}.isdisjoint(t.task.id for t in off_policy)
    assert {t.task.id for t in trajectories} == {task.id for task in TASKS}
    assert len({t.id for t in trajectories}) == len(trajectories)


def test_another_half_is_the_students_in_another_step() -> None:
    def on_policy_ids(step: int, seed: int = 0) -> frozenset[str]:
        trajectories = rollout(student_fraction=0.5, seed=seed)(TASKS, step)
        return frozenset(t.task.id for t in by_source(trajectories, "student"))

    assert on_policy_ids(3) == on_policy_ids(3)
    assert len({on_policy_ids(step) for step in range(6)}) > 1
    assert len({on_policy_ids(0, seed) for seed in range(6)}) > 1


def test_a_ramp_moves_the_share_step_by_step() -> None:
    moving = rollout(student_fraction=Ramp(start=0.0, end=1.0, steps=4), samples_per_prompt=1)
    counts = [len(by_source(moving(TASKS, step), "student")) for step in (0, 1, 2, 3, 4, 5, 99)]
    assert counts == [0, 2, 4, 6, 8, 8, 8]
    down = rollout(student_fraction=Ramp(start=1.0, end=0.5, steps=2), samples_per_prompt=1)
    assert [len(by_source(down(TASKS, step), "student")) for step in (0, 1, 2)] == [8, 6, 4]


def test_a_preference_pair_is_two_answers_to_one_task() -> None:
    pairs = [task(n, rejected=f"bad {n}") for n in range(3)]
    trajectories = rollout(student_fraction=0.0)(pairs, step=0)
    assert [(t.task.id, t.preference, t.response) for t in trajectories] == [
        ("t0", "better", "good 0"),
        ("t0", "worse", "bad 0"),
        ("t1", "better", "good 1"),
        ("t1", "worse", "bad 1"),
        ("t2", "better", "good 2"),
        ("t2", "worse", "bad 2"),
    ]
    assert len({t.id for t in trajectories}) == 6


def test_a_task_without_completion_cannot_be_the_data_sets() -> None:
    tasks = [*TASKS[:3], task(3, completion=None)]
    with pytest.raises(TaskError, match=r"task t3: .* needs a `completion`"):
        rollout(student_fraction=0.0)(tasks, step=0)
    assert len(rollout(student_fraction=1.0, samples_per_prompt=1)(tasks, step=0)) == 4


def test_the_teacher_writes_the_rest() -> None:
    calls: list[tuple[list[Task], Sampling, list[int]]] = []

    def teacher_writes(
        tasks: Sequence[Task], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Sample]:
        calls.append((list(tasks), sampling, list(seeds)))
        return [make_sample(seed) for seed in seeds]

    engine = Scribe()
    half = rollout(
        engine,
        student_fraction=0.5,
        off_policy_source="teacher",
        samples_per_prompt=2,
        teacher_writes=teacher_writes,
    )
    trajectories = half(TASKS, step=1)
    on_policy, off_policy = by_source(trajectories, "student"), by_source(trajectories, "teacher")
    assert (len(on_policy), len(off_policy)) == (8, 8)
    ((tasks, sampling, seeds),) = calls
    assert engine.sampling == replace(sampling, return_routed_experts=True)
    assert {t.task.id for t in off_policy} == {task.id for task in tasks}
    assert len(set(seeds) | {r.seed for r in engine.requests}) == 16, "no number is used twice"
    by_text = {
        make_sample(seed).text: (task, seed) for task, seed in zip(tasks, seeds, strict=True)
    }
    for t in off_policy:
        its_task, seed = by_text[t.response]
        assert t.task == its_task
        # What trains is the student's view: its prompt, whatever the teacher was shown.
        assert t.token_ids == RENDERER.prompt_ids(t.task.messages) + make_sample(seed).token_ids
        assert t.sampler_logp == make_sample(seed).logp
        assert t.policy_version is None


def test_rejected_texts_are_left_out_where_no_loss_takes_them() -> None:
    pair = task(9, completion="yes", rejected="no")
    both = rollout(student_fraction=0.0)([pair], 0)
    assert [t.preference for t in both] == ["better", "worse"]
    alone = rollout(student_fraction=0.0, pairs=False)([pair], 0)
    assert [(t.response, t.preference) for t in alone] == [("yes", None)]
