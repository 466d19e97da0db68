"""Calls of an environment, which is other people's code: it may raise, hang or return anything.

A guarded environment gives valid records or raises `EnvironmentFault`; it never takes the run down
and never blames the student. What it cannot survive, the end of the process, `workers` does.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from courtside.environments.base import Environment, Episode
from courtside.environments.validation import (
    InvalidValue,
    validate_demonstration,
    validate_episode,
    validate_grade,
    validate_observation,
    validate_replies,
    validate_task,
)
from courtside.errors import TaskError
from courtside.plugins import describe_error, format_trace
from courtside.types import Grade, Observation, Task

T = TypeVar("T")


class EnvironmentFault(Exception):
    """A bug in an environment: the call, what it did, and the fix."""

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace
        """The traceback, where the environment raised."""


class TimedOut(BaseException):
    """Not an Exception: it may be raised inside user code, which catches those."""


# ── guarded records ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardedEnvironment:
    environment: Environment
    name: str
    """How messages call it, e.g. "tasks.path = 'a:B'"."""
    seconds: float | None
    """For each call of start, step or grade. None: no limit, in the calling thread."""

    @property
    def size(self) -> int:
        return self.environment.size

    @property
    def demonstrate(self) -> Any:
        """A function of the task; None: the environment has no such method."""
        return self._find_optional("demonstrate", validate_demonstration)

    @property
    def example_replies(self) -> Any:
        """For `courtside check-env`; None: the environment has no such method."""
        return self._find_optional("example_replies", validate_replies)

    def task(self, index: int) -> Task:
        where = f"{self.name}: task({index})"
        try:
            task = self.environment.task(index)
        except InvalidValue as problem:
            raise TaskError(f"{where}: {problem}") from None
        except (Exception, SystemExit) as error:  # user code
            raise TaskError(f"{where} {describe_error(error)}") from error
        return validate_task(task, where)

    def start(self, task: Task) -> GuardedEpisode:
        # A copy: an episode that changes its task must not change that of another sample.
        fresh = replace(task, grader_args=json.loads(json.dumps(dict(task.grader_args))))
        call = partial(self._call, "start(task)")
        episode = call(partial(self.environment.start, fresh), validate_episode)
        return GuardedEpisode(episode=episode, call=self._call)

    def _find_optional(self, name: str, validate: Callable[[Any], T]) -> Callable[[Task], T] | None:
        method: Any = getattr(self.environment, name, None)

        def call(task: Task) -> T:
            where = f"{self.name}: {name}(task)"
            try:
                return validate(method(task))
            except InvalidValue as problem:
                raise TaskError(f"{where}: {problem}") from None
            except (Exception, SystemExit) as error:  # user code
                raise TaskError(f"{where} {describe_error(error)}") from error

        return None if method is None else call

    def _call(self, method: str, call: Callable[[], Any], validate: Callable[[Any], T]) -> T:
        where = f"{self.name}: {method}"
        try:
            return validate(run_with_limit(call, self.seconds))
        except TimedOut:
            raise EnvironmentFault(
                f"{where} did not return within {self.seconds:g} seconds "
                "(rollout.limits.step_seconds). Give what it waits for a time limit of its own, or "
                "raise this one"
            ) from None
        except InvalidValue as problem:
            raise EnvironmentFault(f"{where}: {problem}") from None
        except (Exception, SystemExit) as error:  # user code
            raise EnvironmentFault(
                f"{where} {describe_error(error)}", format_trace(error)
            ) from None


@dataclass(slots=True, kw_only=True)
class GuardedEpisode:
    episode: Episode
    call: Callable[[str, Callable[[], Any], Callable[[Any], Any]], Any] = field(repr=False)

    def step(self, reply: str) -> Observation:
        observation: Observation = self.call(
            "step(reply)", partial(self.episode.step, reply), validate_observation
        )
        return observation

    def grade(self) -> Grade:
        grade: Grade = self.call("grade()", self.episode.grade, validate_grade)
        return grade


# ── calls ────────────────────────────────────────────────────────────────────────────────────────


def run_with_limit(call: Callable[[], T], seconds: float | None) -> T:
    """Raises what the call raises; `TimedOut` leaves it running in a daemon thread."""
    if seconds is None:
        return call()
    outcome: list[tuple[T | None, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:  # raised again in the caller's thread
            outcome.append((None, error))

    # A daemon: a hanging call must not keep the process alive.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimedOut
    value, error = outcome[0]
    if isinstance(error, KeyboardInterrupt):  # of user code: nobody pressed Ctrl-C in a thread
        raise InvalidValue("raised KeyboardInterrupt; raise another exception")
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def call_all(calls: Sequence[Callable[[], T]]) -> list[T | EnvironmentFault]:
    """Runs guarded calls concurrently; results in their order."""
    results: list[T | EnvironmentFault | None] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except EnvironmentFault as fault:
            results[index] = fault

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(result is not None for result in results), "guarded calls raise faults only"
    return results  # type: ignore[return-value]
