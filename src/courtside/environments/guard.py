"""Calls of an environment, which is other people's code: it may raise, hang or return anything.

A guarded environment gives valid records or raises `EnvironmentFault`; it never takes the run down
and never blames the student. What it cannot survive, the end of the process, `workers` does.
"""

from __future__ import annotations

import json
import math
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
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
from courtside.errors import EnvironmentFaultsError, TaskError
from courtside.interrupts import time_limit
from courtside.plugins import describe_error, format_trace
from courtside.types import Grade, Observation, Task

T = TypeVar("T")

RECENT = 64
"""Episodes over which the fraction is taken, or those of the batch if they are more."""
MAX_NAMES = 64
"""Kinds of events, and decisions, of a run: each is a metric of its own."""
MIN_FAULTS = 3
"""Fewer do not stop a run, unless no episode went well."""


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
    """For each call of task, start, step or grade. None: no limit, in the calling thread."""
    folder: str = field(default_factory=os.getcwd)
    """The working directory, which the run's own paths are relative to."""
    start_lock: threading.Lock = field(default_factory=threading.Lock)
    """A rollout and an evaluation may run in two threads."""

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
            return validate_task(self._call_in_time(partial(self.environment.task, index)), where)
        except TimedOut:
            raise TaskError(
                f"{where} did not return within {self.seconds:g} seconds "
                "(rollout.limits.step_seconds). Prepare slow things in __init__, or raise the limit"
            ) from None
        except TaskError:
            raise
        except InvalidValue as problem:
            raise TaskError(f"{where}: {problem}") from None
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # user code, also sys.exit and cancelled tasks
            raise TaskError(f"{where} {describe_error(error)}") from error

    def _call_in_time(self, call: Callable[[], Any]) -> Any:
        """In the calling thread: many classes hold what belongs to the thread that made them."""
        if self.seconds is None:
            return call()
        with time_limit(self.seconds, TimedOut):
            return call()

    def start(self, task: Task) -> GuardedEpisode:
        # A copy: an episode that changes its task must not change that of another sample.
        fresh = replace(task, grader_args=json.loads(json.dumps(dict(task.grader_args))))
        call = partial(self.environment.start, fresh)
        with self.start_lock:  # `start` is a method of the object that all episodes share
            episode = self.begin_call("start(task)", call, validate_episode)()
        return GuardedEpisode(episode=episode, host=self)

    def _find_optional(self, name: str, validate: Callable[[Any], T]) -> Callable[[Task], T] | None:
        method: Any = getattr(self.environment, name, None)

        def call(task: Task) -> T:
            where = f"{self.name}: {name}(task)"
            try:
                return validate(self._call_in_time(partial(method, task)))
            except TimedOut:
                raise TaskError(
                    f"{where} did not return within {self.seconds:g} seconds "
                    "(rollout.limits.step_seconds). Make it faster, or raise the limit"
                ) from None
            except InvalidValue as problem:
                raise TaskError(f"{where}: {problem}") from None
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # user code, also sys.exit and cancelled tasks
                raise TaskError(f"{where} {describe_error(error)}") from error

        return None if method is None else call

    def begin_call(
        self, method: str, call: Callable[[], Any], validate: Callable[[Any], T]
    ) -> Callable[[], T]:
        """Starts the call; the result waits for it, and raises `EnvironmentFault` alone."""
        where = f"{self.name}: {method}"
        wait = begin(call, self.seconds)

        def finish() -> T:
            try:
                result = validate(wait())
                return_to_folder(self.folder)
                return result
            except TimedOut:
                raise EnvironmentFault(
                    f"{where} did not return within {self.seconds:g} seconds "
                    "(rollout.limits.step_seconds). Give what it waits for a time limit of its "
                    "own, or raise this one"
                ) from None
            except InvalidValue as problem:
                raise EnvironmentFault(f"{where}: {problem}") from None
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # user code, also sys.exit and cancelled tasks
                trace = format_trace(error)
                raise EnvironmentFault(f"{where} {describe_error(error)}", trace) from None

        return finish


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardedEpisode:
    episode: Episode
    host: GuardedEnvironment

    def begin_step(self, reply: str) -> Callable[[], Observation]:
        call = partial(self.episode.step, reply)
        return self.host.begin_call("step(reply)", call, validate_observation)

    def begin_grade(self) -> Callable[[], Grade]:
        return self.host.begin_call("grade()", self.episode.grade, validate_grade)

    def step(self, reply: str) -> Observation:
        return self.begin_step(reply)()

    def grade(self) -> Grade:
        return self.begin_grade()()


def return_to_folder(folder: str) -> None:
    """Raise `InvalidValue`, back in the folder, where a call has left it."""
    try:
        actual = os.getcwd()
    except FileNotFoundError:
        actual = "a folder that was deleted"
    if actual != folder:
        os.chdir(folder)
        raise InvalidValue(
            f"changed the working directory from {folder!r} to {actual!r}, which all calls and the "
            "run itself share. Use absolute paths; a library that changes it for the time of a "
            "call belongs into a worker (tasks.workers = 1)"
        )


# ── calls ────────────────────────────────────────────────────────────────────────────────────────


def begin(call: Callable[[], T], seconds: float | None) -> Callable[[], T]:
    """Starts the call in a daemon thread: one that hangs must not keep the process alive.

    The result waits for the call and returns or raises what it does, or `TimedOut`. Without a
    limit the call runs in the thread that waits.
    """
    if seconds is None:
        return call
    deadline = monotonic() + seconds
    outcome: list[tuple[T | None, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:  # raised again in the thread that waits
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def wait() -> T:
        thread.join(None if seconds == math.inf else max(0.0, deadline - monotonic()))
        if not outcome:
            raise TimedOut
        value, error = outcome[0]
        if isinstance(error, KeyboardInterrupt):  # of user code: nobody pressed Ctrl-C in a thread
            raise InvalidValue("raised KeyboardInterrupt; raise another exception")
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    return wait


def call_all(begins: Sequence[Callable[[], Callable[[], T]]]) -> list[T | EnvironmentFault]:
    """Starts all calls, then waits for each; results in their order."""
    waits = [begin_one() for begin_one in begins]
    results: list[T | EnvironmentFault] = []
    for wait in waits:
        try:
            results.append(wait())
        except EnvironmentFault as fault:
            results.append(fault)
    return results


# ── names over a run ─────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class NameMonitor:
    """The kinds of events and the decisions so far: an endless number of metrics is a bug."""

    kinds: set[str] = field(default_factory=set)
    decisions: set[str] = field(default_factory=set)

    def find_fault(self, observation: Observation) -> EnvironmentFault | None:
        """The first name above the limit, as a fault; None: all are known, or few enough."""
        for index, event in enumerate(observation.events):
            if not _admit(event.kind, self.kinds):
                return _describe_name(f"events[{index}].kind", event.kind, "kinds of events")
        decision = observation.decision
        if decision is not None and not _admit(decision, self.decisions):
            return _describe_name("decision", decision, "decisions")
        return None


def _admit(name: str, earlier_names: set[str]) -> bool:
    if name not in earlier_names and len(earlier_names) >= MAX_NAMES:
        return False
    earlier_names.add(name)
    return True


def _describe_name(where: str, name: str, what: str) -> EnvironmentFault:
    return EnvironmentFault(
        f"step(reply): Observation.{where} = {name!r}: there were {MAX_NAMES} other {what} "
        "already, and each becomes a metric. Use few fixed names, and put what varies into the "
        "`details` of an event"
    )


# ── faults over a run ────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, kw_only=True)
class FaultMonitor:
    """The first fault is printed, and too many of them stop the run."""

    max_fraction: float
    """`rollout.limits.max_fault_fraction`."""
    recent: list[str | None] = field(default_factory=list)
    """The fault of each recent episode; None: it had none."""
    has_printed: bool = False

    def print_first(self, fault: EnvironmentFault, *, where: str) -> None:
        if not self.has_printed:
            self.has_printed = True
            warnings.warn(
                f"the environment has a bug: {fault} ({where}). Such episodes end there without a "
                "grade and are counted as environment_faults, not as errors of the student; only "
                f"this one is printed. `courtside check-env` finds such bugs.\n{fault.trace}",
                stacklevel=2,
            )

    def check(self, faults: Sequence[str | None]) -> None:
        """Takes the faults of a batch of episodes; raises where they are too many."""
        self.recent = [*self.recent, *faults][-max(RECENT, len(faults)) :]
        messages = [fault for fault in self.recent if fault is not None]
        num, total = len(messages), len(self.recent)
        if num <= self.max_fraction * total or (num < MIN_FAULTS and num < total):
            return
        first = messages[0]
        self.recent = []
        raise EnvironmentFaultsError(
            f"{num} of the last {total} episodes were ended by a bug in the environment, more "
            f"than rollout.limits.max_fault_fraction = {self.max_fraction:g} allows. The first: "
            f"{first}. `courtside check-env` shows all kinds of them; mend the environment and go "
            "on in the same folder"
        )
