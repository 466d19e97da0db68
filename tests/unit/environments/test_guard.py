"""Bugs in environments of other people: each is told with the method, the field and the fix."""

from __future__ import annotations

import sys
import threading
import time
from asyncio import CancelledError
from collections import UserDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from courtside.environments.guard import EnvironmentFault, GuardedEnvironment, call_all
from courtside.environments.loading import make_environment
from courtside.errors import TaskError
from courtside.recipe.tasks import EnvironmentTasks
from courtside.types import Event, Grade, Message, Observation, Task

TASK = Task(id="t", split="train", messages=(Message(role="user", content="Go."),))
HELLO = (Message(role="tool", content="Hello."),)


def raise_(error: BaseException) -> Any:
    raise error


def observe(**changes: Any) -> Observation:
    return Observation(**{"messages": HELLO, **changes})


def event(**details: Any) -> Observation:
    return observe(events=(Event(kind="bad", details=details),))


class World:
    """An environment of which one method does what the test says."""

    size = 1

    def __init__(self, **methods: Callable[..., Any]) -> None:
        self.methods = methods

    def task(self, index: int) -> Any:
        return self.methods["task"]() if "task" in self.methods else TASK

    def start(self, task: Task) -> Any:
        if "start" in self.methods:
            return self.methods["start"](task)
        return SimpleNamespace(
            step=lambda reply: self.methods.get("step", observe)(),
            grade=lambda: self.methods.get("grade", lambda: Grade(score=1.0, passed=True))(),
        )


def guard(seconds: float | None = 5.0, **methods: Callable[..., Any]) -> GuardedEnvironment:
    return GuardedEnvironment(environment=World(**methods), name="world", seconds=seconds)


def fault_of(call: Callable[[], Any]) -> str:
    with pytest.raises(EnvironmentFault) as caught:
        call()
    return str(caught.value)


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


recursive: list[Any] = []
recursive.append(recursive)

STEPS: list[tuple[Callable[[], Any], str]] = [
    (lambda: "text", "step(reply): returned a str; return courtside.types.Observation("),
    (lambda: {"messages": []}, "returned a dict; return courtside.types.Observation("),
    (lambda: None, "returned None; return"),
    (lambda: ("text", 0.0, False, False, {}), "returned a tuple; return"),
    (lambda: Unprintable(), "returned an Unprintable; return"),
    (lambda: observe(messages="Hello."), "messages is a str; use a tuple of court"),
    (lambda: observe(messages=HELLO[0]), "Observation.messages is a Message; use a tuple"),
    (lambda: observe(messages=None), "Observation.messages is None; use a tuple"),
    (lambda: observe(messages=["Hello."]), "messages[0] is a str; use Message(role="),
    (lambda: observe(messages=[{"role": "tool"}]), "messages[0] is a dict; use Message("),
    (lambda: observe(messages=(*HELLO, Message(role="assistant", content=""))),
     "Observation.messages[1].role = 'assistant'; use one of ['tool', 'user']"),
    (lambda: observe(messages=(Message(role="system", content=""),)), "[0].role = 'system'"),
    (lambda: observe(messages=(Message(role="tool", content=None),)),  # type: ignore[arg-type]
     "Observation.messages[0].content is None; use a text: str(…)"),
    (lambda: observe(messages=(Message(role="tool", content=3),)),  # type: ignore[arg-type]
     "Observation.messages[0].content is an int; use a text"),
    (lambda: observe(messages=(Message(role="tool", content="a\ud800"),)),
     "Observation.messages[0].content has half of a surrogate pair"),
    (lambda: observe(messages=()), "without messages, which the student cannot answer; add a mes"),
    (lambda: observe(done=1), "Observation.done = 1; use bool(…)"),
    (lambda: observe(done=np.bool_(True)), "; use bool(…)"),
    (lambda: observe(events=Event(kind="bad")), "Observation.events is an Event; use a tuple"),
    (lambda: observe(events=None), "Observation.events is None; use a tuple"),
    (lambda: observe(events=("bad",)), "events[0] is a str; use Event(kind='…', details={…})"),
    (lambda: observe(events=(Event(kind=3),)),  # type: ignore[arg-type]
     "events[0].kind = 3; use a text such as 'tool_error'"),
    (lambda: observe(events=(Event(kind=""),)), "events[0].kind = ''; use a text"),
    (lambda: observe(events=(Event(kind="a", details="no"),)),  # type: ignore[arg-type]
     "events[0].details is a str; use a dict whose keys are texts"),
    (lambda: observe(events=(Event(kind="a", details={1: 2}),)),  # type: ignore[dict-item]
     "events[0].details is a dict; use a dict whose keys are texts"),
    (lambda: event(x=object()), "events[0].details['x'] is no JSON value (Object of type object"),
    (lambda: event(x=float("nan")), "events[0].details['x'] is no JSON value"),
    (lambda: event(x=[1, float("inf")]), "events[0].details['x'] is no JSON value"),
    (lambda: event(ok=1, y={"z": {1, 2}}), "events[0].details['y'] is no JSON value"),
    (lambda: event(x=np.int64(3)), "is no JSON value (Object of type int64"),
    (lambda: event(x=recursive), "is no JSON value (Circular reference"),
    (lambda: event(x="\udfff"), "events[0].details['x'] has half of a surrogate pair"),
    (lambda: observe(decision=3), "Observation.decision = 3; use letters, digits and _, with /"),
    (lambda: observe(decision=""), "Observation.decision = ''; use letters"),
    (lambda: observe(decision="a b"), "Observation.decision = 'a b'; use letters"),
    (lambda: observe(decision="a/"), "Observation.decision = 'a/'; use letters"),
    (lambda: observe(decision="/".join("abcde")), "Observation.decision = 'a/b/c/d/e'; use"),
    (lambda: observe(decision="é"), "use letters, digits and _, with / between parts, or None"),
    (lambda: Message("user", "x"),  # type: ignore[misc]
     "; name the fields: Message(role='user', content='…')"),
    (lambda: Event("bad"), "name the fields: Event(kind='…', details={…})"),  # type: ignore[misc]
    (lambda: Observation(), "name the fields: Observation("),  # type: ignore[call-arg]
    (lambda: raise_(ValueError("no\nsuch thing")), "raised ValueError: no (test_guard.py, line "),
    (lambda: raise_(KeyError("city")), "step(reply) raised KeyError: 'city' (test_guard.py, line "),
    (lambda: raise_(SystemExit(3)), "called sys.exit(3) (test_guard.py, line "),
    (lambda: raise_(KeyboardInterrupt()), "raised KeyboardInterrupt; raise another exception"),
    (lambda: raise_(RecursionError("deep")), "raised RecursionError: deep"),
    (lambda: raise_(MemoryError()), "raised MemoryError"),
    (lambda: raise_(StopIteration()), "raised StopIteration"),
    (lambda: raise_(UnprintableError()), "UnprintableError: (its message cannot be"),
    (lambda: raise_(CancelledError()), "raised CancelledError"),
    (lambda: raise_(GeneratorExit()), "raised GeneratorExit"),
]  # fmt: skip

GRADES: list[tuple[Callable[[], Any], str]] = [
    (lambda: 0.5, "grade(): returned a float; return courtside.types.Grade(score=1.0, passed=True"),
    (lambda: 7, "grade(): returned an int; return courtside.types.Grade("),
    (lambda: None, "grade(): returned None"),
    (lambda: True, "grade(): returned a bool"),
    (lambda: float("nan"), "grade(): returned a float"),
    (lambda: Grade(score=float("nan"), passed=True), "Grade.score = nan; use a finite number"),
    (lambda: Grade(score=10**400, passed=True), "; use a finite number from 0 to 1"),
    (lambda: Grade(score=7, passed=True), "Grade.score = 7, which is outside of [0, 1]; scale it"),
    (lambda: Grade(score=-0.1, passed=True), "Grade.score = -0.1, which is outside"),
    (lambda: Grade(score="1", passed=True), "Grade.score = '1'; use a finite"),  # type: ignore[arg-type]
    (lambda: Grade(score=None, passed=True), "Grade.score = None"),  # type: ignore[arg-type]
    (lambda: Grade(score=True, passed=True), "Grade.score = True; use a finite number"),
    (lambda: Grade(score=1.0, passed=None),  # type: ignore[arg-type]
     "Grade.passed = None; use True or False"),
    (lambda: Grade(score=1.0, passed=1), "Grade.passed = 1; use True"),  # type: ignore[arg-type]
    (lambda: Grade(score=1.0, passed=True, feedback=None),  # type: ignore[arg-type]
     "Grade.feedback = None; use a text, or ''"),
    (lambda: Grade(score=1.0, passed=True, feedback="\ud83d"), "Grade.feedback has half of a surr"),
    (lambda: Grade(1.0, True), "name the fields: Grade(score=1.0, passed=True)"),  # type: ignore[misc]
    (lambda: raise_(ZeroDivisionError("division")), "grade() raised ZeroDivisionError: division"),
    (lambda: sys.exit(), "grade() called sys.exit(None)"),
]  # fmt: skip


@pytest.mark.parametrize(("result", "message"), STEPS)
def test_slips_in_step(result: Callable[[], Any], message: str) -> None:
    episode = guard(step=result).start(TASK)
    message_of_fault = fault_of(lambda: episode.step("Hi."))
    assert message_of_fault.startswith("world: step(reply)") and message in message_of_fault


@pytest.mark.parametrize("decision", [None, "filler", "date/habit_wrong", "a/b_2/C/4"])
def test_decisions_arrive_as_they_were_told(decision: str | None) -> None:
    episode = guard(step=lambda: observe(decision=decision)).start(TASK)
    assert episode.step("Hi.").decision == decision


@pytest.mark.parametrize(("result", "message"), GRADES)
def test_slips_in_grade(result: Callable[[], Any], message: str) -> None:
    message_of_fault = fault_of(guard(grade=result).start(TASK).grade)
    assert message_of_fault.startswith("world: grade()") and message in message_of_fault


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda task: None, "start(task): returned None without a method step(reply)"),
        (lambda task: SimpleNamespace(step=len), "without a method grade()"),
        (lambda task: raise_(KeyError("seed")), "start(task) raised KeyError: 'seed'"),
        (lambda task: sys.exit("bye"), "start(task) called sys.exit('bye')"),
    ],
)
def test_slips_in_start(result: Callable[..., Any], message: str) -> None:
    assert message in fault_of(lambda: guard(start=result).start(TASK))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda: None, "world: task(0) gave NoneType; return a courtside.types.Task"),
        (lambda: {"prompt": "x"}, "task(0) gave dict"),
        (lambda: replace(TASK, id=""), "task(0): id = ''; give a text"),
        (lambda: replace(TASK, id=3), "task(0): id = 3"),
        (lambda: replace(TASK, split="dev"), "split = 'dev'; use one of ['train', 'validation',"),
        (lambda: replace(TASK, messages="Go."), "messages is a str"),
        (lambda: replace(TASK, messages=()), "the last one must be a user's"),
        (lambda: replace(TASK, messages=(Message(role="assistant", content=""),)), "a user's"),
        (lambda: replace(TASK, messages=(Message(role="bot", content=""),)), "role = 'bot'; use"),
        (lambda: replace(TASK, messages=[{"role": "user"}]), "messages[0] is a dict"),
        (lambda: replace(TASK, grader="math"), "grader = 'math', but an episode grades itself"),
        (lambda: replace(TASK, privileged=["x"]), "privileged is a list; give a dict"),
        (lambda: replace(TASK, privileged={"a": 3}), "privileged['a'] is an int; names and values"),
        (lambda: replace(TASK, grader_args={"a": object()}), "grader_args['a'] is no JSON value"),
        (lambda: replace(TASK, grader_args={"a": {1, 2}}), "grader_args['a'] is no JSON value"),
        (lambda: replace(TASK, grader_args=None), "grader_args is None; use a dict"),
        (lambda: replace(TASK, tags=None), "tags = None; use a tuple of texts"),
        (lambda: replace(TASK, tags="easy"), "tags = 'easy'; use a tuple of texts"),
        (lambda: replace(TASK, tags=(1,)), "tags = (1,); use a tuple of texts"),
        (lambda: replace(TASK, answer=3), "answer is an int; use a text"),
        (lambda: replace(TASK, split=["train"]), "split = ['train']; use one of"),
        (lambda: raise_(IndexError("list index")), "task(0) raised IndexError: list index (test_"),
        (lambda: sys.exit(1), "task(0) called sys.exit(1)"),
        (lambda: Task("t", "train"), "name the fields: Task("),  # type: ignore[misc]
    ],
)
def test_slips_in_task(result: Callable[[], Any], message: str) -> None:
    with pytest.raises(TaskError) as caught:
        guard(task=result).task(0)
    assert message in str(caught.value)


# ── what is allowed ──────────────────────────────────────────────────────────────────────────────


def test_details_are_any_json_and_come_as_they_are_stored() -> None:
    details = {"n": 3, "x": 0.5, "on": True, "none": None, "list": (1, [2]), "nested": {"a": [{}]}}
    observation = guard(step=lambda: event(**details)).start(TASK).step("")
    assert observation.events[0].details == {**details, "list": [1, [2]]}
    assert observation.events[0].detail("n") == "3" and observation.events[0].detail("no") == ""
    assert observation.events[0].detail("nested") == '{"a": [{}]}'


def test_lists_subclasses_and_numpy_scores_become_plain_records() -> None:
    class Shout(Message):
        pass

    message = Shout(role="tool", content=np.str_("Hello."))
    observation = guard(step=lambda: observe(messages=[message], events=[])).start(TASK).step("")
    assert observation == observe() and type(observation.messages[0]) is Message
    assert type(observation.messages[0].content) is str
    grade = guard(grade=lambda: Grade(score=np.float32(0.5), passed=False)).start(TASK).grade()
    assert grade == Grade(score=0.5, passed=False, feedback="") and type(grade.score) is float
    task = guard(task=lambda: replace(TASK, privileged=UserDict(a="b"), grader_args={"t": (1,)}))
    assert task.task(0).privileged == {"a": "b"} and task.task(0).grader_args == {"t": [1]}


def test_an_episode_cannot_change_the_task_of_another() -> None:
    def start(task: Task) -> Any:
        task.grader_args["list"].append(1)
        return SimpleNamespace(step=len, grade=len, task=task)

    task = replace(TASK, grader_args={"list": []})
    environment = guard(start=start)
    episodes: list[Any] = [environment.start(task) for _ in range(2)]
    assert [e.episode.task.grader_args["list"] for e in episodes] == [[1], [1]]
    assert task.grader_args == {"list": []}


# ── time ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("method", ["start", "step", "grade"])
def test_every_call_has_a_time_limit(method: str) -> None:
    released = threading.Event()
    environment = guard(seconds=0.1, **{method: lambda *_: released.wait(20)})
    begin = time.monotonic()
    try:
        with pytest.raises(EnvironmentFault, match=r"within 0\.1 seconds") as caught:
            episode = environment.start(TASK)
            episode.step("") if method == "step" else episode.grade()
    finally:
        released.set()
    assert f"world: {method}(" in str(caught.value) and time.monotonic() - begin < 5


def test_calls_run_concurrently() -> None:
    barrier = threading.Barrier(4, timeout=10)
    waiting = guard(step=lambda: (barrier.wait(), observe())[1]).start(TASK)
    broken = guard(step=lambda: (barrier.wait(), raise_(OSError("no")))[1]).start(TASK)
    calls = [lambda: waiting.begin_step("")] * 2 + [lambda: broken.begin_step("")] * 2
    results = call_all(calls)
    assert [isinstance(result, EnvironmentFault) for result in results] == [False] * 2 + [True] * 2
    assert call_all([]) == []


# ── modules ──────────────────────────────────────────────────────────────────────────────────────

MODULES = {
    "syntax": ("class World:\n    def task(self:\n", "syntax.py, line 2: "),
    "exits": ("import sys\nsys.exit('bye')\n", "importing 'exits' called sys.exit('bye') "
              "(exits.py, line 2); raise an exception instead"),
    "fails": ("1 / 0\n", "importing 'fails' raised ZeroDivisionError: division by zero (fails.py, "
              "line 1)"),
    "unmade": ("class World:\n    def __init__(self):\n        raise OSError('no data')\n",
               "World(**settings) raised OSError: no data (unmade.py, line 3)"),
    "leaves": ("class World:\n    def __init__(self):\n        raise SystemExit(0)\n",
               "World(**settings) called sys.exit(0) (leaves.py, line 3)"),
    "nulls": ("\0", "null bytes"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_modules_that_cannot_be_loaded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    text, message = MODULES[name]
    (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(TaskError) as caught:
        make_environment(EnvironmentTasks(kind="environment", path=f"{name}:World"))
    assert str(caught.value).startswith(f"tasks.path = '{name}:World': ")
    assert message in str(caught.value)
