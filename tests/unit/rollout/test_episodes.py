"""Episodes: what the student reads and writes, who ends them, and what an environment may do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from copy import copy
from typing import Any

import pytest
from tiny import tiny_model, tiny_tokenizer

from courtside.chat.incremental import IncrementalTemplate
from courtside.chat.template import ChatTemplate
from courtside.engines.local import LocalEngine
from courtside.recipe import LimitsConfig, RolloutConfig
from courtside.rollout.episodes import EpisodeRequest, EpisodeRollout, reply_passes
from courtside.types import Event, Grade, Message, Observation, Task, Trajectory

ENGINE = LocalEngine(tiny_model(), tiny_tokenizer(), name="tiny")
TURNS = IncrementalTemplate(ChatTemplate(tiny_tokenizer(), name="tiny", eos_ids=ENGINE.eos_ids))
TASK = Task(id="t", split="train", messages=(Message(role="user", content="Go."),))


class Count:
    """Answers every reply with its number, and is done after `last` of them."""

    def __init__(self, last: int = 3, answer: Callable[[int], Observation] | None = None):
        self.last, self.answer, self.replies = last, answer, []

    def step(self, reply: str) -> Observation:
        self.replies.append(reply)
        number = len(self.replies)
        if self.answer is not None:
            return self.answer(number)
        return Observation(
            messages=(Message(role="tool", content=f"number {number}"),),
            done=number == self.last,
            events=(Event(kind="even"),) if number % 2 == 0 else (),
        )

    def grade(self) -> Grade:
        return Grade(score=len(self.replies) / 10, passed=False, feedback="")


def rollout(begin: Callable[[Task], Any] = lambda task: Count(), **options: Any) -> EpisodeRollout:
    limits = LimitsConfig(**options.pop("limits", {}))
    context_length = options.pop("context_length", 512)
    demonstrate = options.pop("demonstrate", None)
    return EpisodeRollout(
        engine=ENGINE,
        turns=TURNS,
        config=RolloutConfig(
            **{"max_new_tokens": 6, "samples_per_prompt": 2, "limits": limits, **options}
        ),
        begin=begin,
        demonstrate=demonstrate,
        context_length=context_length,
        seed=0,
    )


def play(agent: EpisodeRollout, num: int = 1) -> list[Trajectory]:
    starts = [EpisodeRequest(id=f"e{n}", task=TASK, seed=n, begin=agent.begin) for n in range(num)]
    return agent.play(starts, agent.sampling, version=7)


def roles(trajectory: Trajectory) -> str:
    return "".join(turn.role[0] for turn in trajectory.turns)


def test_an_episode_is_what_was_said() -> None:
    (one,) = play(rollout())
    assert roles(one) == "paeaea" and one.stop == "done"
    assert [turn.text for turn in one.turns if turn.role == "environment"] == [
        "tool: number 1",
        "tool: number 2",
    ]
    assert [turn.events for turn in one.turns if turn.role == "assistant"] == [
        (),
        (Event(kind="even"),),
        (),
    ]
    assert one.grade is not None and one.grade.score == 0.3
    assert (one.source, one.policy_version) == ("student", 7)
    assert len(one.sampler_logp or ()) == one.num_chosen > 0


def test_the_sequence_is_the_templates() -> None:
    """What was read and written, turn by turn, is the render of the whole conversation."""
    (one,) = play(rollout(max_new_tokens=20), 1)
    conversation = list(TASK.messages)
    for turn in one.turns[1:]:
        if turn.role == "assistant":
            text = TURNS.renderer.tokenizer.decode(turn.token_ids).removesuffix("<|im_end|>")
            conversation.append(Message(role="assistant", content=text))
        else:
            conversation += turn.messages
    shown = TURNS.renderer.tokenizer.decode(one.token_ids)
    rendered = TURNS.renderer.render(conversation, "\ufdd0", add_generation_prompt=False)
    assert rendered.replace("\ufdd0", "").startswith(shown)


def test_sampler_logps_are_those_of_the_whole_sequence() -> None:
    """Keys and values kept over turns change nothing: scored anew, the log-probs are the same."""
    from courtside.engines.base import ScoreRequest

    for one in play(rollout(max_new_tokens=9), 3):
        (score,) = ENGINE.score([ScoreRequest(token_ids=one.token_ids, scored=one.chosen)])
        assert score.logp_T.tolist() == pytest.approx(list(one.sampler_logp or ()), abs=1e-4)


def test_episodes_do_not_depend_on_their_company() -> None:
    together = {one.id: one.token_ids for one in play(rollout(), 5)}
    few, sizes = with_room_for(1, rollout())
    assert {one.id: one.token_ids for one in play(few, 5)} == together
    assert sizes and set(sizes) == {1}


def with_room_for(num_rows: int, agent: EpisodeRollout) -> tuple[EpisodeRollout, list[int]]:
    """The same with little room, and how many rows write in every turn that is played."""
    agent.engine = copy(ENGINE)
    sizes: list[int] = []
    whole = agent.engine.session

    def session(num: int, *, row_capacity: int) -> Any:
        assert num <= num_rows
        made: Any = whole(num, row_capacity=row_capacity)
        write = made.sample
        made.sample = lambda rows, *more: sizes.append(len(rows)) or write(rows, *more)
        return made

    agent.engine.session = session  # type: ignore[method-assign]
    start = EpisodeRequest(id="e", task=TASK, seed=0, begin=agent.begin)
    agent.engine.max_batch_tokens = num_rows * agent._row_capacity([start], agent.sampling)
    return agent, sizes


def test_an_episode_that_has_ended_makes_way_for_one_that_waits() -> None:
    """Some end after two turns, one after six: nobody waits for it, and none waits for a row."""
    num_turns = [2, 6, 2, 2, 2, 2, 1, 1]
    began: list[str] = []

    def begin(task: Task) -> Count:
        began.append(task.id)
        return Count(num_turns[len(began) - 1])

    whole = play(rollout(begin), len(num_turns))
    began.clear()
    few, sizes = with_room_for(3, rollout(begin))
    played = play(few, len(num_turns))
    assert [one.id for one in played] == [one.id for one in whole]
    assert [one.token_ids for one in played] == [one.token_ids for one in whole]
    assert [one.stop for one in played] == ["done"] * len(num_turns)
    # 18 turns in six rounds of three, where waves of three episodes would take 6 + 2 + 1.
    assert sizes == [3] * 6
    assert few.play([], few.sampling, version=7) == []


def test_samples_of_one_task_differ_and_are_named() -> None:
    tasks = [TASK, Task(id="u", split="train", messages=(Message(role="user", content="Now."),))]
    played = rollout(temperature=2.0)(tasks, step=3)
    assert [one.id for one in played] == ["000003-000-0", "000003-000-1", "000003-001-0",
                                         "000003-001-1"]  # fmt: skip
    assert played[0].token_ids != played[1].token_ids
    assert [one.task.id for one in played] == ["t", "t", "u", "u"]


def test_a_share_is_demonstrated() -> None:
    shown: list[str] = []

    def demonstrate(task: Task, id: str) -> Trajectory:
        shown.append(id)
        (one,) = play(rollout())
        return Trajectory(
            id=id, task=task, turns=one.turns, source="dataset", policy_version=None,
            temperature=1.0, stop="dataset",
        )  # fmt: skip

    played = rollout(student_fraction=0.5, demonstrate=demonstrate)([TASK, TASK], step=0)
    assert sorted(one.source for one in played) == ["dataset", "student", "student"]
    assert len(shown) == 1 and shown[0].endswith("-0")


@pytest.mark.parametrize(
    ("limits", "stop", "turns"),
    [({"turns": 2}, "turns", "paeae"), ({"tokens": 60}, "length", "pae"), ({}, "done", "paeaea")],
)
def test_limits_end_an_episode_and_it_is_graded(limits: Any, stop: str, turns: str) -> None:
    (one,) = play(rollout(limits=limits))
    assert (one.stop, roles(one)) == (stop, turns)
    assert one.grade is not None and one.grade.score == turns.count("a") / 10
    assert len(one.token_ids) <= limits.get("tokens", 512)


def test_the_clock_ends_an_episode() -> None:
    (one,) = play(rollout(limits={"seconds": 1e-9}))
    assert (one.stop, roles(one)) == ("time", "p") and one.num_chosen == 0


def test_an_environment_that_raises_is_told_and_goes_on() -> None:
    def answer(number: int) -> Observation:
        if number == 1:
            raise KeyError("no such city")
        return Observation(messages=(), done=True)

    (one,) = play(rollout(lambda task: Count(answer=answer)))
    assert roles(one) == "paea" and one.stop == "done"
    assert "KeyError" in one.turns[2].text and one.turns[2].text.startswith("user: Error")
    assert [event.kind for event in one.turns[1].events] == ["environment_error"]


def test_an_environment_that_says_nothing_is_an_error_of_its_own() -> None:
    def answer(number: int) -> Observation:
        return Observation(messages=(), done=number == 2)

    (one,) = play(rollout(lambda task: Count(answer=answer)))
    assert roles(one) == "paea" and "said nothing" in one.turns[2].text


def test_an_environment_that_hangs_ends_its_own_episode_only() -> None:
    released = threading.Event()

    def hang(number: int) -> Observation:
        released.wait(20)
        return Observation(messages=(), done=True)

    made: list[Count] = []

    def begin(task: Task) -> Count:
        made.append(Count(answer=hang) if len(made) == 1 else Count())
        return made[-1]

    try:
        first, hung, third = play(rollout(begin, limits={"step_seconds": 0.2}), 3)
    finally:
        released.set()
    assert (first.stop, third.stop) == ("done", "done")
    assert (hung.stop, roles(hung)) == ("time", "pa")
    assert [event.kind for event in hung.turns[1].events] == ["hung"]
    assert hung.grade is not None and hung.grade.score == 0


def test_an_environment_that_says_megabytes_is_cut() -> None:
    def answer(number: int) -> Observation:
        said = Message(role="tool", content="x" * 3_000_000)
        return Observation(messages=(said,), done=number == 2)

    agent = rollout(lambda task: Count(answer=answer), limits={"observation_chars": 50})
    (one,) = play(agent)
    assert one.turns[2].messages[0].content == "x" * 50 + "\n[cut: 2999950 more characters]"


def test_a_turn_that_ran_into_the_limit_is_closed_by_the_environment() -> None:
    (one,) = play(rollout(max_new_tokens=1))
    closing = TURNS.end_of_turn_ids
    for turn, following in zip(one.turns[1:], one.turns[2:], strict=False):
        if turn.role == "assistant" and not TURNS.is_ended(turn.token_ids):
            assert following.token_ids[: len(closing)] == closing
            assert not any(following.chosen)
            return
    pytest.fail("no turn ran into its limit, so this tested nothing")


def test_what_would_have_been_right_can_be_imitated() -> None:
    def answer(number: int) -> Observation:
        wrong = Event(kind="bad", details={"correct": f"say {number}"})
        return Observation(
            messages=(Message(role="tool", content="no"),),
            done=number == 3,
            events=(wrong,) if number != 2 else (),
        )

    played = rollout(lambda task: Count(answer=answer), corrections=True, samples_per_prompt=1)(
        [TASK], step=0
    )
    own, *right = played
    assert [one.id for one in right] == ["000000-000-0+001", "000000-000-0+005"]
    for one, index, text in zip(right, (1, 5), ("say 1", "say 3"), strict=True):
        assert one.source == "dataset" and one.sampler_logp is None and one.grade is None
        before = tuple(i for turn in own.turns[:index] for i in turn.token_ids)
        said = (*TURNS.renderer.tokenizer(text)["input_ids"], 1)
        assert one.token_ids == before + said and one.chosen_ids == said


def test_another_reply_can_be_tried_in_its_place() -> None:
    class Password:
        """Wants the word that was said first, once more."""

        def __init__(self) -> None:
            self.first: str | None = None

        def step(self, reply: str) -> Observation:
            if reply == "raise":
                raise RuntimeError
            right = self.first in (None, reply)
            self.first = self.first or reply
            events = () if right else (Event(kind="wrong"),)
            return Observation(messages=(Message(role="tool", content="."),), events=events)

    (one,) = play(rollout(limits={"turns": 2}))
    first = one.turns[1].text
    tried = {
        reply: reply_passes(lambda task: Password(), one, 3, reply, seconds=5)
        for reply in (first, first + "!", "raise")
    }
    assert tried == {first: True, first + "!": False, "raise": False}
