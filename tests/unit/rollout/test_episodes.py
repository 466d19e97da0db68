"""Episodes: what the student reads and writes, who ends them, and what an environment may do."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.remote_engine import RemoteEngine
from support.tiny_model import tiny_model, tiny_tokenizer

from courtside.chat.incremental import IncrementalTemplate
from courtside.chat.template import ChatTemplate
from courtside.engines.base import Sampling
from courtside.engines.local import LocalEngine
from courtside.environments.base import EpisodeRequest
from courtside.environments.guard import GuardedEnvironment
from courtside.errors import EnvironmentFaultsError
from courtside.recipe.rollout import LimitsConfig, RolloutConfig
from courtside.rollout.episode_state import EpisodeSettings, EpisodeState
from courtside.rollout.episodes import EXPECTED_OBSERVATION, EpisodeRollout
from courtside.rollout.off_policy import CorrectedRollout, Demonstrations, MixedRollout
from courtside.rollout.replies import reply_passes
from courtside.types import (
    Event,
    Grade,
    Message,
    Observation,
    Sample,
    Task,
    Trajectory,
    VersionSpan,
)

ENGINE = LocalEngine(tiny_model(), tiny_tokenizer(), name="tiny")
TEMPLATE = IncrementalTemplate(ChatTemplate(tiny_tokenizer(), name="tiny", eos_ids=ENGINE.eos_ids))
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


def guard(start: Callable[[Task], Any], seconds: float = 60.0) -> Callable[[Task], Any]:
    """`start` of an environment, as `make_environment` guards it."""
    environment: Any = SimpleNamespace(start=start)
    return GuardedEnvironment(environment=environment, name="world", seconds=seconds).start


def make_rollout(
    start: Callable[[Task], Any] = lambda task: Count(), **options: Any
) -> EpisodeRollout:
    limits = LimitsConfig(**options.pop("limits", {}))
    context_length = options.pop("context_length", 512)
    return EpisodeRollout(
        engine=ENGINE,
        template=TEMPLATE,
        config=RolloutConfig(
            **{"max_new_tokens": 6, "samples_per_prompt": 2, "limits": limits, **options}
        ),
        start=guard(start, limits.step_seconds),
        context_length=context_length,
        seed=0,
    )


def run(rollout: EpisodeRollout, num: int = 1) -> list[Trajectory]:
    requests = [
        EpisodeRequest(id=f"e{n}", task=TASK, seed=n, start=rollout.start) for n in range(num)
    ]
    return rollout.run_episodes(requests, rollout.sampling, policy_version=7)


def roles(trajectory: Trajectory) -> str:
    return "".join(turn.role[0] for turn in trajectory.turns)


def test_an_episode_is_what_was_said() -> None:
    (trajectory,) = run(make_rollout())
    assert roles(trajectory) == "paeaea" and trajectory.stop == "done"
    assert [turn.text for turn in trajectory.turns if turn.role == "environment"] == [
        "tool: number 1",
        "tool: number 2",
    ]
    assert [turn.events for turn in trajectory.turns if turn.role == "assistant"] == [
        (),
        (Event(kind="even"),),
        (),
    ]
    assert trajectory.grade is not None and trajectory.grade.score == 0.3
    assert (trajectory.source, trajectory.policy_version) == ("student", 7)
    assert len(trajectory.sampler_logp or ()) == trajectory.num_completion_tokens > 0


def test_the_sequence_is_the_templates() -> None:
    """What was read and written, turn by turn, is the render of the whole conversation."""
    (trajectory,) = run(make_rollout(max_new_tokens=20), 1)
    conversation = list(TASK.messages)
    for turn in trajectory.turns[1:]:
        if turn.role == "assistant":
            text = TEMPLATE.renderer.tokenizer.decode(turn.token_ids).removesuffix("<|im_end|>")
            conversation.append(Message(role="assistant", content=text))
        else:
            conversation += turn.messages
    text = TEMPLATE.renderer.tokenizer.decode(trajectory.token_ids)
    rendered = TEMPLATE.renderer.render(conversation, "\ufdd0", add_generation_prompt=False)
    assert rendered.replace("\ufdd0", "").startswith(text)


def test_sampler_logps_are_those_of_the_whole_sequence() -> None:
    """Keys and values kept over turns change nothing: scored anew, the log-probs are the same."""
    from courtside.engines.base import ScoreRequest

    for trajectory in run(make_rollout(max_new_tokens=9), 3):
        (score,) = ENGINE.score(
            [ScoreRequest(token_ids=trajectory.token_ids, scored=trajectory.completion_mask)]
        )
        assert score.logp_T.tolist() == pytest.approx(list(trajectory.sampler_logp or ()), abs=1e-4)


def test_episodes_do_not_depend_on_their_company() -> None:
    together = {trajectory.id: trajectory.token_ids for trajectory in run(make_rollout(), 5)}
    few, sizes = with_num_rows(1, make_rollout())
    assert {trajectory.id: trajectory.token_ids for trajectory in run(few, 5)} == together
    assert sizes and set(sizes) == {1}


def with_num_rows(num_rows: int, rollout: EpisodeRollout) -> tuple[EpisodeRollout, list[int]]:
    """The same with a KV cache of so many rows, and how many rows sample in each round."""
    rollout.engine = copy(ENGINE)
    sizes: list[int] = []
    make_session = rollout.engine.session

    def counting_session(num: int, *, row_capacity: int) -> Any:
        assert num <= num_rows
        session: Any = make_session(num, row_capacity=row_capacity)
        sample = session.sample
        session.sample = lambda rows, *more: sizes.append(len(rows)) or sample(rows, *more)
        return session

    rollout.engine.session = counting_session  # type: ignore[method-assign]
    request = EpisodeRequest(id="e", task=TASK, seed=0, start=rollout.start)
    row_capacity = rollout._row_capacity([request], rollout.sampling, None)
    rollout.engine.max_batch_tokens = num_rows * row_capacity
    return rollout, sizes


def test_a_row_reserves_the_turns_that_its_episode_can_have() -> None:
    """Not what follows the last of them, and never more than the limits allow."""
    rollout = make_rollout(max_new_tokens=9)
    request = EpisodeRequest(id="e", task=TASK, seed=0, start=rollout.start)
    prompt = len(rollout.template.render_prompt(TASK.messages).token_ids)
    rollout.max_tokens = 10**6

    def capacity(turn_limit: int | None = None) -> int:
        return rollout._row_capacity([request], rollout.sampling, turn_limit) - prompt

    unknown = capacity()
    rollout.max_turns = 4
    assert capacity() == 4 * 9 + 3 * EXPECTED_OBSERVATION < unknown
    assert capacity(2) == 2 * 9 + EXPECTED_OBSERVATION


def test_a_ramp_of_turns_deepens_training_and_not_evaluations() -> None:
    ramp = {"turns": {"start": 1, "end": 4, "steps": 6}}
    rollout = make_rollout(lambda task: Count(last=9), limits=ramp, samples_per_prompt=1)
    limits = [rollout.limits.turns_at(step) for step in range(9)]
    assert limits == [1, 2, 2, 2, 3, 4, 4, 4, 4]
    for step in (0, 1, 4, 8):
        (trajectory,) = rollout([TASK], step)
        assert roles(trajectory).count("a") == limits[step] and trajectory.stop == "turns"
    (answer,) = run(rollout)
    assert roles(answer).count("a") == 4
    # Over training steps the ids and the first turns stay what they would be without a ramp.
    (plain,) = make_rollout(lambda task: Count(last=9), samples_per_prompt=1)([TASK], 1)
    (ramped,) = rollout([TASK], 1)
    assert ramped.turns == plain.turns[: len(ramped.turns)] and ramped.id == plain.id


def test_an_episode_that_has_ended_makes_way_for_one_that_waits() -> None:
    """Some end after two turns, one after six: nobody waits for it, and none waits for a row."""
    num_turns = [2, 6, 2, 2, 2, 2, 1, 1]
    started: list[str] = []

    def start(task: Task) -> Count:
        started.append(task.id)
        return Count(num_turns[len(started) - 1])

    whole = run(make_rollout(start), len(num_turns))
    started.clear()
    few, sizes = with_num_rows(3, make_rollout(start))
    played = run(few, len(num_turns))
    assert [trajectory.id for trajectory in played] == [trajectory.id for trajectory in whole]
    assert [trajectory.token_ids for trajectory in played] == [
        trajectory.token_ids for trajectory in whole
    ]
    assert [trajectory.stop for trajectory in played] == ["done"] * len(num_turns)
    # 18 turns in six rounds of three, where waves of three episodes would take 6 + 2 + 1.
    assert sizes == [3] * 6
    assert few.run_episodes([], few.sampling, policy_version=7) == []


def test_samples_of_one_task_differ_and_are_named() -> None:
    tasks = [TASK, Task(id="u", split="train", messages=(Message(role="user", content="Now."),))]
    played = make_rollout(temperature=2.0)(tasks, step=3)
    ids = [f"000003-00{index}-{sample}" for index in (0, 1) for sample in (0, 1)]
    assert [trajectory.id for trajectory in played] == ids
    assert played[0].token_ids != played[1].token_ids
    assert [trajectory.task.id for trajectory in played] == ["t", "t", "u", "u"]


def test_a_share_is_demonstrated() -> None:
    reply = Message(role="assistant", content="Done.")
    student = make_rollout(student_fraction=0.5)
    source = Demonstrations(
        expert=lambda task: [*task.messages, reply], template=TEMPLATE, temperature=0.7
    )
    mixed = MixedRollout(student=student, source=source, config=student.config, seed=0)
    played = mixed([TASK, TASK], step=0)
    assert sorted(trajectory.source for trajectory in played) == ["dataset", "student", "student"]
    (demonstration,) = [trajectory for trajectory in played if trajectory.source == "dataset"]
    assert demonstration.id.endswith("-0") and demonstration.temperature == 0.7
    assert [turn.text for turn in demonstration.turns] == ["user: Go.", "Done."]
    alone = {trajectory.id: trajectory.token_ids for trajectory in student([TASK, TASK], step=0)}
    assert all(alone[t.id] == t.token_ids for t in played if t.source == "student")


@pytest.mark.parametrize(
    ("limits", "stop", "turns"),
    [({"turns": 2}, "turns", "paeae"), ({"tokens": 60}, "length", "pae"), ({}, "done", "paeaea")],
)
def test_limits_end_an_episode_and_it_is_graded(limits: Any, stop: str, turns: str) -> None:
    (trajectory,) = run(make_rollout(limits=limits))
    assert (trajectory.stop, roles(trajectory)) == (stop, turns)
    assert trajectory.grade is not None and trajectory.grade.score == turns.count("a") / 10
    assert len(trajectory.token_ids) <= limits.get("tokens", 512)


def test_the_clock_ends_an_episode() -> None:
    (trajectory,) = run(make_rollout(limits={"seconds": 1e-9}))
    assert (trajectory.stop, roles(trajectory)) == (
        "time",
        "p",
    ) and trajectory.num_completion_tokens == 0


def bad_answer(number: int) -> Any:
    if number == 2:
        raise KeyError("no such city")
    return Observation(messages=(Message(role="tool", content="1"),))


def test_a_bug_in_the_environment_ends_its_episode_and_is_no_error_of_the_student() -> None:
    rollout = make_rollout(
        lambda task: Count(answer=bad_answer), limits={"max_fault_fraction": 1.0}
    )
    with pytest.warns(UserWarning, match="the environment has a bug") as caught:
        first, second = run(rollout, 2)
    for trajectory in (first, second):
        assert roles(trajectory) == "paea" and trajectory.stop == "fault"
        assert (trajectory.fault or "").startswith(
            "world: step(reply) raised KeyError: 'no such city' (test_episodes.py, line "
        )
        assert trajectory.grade is None
        assert not any(turn.events for turn in trajectory.turns)
    assert len(caught) == 1 and "Traceback" in str(caught[0].message)
    assert f"(task t, turn 2, reply {first.turns[3].text!r})" in str(caught[0].message)
    assert 'raise KeyError("no such city")' in str(caught[0].message)
    assert "courtside/environments/guard.py" not in str(caught[0].message)


@pytest.mark.filterwarnings("ignore:the environment has a bug")
def test_bugs_in_start_and_grade_end_the_episode() -> None:
    def fail(task: Task) -> Any:
        raise OSError("no server")

    class Ungraded(Count):
        def grade(self) -> Grade:
            return 7  # type: ignore[return-value]

    never = {"max_fault_fraction": 1.0}
    (unstarted,) = run(make_rollout(fail, limits=never))
    assert roles(unstarted) == "p" and "start(task) raised OSError: no server" in str(
        unstarted.fault
    )
    (ungraded,) = run(make_rollout(lambda task: Ungraded(), limits=never))
    assert roles(ungraded) == "paeaea" and "grade(): returned an int" in str(ungraded.fault)


@pytest.mark.filterwarnings("ignore:the environment has a bug")
@pytest.mark.parametrize(
    ("faulty", "num", "stops"),
    [
        ({0, 1}, 2, True),  # none went well
        ({0, 1}, 8, False),  # a quarter, but only two
        ({0, 1, 2}, 8, True),
        ({0, 1, 2}, 15, False),  # just a fifth
        ({0, 1, 2, 3}, 15, True),
    ],
)
def test_too_many_bugs_stop_the_run(faulty: set[int], num: int, stops: bool) -> None:
    numbers = iter(range(num))

    def start(task: Task) -> Count:
        return Count(answer=bad_answer) if next(numbers) in faulty else Count()

    rollout = make_rollout(start)
    if not stops:
        assert sum(trajectory.fault is not None for trajectory in run(rollout, num)) == len(faulty)
        return
    with pytest.raises(EnvironmentFaultsError) as caught:
        run(rollout, num)
    assert f"{len(faulty)} of the last {num} episodes" in str(caught.value)
    assert "max_fault_fraction = 0.2" in str(caught.value) and "no such city" in str(caught.value)


@pytest.mark.filterwarnings("ignore:the environment has a bug")
def test_an_environment_that_breaks_late_stops_the_run_soon() -> None:
    """The fraction is that of recent episodes, not of the whole run."""
    num_started = 0

    def start(task: Task) -> Count:
        nonlocal num_started
        num_started += 1
        return Count(1, bad_answer_at_once if num_started > 200 else None)

    def bad_answer_at_once(number: int) -> Observation:
        raise ConnectionError

    rollout = make_rollout(start)
    for _ in range(10):
        run(rollout, 20)
    with pytest.raises(EnvironmentFaultsError, match="20 of the last 64"):
        run(rollout, 20)


@pytest.mark.filterwarnings("ignore:the environment has a bug")
def test_an_environment_that_hangs_ends_its_own_episode_only() -> None:
    released = threading.Event()

    def hang(number: int) -> Observation:
        released.wait(20)
        return Observation(messages=(), done=True)

    episodes: list[Count] = []

    def start(task: Task) -> Count:
        episodes.append(Count(answer=hang) if len(episodes) == 1 else Count())
        return episodes[-1]

    try:
        first, hung, third = run(make_rollout(start, limits={"step_seconds": 0.2}), 3)
    finally:
        released.set()
    assert (first.stop, third.stop) == ("done", "done")
    assert (hung.stop, roles(hung)) == ("fault", "pa")
    assert "did not return within 0.2 seconds (rollout.limits.step_seconds)" in str(hung.fault)
    assert hung.turns[1].events == () and hung.grade is None


def test_an_environment_that_says_megabytes_is_cut() -> None:
    def answer(number: int) -> Observation:
        message = Message(role="tool", content="x" * 3_000_000)
        return Observation(messages=(message,), done=number == 2)

    rollout = make_rollout(lambda task: Count(answer=answer), limits={"observation_chars": 50})
    (trajectory,) = run(rollout)
    assert trajectory.turns[2].messages[0].content == "x" * 50 + "\n[cut: 2999950 more characters]"


def test_a_turn_that_ran_into_the_limit_is_closed_by_the_environment() -> None:
    (trajectory,) = run(make_rollout(max_new_tokens=1))
    end_ids = TEMPLATE.end_of_turn_ids()
    for turn, following in zip(trajectory.turns[1:], trajectory.turns[2:], strict=False):
        if turn.role == "assistant" and not TEMPLATE.is_ended(turn.token_ids):
            assert following.token_ids[: len(end_ids)] == end_ids
            assert not any(following.completion_mask)
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

    student = make_rollout(lambda task: Count(answer=answer), samples_per_prompt=1)
    played = CorrectedRollout(rollout=student, template=TEMPLATE)([TASK], step=0)
    sampled, *corrections = played
    assert [trajectory.id for trajectory in corrections] == ["000000-000-0+001", "000000-000-0+005"]
    for trajectory, index, text in zip(corrections, (1, 5), ("say 1", "say 3"), strict=True):
        assert (
            trajectory.source == "dataset"
            and trajectory.sampler_logp is None
            and trajectory.grade is None
        )
        before = tuple(i for turn in sampled.turns[:index] for i in turn.token_ids)
        ids = (*TEMPLATE.renderer.tokenizer(text)["input_ids"], 1)
        assert trajectory.token_ids == before + ids and trajectory.completion_ids == ids


def test_a_reply_is_checked_in_place_of_a_turn() -> None:
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

        def grade(self) -> Grade:
            return Grade(score=0.0, passed=False)

    (trajectory,) = run(make_rollout(limits={"turns": 2}))
    first = trajectory.turns[1].text
    outcomes = {
        reply: reply_passes(guard(lambda task: Password()), trajectory, 3, reply)
        for reply in (first, first + "!", "raise")
    }
    assert outcomes == {first: True, first + "!": False, "raise": False}


def test_the_policy_version_is_the_oldest_of_its_samples() -> None:
    request = EpisodeRequest(id="e", task=TASK, seed=0, start=lambda task: Count())
    limits = LimitsConfig()
    for versions, oldest in (([3, 0, 2], 0), ([2, 3], 2), ([], 7)):
        state = EpisodeState.make(0, request, TEMPLATE)
        episode = Count()
        sample = Sample(token_ids=(70, 1), logp=(-1.0, -1.0), stop="eos", text="a")
        for version in versions or (None,):
            spans = () if version is None else (VersionSpan(0, 2, version),)
            observation = episode.step("a")
            sampled = replace(sample, policy_versions=spans)
            state.add_turn(sampled, observation, TEMPLATE, limits)
        state.stop = "turns"
        settings = EpisodeSettings(
            sampling=Sampling(max_new_tokens=2), policy_version=7, max_turns=None, max_seconds=None,
            max_tokens=99,
        )  # fmt: skip
        trajectory = state.finish(settings)
        assert trajectory.policy_version == oldest
        expected = [version for version in versions or [7] for _ in range(2)]
        assert trajectory.token_versions == tuple(expected), "of every token"
        assert trajectory.as_teacher().token_versions == (None,) * len(expected)


# ── each episode by itself ───────────────────────────────────────────────────────────────────────


def remote(*, independent_rows: bool) -> RemoteEngine:
    return RemoteEngine(ENGINE, independent_rows=independent_rows)


@pytest.mark.parametrize("max_batch_tokens", [65536, 200], ids=["all at once", "few rows"])
def test_episodes_that_do_not_wait_for_each_other_are_the_same(max_batch_tokens: int) -> None:
    """Faults, grades, limits and tokens of every episode, in the order of the requests."""
    played = []
    for independent_rows in (False, True):
        number = itertools.count()

        def start(task: Task, number: Iterator[int] = number) -> Any:
            last = 1 + next(number) % 4
            return Bad() if last == 3 else Count(last)

        rollout = make_rollout(start, limits={"turns": 3, "max_fault_fraction": 1.0})
        rollout.engine = engine = remote(independent_rows=independent_rows)
        engine.max_batch_tokens = max_batch_tokens
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trajectories = run(rollout, 9)
        played.append([replace(t, fault=t.fault and "a fault") for t in trajectories])
    assert rollout.progress.phase is not None and rollout.progress.phase.finished == 9
    assert played[0] == played[1]
    assert {t.stop for t in played[0]} == {"done", "turns", "fault"}


class Bad:
    def step(self, reply: str) -> Observation:
        raise KeyError("no such world")

    def grade(self) -> Grade:
        raise AssertionError("never asked")


def test_a_slow_environment_holds_up_its_own_episode_only() -> None:
    """Its step returns when all other episodes have been graded."""
    others_are_graded, graded = threading.Event(), []

    class Slow(Count):
        def step(self, reply: str) -> Observation:
            assert others_are_graded.wait(20)
            return super().step(reply)

    class Quick(Count):
        def grade(self) -> Grade:
            graded.append(self)
            if len(graded) == 4:
                others_are_graded.set()
            return super().grade()

    number = itertools.count()
    rollout = make_rollout(lambda task: Slow(2) if next(number) == 0 else Quick(3))
    rollout.engine = remote(independent_rows=True)
    trajectories = run(rollout, 5)
    assert [roles(t) for t in trajectories] == ["paea", *["paeaea"] * 4]
    assert all(t.stop == "done" for t in trajectories)
