"""Take-overs: where a draft is left, what the teacher continues, and which continuations train."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support.tiny_model import tiny_model, tiny_tokenizer

from courtside.chat.messages import insert_context
from courtside.chat.template import ChatTemplate
from courtside.engines.base import SampleRequest, ScoreRequest
from courtside.engines.local import LocalEngine
from courtside.recipe.rollout import RolloutConfig
from courtside.recipe.takeover import TakeoverConfig
from courtside.rollout.continuations import AnswerContinuation, Fork
from courtside.rollout.single_turn import SingleTurnRollout, make_sampling
from courtside.rollout.takeover import Takeover, locate_token
from courtside.seeds import seed_for
from courtside.types import Grade, Message, Task, Trajectory

STUDENT = LocalEngine(tiny_model(), tiny_tokenizer(), name="student")
RENDERER = ChatTemplate(tiny_tokenizer(), name="tiny", eos_ids=STUDENT.eos_ids)
SECRET = "Answer well."


@dataclass
class ContextTeacher:
    """Another model, with a system prompt that the student does not have."""

    engine: Any
    name: str = "teacher"
    weights: Any = nullcontext

    def prompt_ids(self, task: Task) -> tuple[int, ...]:
        return RENDERER.prompt_ids(insert_context(task.messages, SECRET, "system"))


TEACHER = ContextTeacher(
    LocalEngine(tiny_model(seed=1, layers=3), tiny_tokenizer(), name="teacher")
)


def make_task(number: int) -> Task:
    ask = Message(role="user", content=f"Question {number}?")
    return Task(id=f"t{number}", split="train", messages=(ask,))


TASKS = [make_task(number) for number in range(4)]


def grade(task: Task, text: str) -> Grade:
    """About a third of all texts pass."""
    value = sum(text.encode()) % 9
    return Grade(score=value / 8, passed=value > 5)


def make_drafts(config: RolloutConfig) -> list[Trajectory]:
    rollout = SingleTurnRollout(
        engine=STUDENT, template=RENDERER, config=config, grade=grade, seed=0
    )
    return rollout(TASKS, 0)


def make_takeover(
    config: RolloutConfig, teacher: Any = TEACHER, *, context_length: int = 512, **options: Any
) -> Takeover:
    return Takeover(
        config=TakeoverConfig(**options),
        choose_teacher=lambda task: teacher,
        continue_drafts=AnswerContinuation(
            template=RENDERER, config=config, grade=grade, context_length=context_length, seed=0
        ),
        has_episodes=False,
        seed=0,
    )


SAMPLING = RolloutConfig(max_new_tokens=12, samples_per_prompt=4)


def test_the_prefix_is_the_students_verbatim_and_only_the_teacher_trains() -> None:
    drafts = {draft.id: draft for draft in make_drafts(SAMPLING)}
    takeovers, outcomes = make_takeover(SAMPLING, select="all", require="none")(
        list(drafts.values()), []
    )
    assert len(takeovers) == len(drafts) == 16 and outcomes.keys() == drafts.keys()
    lengths = set()
    for takeover in takeovers:
        draft, (prompt, answer) = drafts[takeover.draft or ""], takeover.turns
        assert (takeover.source, takeover.correction) == ("teacher", "takeover")
        assert takeover.id == f"{draft.id}+takeover" and takeover.policy_version is None
        assert prompt.token_ids == draft.turns[0].token_ids, "the student's prompt"
        num = answer.completion_mask.index(True)
        lengths.add(num)
        assert answer.token_ids[:num] == draft.turns[1].token_ids[:num]
        assert answer.completion_mask == (False,) * num + (True,) * (len(answer.token_ids) - num)
        assert 1 not in answer.token_ids[:-1], "no end token inside an answer"
        assert len(answer.token_ids) <= 12
        assert answer.sampler_logp is not None and all(map(math.isnan, answer.sampler_logp[:num]))
        # The teacher's own distribution, in its own context.
        teacher_prompt = TEACHER.prompt_ids(draft.task)
        assert len(teacher_prompt) > len(prompt.token_ids)
        request = ScoreRequest(
            token_ids=teacher_prompt + answer.token_ids,
            scored=(False,) * len(teacher_prompt) + answer.completion_mask,
        )
        (scores,) = TEACHER.engine.score([request])
        torch.testing.assert_close(
            torch.tensor(takeover.sampler_logp), scores.logp_T, rtol=1e-4, atol=1e-4
        )
        outcome = outcomes[draft.id]
        assert outcome.num_input_tokens == len(teacher_prompt) + num
        assert outcome.num_sampled_tokens == len(answer.token_ids) - num
        assert takeover.grade == grade(draft.task, RENDERER.text(answer.token_ids))
    assert len(lengths) > 4, "forks at many places"


def test_a_continuation_is_what_the_teacher_samples_after_those_ids() -> None:
    """Also where the answer's limit is shorter than that of the call."""
    takeovers, outcomes = make_takeover(SAMPLING, select="all", require="none")(
        make_drafts(SAMPLING), []
    )
    assert {o.stop for o in outcomes.values()} >= {"length"}
    for takeover in takeovers:
        ids, mask = takeover.turns[1].token_ids, takeover.turns[1].completion_mask
        num = mask.index(True)
        prompt = TEACHER.prompt_ids(takeover.task) + ids[:num]
        sampling = replace(make_sampling(SAMPLING), max_new_tokens=12 - num)
        seed = seed_for(0, "takeover", takeover.draft or "")
        (sample,) = TEACHER.engine.sample([SampleRequest(prompt_ids=prompt, seed=seed)], sampling)
        assert ids[num:] == sample.token_ids and takeover.stop == sample.stop


def test_selection_and_grades_decide() -> None:
    drafts = make_drafts(SAMPLING)
    failed = {d.id: d for d in drafts if d.grade and not d.grade.passed}
    assert 0 < len(failed) < len(drafts)
    for require in ("passed", "better", "none"):
        takeovers, outcomes = make_takeover(SAMPLING, require=require)(drafts, [])
        assert outcomes.keys() == failed.keys()
        for id, outcome in outcomes.items():
            assert outcome.grade is not None and failed[id].grade is not None
            succeeds = {
                "passed": outcome.grade.passed,
                "better": outcome.grade.score > failed[id].grade.score,  # type: ignore[union-attr]
                "none": True,
            }[require]
            assert outcome.drop_reason == (None if succeeds else f"not_{require}")
        trained = [id for id, outcome in outcomes.items() if outcome.drop_reason is None]
        assert [t.draft for t in takeovers] == trained
        assert require == "none" or 0 < len(trained) < len(outcomes), "both occur"


def test_what_is_not_the_students_is_not_taken_over() -> None:
    drafts = make_drafts(SAMPLING)
    changed = [
        replace(drafts[0], source="teacher"),
        replace(drafts[1], correction="rewrite", preference="worse", draft="x"),
        replace(drafts[2], grade=None, fault="a bug", stop="fault"),
        replace(drafts[3], preference="better", pair="x", correction="choose", draft="x",
                critique="Too long.", num_replaced=1, rewards={"length": 0.5}),
    ]  # fmt: skip
    takeovers, outcomes = make_takeover(SAMPLING, select="all", require="none")(changed, [])
    assert list(outcomes) == [drafts[3].id], "the better of two samples is the student's own"
    (takeover,) = takeovers
    assert (takeover.preference, takeover.pair, takeover.critique) == (None, None, None)
    assert (takeover.draft, takeover.correction) == (drafts[3].id, "takeover")
    assert takeover.num_replaced is None and not takeover.rewards
    takeovers, _ = make_takeover(SAMPLING, select="all", require="none", pair=True)(changed, [])
    assert [t.preference for t in takeovers] == [None, "better", "worse"]
    assert [t.pair for t in takeovers] == [None, *2 * (f"{drafts[3].id}+takeover",)]
    assert all(t.critique is None and not t.rewards for t in takeovers)
    _, outcomes = make_takeover(SAMPLING)([replace(drafts[3], grade=None)], [])
    assert not outcomes, "an answer without a grade did not fail"


@pytest.mark.parametrize(("at", "expected"), [(0, 0), (3, 3), (0.5, 4), (0.99, 7), (8, None)])
def test_where_an_answer_is_left(at: Any, expected: int | None) -> None:
    draft = make_drafts(SAMPLING)[0]
    answer = replace(draft.turns[1], token_ids=(9,) * 8, completion_mask=(True,) * 8,
                     sampler_logp=(-1.0,) * 8, policy_versions=())  # fmt: skip
    fork = locate_token(replace(draft, turns=(draft.turns[0], answer)), at, random.Random(0))
    if expected is None:
        assert fork == "draft_ended"
    else:
        assert isinstance(fork, Fork) and fork.num_tokens == expected


def test_short_drafts_are_counted() -> None:
    drafts = make_drafts(SAMPLING)
    lengths = {d.id: d.num_completion_tokens for d in drafts}
    _, outcomes = make_takeover(SAMPLING, select="all", at=11, require="none")(drafts, [])
    ended = {id for id, outcome in outcomes.items() if outcome.drop_reason == "draft_ended"}
    assert ended == {id for id, length in lengths.items() if length <= 11}
    assert all(outcomes[id].teacher is None for id in ended)


def test_forks_do_not_depend_on_the_batch() -> None:
    drafts = make_drafts(SAMPLING)
    takeover = make_takeover(SAMPLING, select="all", require="none")
    whole, _ = takeover(drafts, [])
    alone, _ = takeover(drafts[5:6], [])
    assert alone[0].turns[1].token_ids == whole[5].turns[1].token_ids
    assert alone[0].id == whole[5].id


class Calls:
    """An engine that notes the limit of each call and how long prompts are."""

    def __init__(self, engine: LocalEngine) -> None:
        self.engine, self.context_length = engine, engine.context_length
        self.calls: list[tuple[int, list[int]]] = []

    def sample(self, requests: Sequence[SampleRequest], sampling: Any) -> Any:
        lengths = [len(request.prompt_ids) for request in requests]
        self.calls.append((sampling.max_new_tokens, lengths))
        return self.engine.sample(requests, sampling)


@pytest.mark.parametrize("capacity", [0, 1, 5])
def test_no_call_leaves_the_context(capacity: int) -> None:
    """Where prompts almost fill the context, what is left differs from fork to fork."""
    drafts = make_drafts(SAMPLING)
    longest = max(len(TEACHER.prompt_ids(task)) for task in TASKS)
    engine = Calls(TEACHER.engine)
    teacher = replace(TEACHER, engine=engine)
    takeover = make_takeover(
        SAMPLING, teacher, context_length=longest + capacity, select="all", require="none"
    )
    takeovers, outcomes = takeover(drafts, [])
    for limit, lengths in engine.calls:
        assert max(lengths) + limit <= longest + capacity
    too_long = [o for o in outcomes.values() if o.drop_reason == "too_long"]
    assert len(too_long) + len(takeovers) == len(drafts) and too_long
    assert bool(takeovers) == bool(capacity)
    assert capacity < 5 or len(engine.calls) > 1, "shorter prompts had more to sample"


def test_a_stop_string_across_the_fork_ends_the_text() -> None:
    config = replace_stop(SAMPLING, ("b",))
    draft = make_drafts(SAMPLING)[0]
    continuation = AnswerContinuation(
        template=RENDERER, config=config, grade=grade, context_length=512, seed=0
    )
    ids = RENDERER.tokenizer("xab", add_special_tokens=False)["input_ids"]
    answer = replace(draft.turns[1], token_ids=tuple(ids), completion_mask=(True,) * 3,
                     sampler_logp=(-1.0,) * 3, policy_versions=())  # fmt: skip
    fork = Fork(draft=replace(draft, turns=(draft.turns[0], answer)), turn=1, num_tokens=3)
    (result,) = continuation(TEACHER, [fork])
    assert result.trajectory is not None and result.trajectory.turns[1].text == "xa"


def replace_stop(config: RolloutConfig, stop: tuple[str, ...]) -> RolloutConfig:
    return config.model_copy(update={"stop": stop})


def test_both_sides_of_a_fork_share_their_masked_context() -> None:
    drafts = {draft.id: draft for draft in make_drafts(SAMPLING)}
    takeovers, _ = make_takeover(SAMPLING, select="all", require="none", pair=True)(
        list(drafts.values()), []
    )
    assert len(takeovers) == 3 * len(drafts)
    for draft in drafts.values():
        whole, better, worse = (t for t in takeovers if t.draft == draft.id)
        assert whole.pair is None and whole.preference is None
        assert (better.preference, worse.preference) == ("better", "worse")
        assert better.pair == worse.pair == f"{draft.id}+takeover"
        assert (better.source, worse.source) == ("teacher", "student")
        assert better.token_ids == whole.token_ids
        assert worse.token_ids == draft.token_ids
        assert better.completion_mask == whole.completion_mask
        masks = better.completion_mask, worse.completion_mask
        first, second = (mask.index(True) for mask in masks)
        assert first == second and better.token_ids[:first] == worse.token_ids[:first]
        assert all(masks[0][first:]) and all(masks[1][first:])
        sampled = draft.sampler_logp
        assert sampled is not None and worse.sampler_logp == sampled[-sum(masks[1]) :]
