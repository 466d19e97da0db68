"""Random values as results of every method: only faults, task errors and valid records come out."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import numpy as np

from courtside.environments.guard import EnvironmentFault, GuardedEnvironment
from courtside.errors import TaskError
from courtside.types import Event, Grade, Message, Observation, Task

GO = (Message(role="user", content="Go."),)
TASK = Task(id="t", split="train", messages=GO)


def fail(*_: Any) -> Any:
    raise RuntimeError


class Hostile:
    __repr__ = __eq__ = __hash__ = __len__ = __iter__ = __bool__ = fail  # type: ignore[assignment]


class HostileStr(str):
    encode = __str__ = fail


class HostileDict(dict[Any, Any]):
    items = __iter__ = fail


class HostileList(list[Any]):
    __iter__ = fail


VALUES = [
    None, 0, 1.5, float("nan"), True, "", "x", "\ud800", b"x", [], [1], (), {}, {"a": 1}, {1: 2},
    {"a": object()}, {"a": float("inf")}, Hostile(), HostileStr("x"), HostileDict(a=1),
    HostileList([1]), Hostile, len, np.array([1, 2]), np.float32(0.5), np.bool_(1), np.array(0.5),
    GO[0], Event(kind="k"), Exception(), range(3), iter([]), 10**400, NotImplemented,
]  # fmt: skip


class Generator:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def either(self, *usual: Any) -> Any:
        return self.rng.choice([*usual, self.rng.choice(VALUES)])

    def value(self, depth: int = 0) -> Any:
        kind = self.rng.randrange(5) if depth < 3 else 0
        if kind == 1:
            return Message(role=self.either("user", "tool"), content=self.either("x"))
        if kind == 2:
            details = self.either({}, {"a": self.value(depth + 1)})
            return Event(kind=self.either("k"), details=details)
        if kind > 2:
            values = [self.value(depth + 1) for _ in range(self.rng.randrange(3))]
            return values if kind == 3 else tuple(values)
        return self.rng.choice(VALUES)

    def task(self, _index: int) -> Any:
        record = Task(
            id=self.either("a", "b"), split=self.either("train", "test"),
            messages=self.either(GO, GO, self.value()), answer=self.either(None),
            privileged=self.either({}, {"a": "b"}), tags=self.either((), ("x",)),
            grader_args=self.either({}, {"a": self.value()}),
        )  # fmt: skip
        return self.either(record, record)

    def step(self, _reply: str) -> Any:
        record = Observation(
            messages=self.either(GO, GO, self.value()), done=self.either(True, False),
            events=self.either((), self.value(), [Event(kind="k", details={"a": self.value()})]),
        )  # fmt: skip
        return self.either(record, record)

    def grade(self) -> Any:
        record = Grade(
            score=self.either(0, 1.0), passed=self.either(True), feedback=self.either("", "x")
        )
        return self.either(record, record)


def test_nothing_else_comes_out() -> None:
    num_valid = 0
    for seed in range(3000):
        generator = Generator(seed)
        episode = SimpleNamespace(step=generator.step, grade=generator.grade)
        world: Any = SimpleNamespace(task=generator.task, start=lambda _task, e=episode: e)
        guarded = GuardedEnvironment(environment=world, name="world", seconds=None)
        calls = (
            lambda g=guarded: g.task(0),
            lambda g=guarded: g.start(TASK).step(""),
            lambda g=guarded: g.start(TASK).grade(),
        )
        for call in calls:
            try:
                result = call()
            except (EnvironmentFault, TaskError):
                continue
            num_valid += 1
            assert type(result) in (Task, Observation, Grade)
            if isinstance(result, Observation):
                details = [event.details for event in result.events]
                assert json.loads(json.dumps(details, allow_nan=False)) == details
                assert all(type(message.content) is str for message in result.messages)
    assert 500 < num_valid < 7000, "both kinds must occur"
