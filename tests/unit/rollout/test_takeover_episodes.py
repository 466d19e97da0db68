"""Take-overs in an environment: the same episode, the student's ids, the teacher's turns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.tiny_model import tiny_model, tiny_tokenizer

from courtside.chat.incremental import IncrementalTemplate
from courtside.chat.messages import insert_context
from courtside.chat.template import ChatTemplate
from courtside.engines.base import ScoreRequest
from courtside.engines.local import LocalEngine
from courtside.environments.guard import GuardedEnvironment
from courtside.recipe.rollout import LimitsConfig, RolloutConfig
from courtside.recipe.takeover import TakeoverConfig
from courtside.rollout.continuations import EpisodeContinuation
from courtside.rollout.episodes import EpisodeRollout
from courtside.rollout.takeover import Takeover
from courtside.rollout.teacher_episodes import TeacherEpisodes
from courtside.types import Event, Grade, Hint, Message, Observation, Task, Trajectory

ENGINE = LocalEngine(tiny_model(), tiny_tokenizer(), name="tiny")
TEMPLATE = IncrementalTemplate(ChatTemplate(tiny_tokenizer(), name="tiny", eos_ids=ENGINE.eos_ids))


@dataclass
class ContextTeacher:
    engine: Any
    name: str = "teacher"
    weights: Any = nullcontext

    def prompt_ids(self, task: Task) -> tuple[int, ...]:
        messages = insert_context(task.messages, "Play well.", "system")
        return TEMPLATE.renderer.prompt_ids(messages)


TEACHER = ContextTeacher(LocalEngine(tiny_model(seed=1, layers=3), tiny_tokenizer(), name="other"))


class Ledger:
    """Adds up the characters of all replies, so its answers follow from all of them."""

    def __init__(self, last: int = 4) -> None:
        self.last, self.total, self.num = last, 0, 0

    def step(self, reply: str) -> Observation:
        self.total += sum(reply.encode())
        self.num += 1
        return Observation(
            messages=(Message(role="tool", content=f"sum {self.total}"),),
            done=self.num == self.last,
            events=(Event(kind="odd"),) if self.num > 1 and self.total % 3 == 0 else (),
        )

    def grade(self) -> Grade:
        return Grade(score=self.total % 10 / 10, passed=self.total % 2 == 0)


def guard(start: Callable[[Task], Any]) -> Callable[[Task], Any]:
    environment: Any = SimpleNamespace(start=start)
    return GuardedEnvironment(environment=environment, name="world", seconds=60.0).start


def make_parts(
    start: Callable[[Task], Any] = lambda task: Ledger(),
    takeover_start: Callable[[Task], Any] | None = None,
    *,
    limits: Any = None,
    context_length: int = 512,
    **options: Any,
) -> tuple[list[Trajectory], Takeover]:
    """Drafts, and a take-over in the same environment, or in another one."""
    config = RolloutConfig(
        max_new_tokens=6, samples_per_prompt=4, limits=LimitsConfig(**limits or {})
    )
    tasks = [
        Task(id=f"t{n}", split="train", messages=(Message(role="user", content=f"Go {n}."),))
        for n in range(3)
    ]
    episodes = EpisodeRollout(
        engine=ENGINE, template=TEMPLATE, config=config, start=guard(start),
        context_length=512, seed=0,
    )  # fmt: skip
    drafts = episodes(tasks, 0)
    episodes = replace(
        episodes, start=guard(takeover_start or start), context_length=context_length
    )
    takeover = Takeover(
        config=TakeoverConfig(**options),
        choose_teacher=lambda task: TEACHER,
        continue_drafts=EpisodeContinuation(episodes=episodes),
        has_episodes=True,
        seed=0,
    )
    return drafts, takeover


EVERYTHING = {"select": "all", "require": "none"}


def test_the_trunk_is_the_students_and_the_episode_goes_on() -> None:
    drafts, takeover = make_parts(**EVERYTHING)
    by_id = {draft.id: draft for draft in drafts}
    takeovers, outcomes = takeover(drafts, [])
    assert len(takeovers) == len(drafts) == 12
    forks = set()
    for t in takeovers:
        draft, turn = by_id[t.draft or ""], outcomes[t.draft or ""].turn
        assert turn is not None and t.turns[turn].role == "assistant"
        forks.add(turn)
        for earlier, recorded in zip(t.turns[:turn], draft.turns[:turn], strict=True):
            assert earlier.token_ids == recorded.token_ids and not any(earlier.completion_mask)
            assert (earlier.events, earlier.messages) == (recorded.events, recorded.messages)
        played = [u for u in t.turns[turn:] if u.role == "assistant"]
        assert all(all(u.completion_mask) for u in played) and t.stop == "done"
        assert sum(u.role == "assistant" for u in t.turns) == 4
        # The environment's state is that of the student's replies and the teacher's.
        ledger = Ledger()
        for i in range(1, len(t.turns), 2):
            observation = ledger.step(t.turns[i].text)
            assert observation.events == t.turns[i].events
            if not observation.done:
                assert t.turns[i + 1].messages == observation.messages
        assert t.grade == ledger.grade() == outcomes[t.draft or ""].grade
        assert t.source == "teacher" and t.policy_version is None
    assert forks == {1, 3, 5, 7}


def test_turns_are_samples_of_the_teacher_in_its_own_context() -> None:
    drafts, takeover = make_parts(**EVERYTHING)
    takeovers, outcomes = takeover(drafts, [])
    requests = []
    for t in takeovers:
        prompt = TEACHER.prompt_ids(t.task)
        num = len(t.turns[0].token_ids)
        request = ScoreRequest(
            token_ids=prompt + t.token_ids[num:],
            scored=(False,) * len(prompt) + t.completion_mask[num:],
        )
        requests.append(request)
        outcome = outcomes[t.draft or ""]
        assert outcome.num_sampled_tokens == t.num_completion_tokens
        num_given = len(prompt) - num + len(t.token_ids) - t.num_completion_tokens
        assert outcome.num_input_tokens == num_given
    for t, scores in zip(takeovers, TEACHER.engine.score(requests), strict=True):
        torch.testing.assert_close(
            torch.tensor(t.sampler_logp), scores.logp_T, rtol=1e-4, atol=1e-4
        )


def test_where_episodes_are_left() -> None:
    drafts, takeover = make_parts(**EVERYTHING, at="first_error")
    takeovers, outcomes = takeover(drafts, [])
    for draft in drafts:
        wrong = [i for i, turn in enumerate(draft.turns) if turn.events]
        outcome = outcomes[draft.id]
        assert outcome.turn == (wrong[0] if wrong else None)
        assert (outcome.drop_reason == "not_located") == (not wrong)
    assert 0 < len(takeovers) < len(drafts)

    _, takeover = make_parts(**EVERYTHING, at=2)
    _, outcomes = takeover(drafts, [])
    assert {outcome.turn for outcome in outcomes.values()} == {5}
    _, takeover = make_parts(**EVERYTHING, at=4)
    _, outcomes = takeover(drafts, [])
    assert {outcome.drop_reason for outcome in outcomes.values()} == {"draft_ended"}

    _, takeover = make_parts(**EVERYTHING, at="reader")
    hints = [
        Hint(trajectory=drafts[0].id, turn=turn, text="Look.", source="human") for turn in (7, 3)
    ]
    takeovers, outcomes = takeover(drafts[:2], hints)
    assert [outcomes[draft.id].turn for draft in drafts[:2]] == [3, None]
    assert outcomes[drafts[1].id].drop_reason == "not_located"
    assert [t.draft for t in takeovers] == [drafts[0].id]


def test_episodes_with_events_are_selected() -> None:
    drafts, takeover = make_parts(select="errors", at="first_error")
    _, outcomes = takeover(drafts, [])
    assert outcomes.keys() == {d.id for d in drafts if any(turn.events for turn in d.turns)}


def test_only_what_passes_trains() -> None:
    drafts, takeover = make_parts()
    takeovers, outcomes = takeover(drafts, [])
    assert outcomes.keys() == {d.id for d in drafts if d.grade and not d.grade.passed}
    assert takeovers and all(t.grade and t.grade.passed for t in takeovers)
    dropped = [o for o in outcomes.values() if o.drop_reason is not None]
    assert dropped and {o.drop_reason for o in dropped} == {"not_passed"}
    assert all(o.num_sampled_tokens for o in dropped), "what was sampled in vain is counted"


class Moody(Ledger):
    """Answers every episode otherwise, whatever the replies."""

    numbers = count(1)

    def __init__(self) -> None:
        super().__init__()
        self.total = next(self.numbers)


class Hasty(Ledger):
    def __init__(self) -> None:
        super().__init__(last=2)


class Quiet(Ledger):
    """The same messages, without events."""

    def step(self, reply: str) -> Observation:
        observation = super().step(reply)
        return Observation(messages=observation.messages, done=observation.done)


@pytest.mark.parametrize("other", [Moody, Hasty, Quiet])
def test_a_replay_that_differs_is_dropped(other: Any) -> None:
    drafts, takeover = make_parts(takeover_start=lambda task: other(), **EVERYTHING, at=3)
    takeovers, outcomes = takeover(drafts, [])
    reasons = [outcome.drop_reason for outcome in outcomes.values()]
    if other is Quiet:
        wrong = [any(turn.events for turn in draft.turns[:7]) for draft in drafts]
        assert [reason == "replay" for reason in reasons] == wrong
        assert 0 < sum(wrong) < len(wrong)
    else:
        assert set(reasons) == {"replay"} and not takeovers
    dropped = [o for o in outcomes.values() if o.drop_reason == "replay"]
    assert all(o.num_sampled_tokens == 0 and o.teacher is None for o in dropped)


class Buggy(Ledger):
    """Raises when the teacher plays its last turn."""

    def step(self, reply: str) -> Observation:
        if self.num == 3:
            raise KeyError("no such page")
        return super().step(reply)


@pytest.mark.filterwarnings("error")
def test_a_bug_in_the_environment_is_a_counted_drop() -> None:
    """However many there are: the student's own episodes decide whether a run stops."""
    drafts, takeover = make_parts(takeover_start=lambda task: Buggy(), **EVERYTHING, at=1)
    takeovers, outcomes = takeover(drafts, [])
    assert not takeovers
    assert {outcome.drop_reason for outcome in outcomes.values()} == {"fault"}
    assert all(outcome.num_sampled_tokens for outcome in outcomes.values())


def test_an_endless_episode_ends_at_its_limits() -> None:
    drafts, takeover = make_parts(
        lambda task: Ledger(last=10**6), limits={"turns": 5}, **EVERYTHING, at=2
    )
    takeovers, outcomes = takeover(drafts, [])
    assert {outcome.stop for outcome in outcomes.values()} == {"turns"}
    for t in takeovers:
        assert sum(turn.role == "assistant" for turn in t.turns) == 5, "the student's count, too"


def test_the_teachers_longer_prompt_counts_against_the_context() -> None:
    drafts, _ = make_parts()
    longest = max(len(draft.token_ids) for draft in drafts)
    _, takeover = make_parts(context_length=longest, **EVERYTHING)
    takeovers, outcomes = takeover(drafts, [])
    surplus = len(TEACHER.prompt_ids(drafts[0].task)) - len(drafts[0].turns[0].token_ids)
    for t in takeovers:  # an observation that nobody answers may lie outside
        last = max(i for i, is_completion in enumerate(t.completion_mask) if is_completion)
        assert last + 1 + surplus <= longest
    reasons = {o.drop_reason for o in outcomes.values()} | {o.stop for o in outcomes.values()}
    assert {"too_long", "length"} & reasons


def test_pairs_are_the_two_turns_at_the_fork() -> None:
    drafts, takeover = make_parts(**EVERYTHING, pair=True)
    by_id = {draft.id: draft for draft in drafts}
    takeovers, outcomes = takeover(drafts, [])
    for whole, better, worse in zip(*(takeovers[i::3] for i in range(3)), strict=True):
        draft, turn = by_id[whole.draft or ""], outcomes[whole.draft or ""].turn
        assert turn is not None and whole.pair is None
        assert better.pair == worse.pair == f"{draft.id}+takeover"
        assert len(better.turns) == len(worse.turns) == turn + 1
        assert better.turns[turn] == whole.turns[turn]
        assert worse.turns[turn] == draft.turns[turn]
        assert better.turns[:turn] == worse.turns[:turn]
        assert not any(mask for t in better.turns[:turn] for mask in t.completion_mask)


def test_a_teacher_plays_whole_episodes() -> None:
    """As a source of off-policy trajectories: with its own prompt, and the student's in what
    trains."""
    tasks = {
        n: Task(id=f"t{n}", split="train", messages=(Message(role="user", content=f"Go {n}."),))
        for n in (2, 5)
    }
    episodes = EpisodeRollout(
        engine=ENGINE, template=TEMPLATE, config=RolloutConfig(max_new_tokens=6),
        start=guard(lambda task: Ledger()), context_length=512, seed=0,
    )  # fmt: skip
    source = TeacherEpisodes(choose_teacher=lambda task: TEACHER, episodes=episodes)
    trajectories = source(tasks, 7)
    assert [t.id for t in trajectories] == [f"000007-00{i}-{n}" for i in (2, 5) for n in range(4)]
    assert not source({}, 7)
    for t in trajectories:
        assert (t.source, t.policy_version, t.stop) == ("teacher", None, "done")
        assert t.turns[0].token_ids == TEMPLATE.render_prompt(t.task.messages).token_ids
        prompt, num = TEACHER.prompt_ids(t.task), len(t.turns[0].token_ids)
        request = ScoreRequest(
            token_ids=prompt + t.token_ids[num:],
            scored=(False,) * len(prompt) + t.completion_mask[num:],
        )
        (scores,) = TEACHER.engine.score([request])
        torch.testing.assert_close(
            torch.tensor(t.sampler_logp), scores.logp_T, rtol=1e-4, atol=1e-4
        )
    assert len(episodes.faults.recent) == 8
