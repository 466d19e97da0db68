"""Environments in worker processes: one that dies or hangs costs its episode, not the run.

A worker is a fresh interpreter (never a fork) that holds many episodes and runs one call at a time,
so the call that ends it is known. Its other episodes are started again in the next process and
replayed: an episode follows from its task and the student's replies.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from courtside.environments.guard import EnvironmentFault, begin
from courtside.errors import TaskError
from courtside.recipe.rollout import LimitsConfig
from courtside.recipe.tasks import EnvironmentTasks
from courtside.types import Grade, Message, Observation, Task

LOAD_GRACE_SECONDS = 5.0
"""For a worker to start, and to say by itself that loading took too long."""
EXIT_SECONDS = 2.0
"""For a worker to end by itself when its connection is closed."""


class WorkerDied(Exception):
    """How the process ended, e.g. "was killed by SIGSEGV"."""


class WorkerEnvironment:
    """`tasks.workers` processes with an instance of the environment each."""

    def __init__(
        self, config: EnvironmentTasks, limits: LimitsConfig, *, tools_in_template: bool = False
    ) -> None:
        self.name = f"tasks.path = {config.path!r}"
        self.seconds = limits.step_seconds
        self._workers = [Worker(config, tools_in_template, limits) for _ in range(config.workers)]
        # Also at the interpreter's exit. Bound to the list: a reference to self would keep it.
        self.close: Callable[[], Any] = weakref.finalize(self, _stop_all, self._workers)
        try:
            for worker in self._workers:  # all of them start before the first is waited for
                worker.launch()
            replies = [worker.wait_until_loaded() for worker in self._workers]
        except WorkerDied as death:
            raise TaskError(
                f"{self.name}: its worker process {death} while the module was imported or the "
                "class was made; remove what ends the process there"
            ) from None
        except TimeoutError:
            raise TaskError(
                f"{self.name}: importing the module and making the class took longer than "
                f"{limits.load_seconds:g} seconds (rollout.limits.load_seconds), outside of Python "
                "code. Give what it waits for a time limit of its own, or raise this one"
            ) from None
        self.size: int = replies[0]["size"]
        self._optional: list[str] = replies[0]["optional"]

    @property
    def demonstrate(self) -> Callable[[Task], Sequence[Message]] | None:
        """None: the environment has no such method."""
        return self._find_optional("demonstrate")

    @property
    def example_replies(self) -> Callable[[Task], Sequence[str]] | None:
        return self._find_optional("example_replies")

    def task(self, index: int) -> Task:
        task: Task = self._call_any("task", index)
        return task

    def start(self, task: Task) -> WorkerEpisode:
        worker = min(self._workers, key=lambda worker: worker.num_episodes)
        worker.num_episodes += 1
        episode = WorkerEpisode(self, worker, task)
        episode.revive()
        return episode

    def call(self, worker: Worker, method: str, *args: Any) -> Any:
        """The result of one call; holds the worker's lock."""
        try:
            return worker.call(method, *args, seconds=self.seconds)
        except TimeoutError:
            raise EnvironmentFault(
                f"{self.name}: {method} did not return within {self.seconds:g} seconds "
                "(rollout.limits.step_seconds), and its worker process was killed"
            ) from None
        except WorkerDied as death:
            raise EnvironmentFault(f"{self.name}: {method} ended its process: it {death}") from None
        except TaskError as error:  # of a process that was started again
            raise EnvironmentFault(str(error)) from None

    def _call_any(self, method: str, *args: Any) -> Any:
        worker = self._workers[0]
        try:
            with worker.lock:
                return worker.call(method, *args, seconds=self.seconds)
        except (TimeoutError, WorkerDied) as problem:
            how = str(problem) or f"did not return within {self.seconds:g} seconds"
            arguments = ", ".join(str(arg) for arg in args if isinstance(arg, int))
            raise TaskError(f"{self.name}: {method}({arguments}): its process {how}") from None

    def _find_optional(self, name: str) -> Callable[[Task], Any] | None:
        return partial(self._call_any, name) if name in self._optional else None


class WorkerEpisode:
    """An episode in a worker, which is replayed in the next one when its process has ended."""

    def __init__(self, environment: WorkerEnvironment, worker: Worker, task: Task) -> None:
        self._environment, self._worker, self._task = environment, worker, task
        self._key = worker.next_key()
        self._generation = -1
        """Of the process that holds the episode."""
        self._turns: list[tuple[str, Observation]] = []

    def step(self, reply: str) -> Observation:
        with self._worker.lock:
            self._revive()
            observation: Observation = self._call("step", reply)
        self._turns.append((reply, observation))
        return observation

    def grade(self) -> Grade:
        with self._worker.lock:
            self._revive()
            grade: Grade = self._call("grade")
        return grade

    def begin_step(self, reply: str) -> Callable[[], Observation]:
        return begin(partial(self.step, reply), math.inf)  # the worker has its own time limit

    def begin_grade(self) -> Callable[[], Grade]:
        return begin(self.grade, math.inf)

    def revive(self) -> None:
        """Starts the episode, or replays it where its process has ended."""
        with self._worker.lock:
            self._revive()

    def _revive(self) -> None:
        if self._worker.generation == self._generation:
            return
        self._call("start", self._task)
        self._generation = self._worker.generation
        for reply, observation in self._turns:
            if self._call("step", reply) != observation:
                raise EnvironmentFault(
                    f"{self._environment.name}: another episode ended the worker process, and this "
                    "one was answered differently when it was replayed. Let an episode follow from "
                    "its task and the replies alone, without a clock or global state"
                )

    def _call(self, method: str, *args: Any) -> Any:
        return self._environment.call(self._worker, method, self._key, *args)

    def __del__(self) -> None:
        self._worker.discard(self._key)


class Worker:
    """One process, started again when it has ended."""

    def __init__(
        self, config: EnvironmentTasks, tools_in_template: bool, limits: LimitsConfig
    ) -> None:
        self.start_message = (config, tools_in_template, limits)
        """What the process needs to load the environment."""
        self.load_seconds = limits.load_seconds + limits.step_seconds + LOAD_GRACE_SECONDS
        """Of importing, making the class and its first task."""
        self.lock = threading.Lock()
        """Held for a call and what belongs to it."""
        self.generation = 0
        """Counts processes that ended."""
        self.num_episodes = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._num_keys = 0
        self._discarded: list[int] = []

    def next_key(self) -> int:
        self._num_keys += 1
        return self._num_keys

    def discard(self, key: int) -> None:
        self._discarded.append(key)  # sent with the next call
        self.num_episodes -= 1

    def launch(self) -> None:
        connection, child_connection = Pipe()
        with child_connection:
            # A session of its own: Ctrl-C is for the run, and a kill takes the children along.
            # Not multiprocessing's spawn: that would run the user's script again.
            program = (
                f"import sys; sys.path[:] = {sys.path!r}; "
                "from courtside.environments.worker_process import main; "
                f"main({child_connection.fileno()})"
            )
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                pass_fds=[child_connection.fileno()],
                start_new_session=True,
            )
        self._connection = connection
        self._discarded.clear()
        with suppress(OSError):  # it has already ended; `wait_until_loaded` says how
            connection.send(self.start_message)

    def wait_until_loaded(self) -> dict[str, Any]:
        reply: dict[str, Any] = self._receive(self.load_seconds)
        return reply

    def call(self, method: str, *args: Any, seconds: float) -> Any:
        if self._process is None:
            self.launch()
            self.wait_until_loaded()
        assert self._connection is not None
        discarded, self._discarded = self._discarded, []
        try:
            self._connection.send((method, args, discarded))
        except OSError:
            raise WorkerDied(self.stop()) from None
        return self._receive(seconds)

    def _receive(self, seconds: float | None) -> Any:
        """The reply; after a time-out the process is gone."""
        assert self._connection is not None
        try:
            if not self._connection.poll(seconds):
                self.stop(kill=True)
                raise TimeoutError
            kind, *content = self._connection.recv()
        except (EOFError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise WorkerDied(self.stop()) from None
        if kind == "fault":
            raise EnvironmentFault(*content)
        if kind == "task_error":
            raise TaskError(*content)
        return content[0]

    def close(self) -> None:
        """The process ends when its call is done."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def stop(self, *, kill: bool = False) -> str:
        """Ends the process and says how it ended."""
        process, self._process = self._process, None
        self.generation += 1
        self.close()
        if process is None:
            return "was stopped"
        if not kill:
            with suppress(subprocess.TimeoutExpired):
                process.wait(EXIT_SECONDS)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # also children that outlive the worker
        code = process.wait()
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"


def _stop_all(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.close()  # all at once: each may take a moment to end
    for worker in workers:
        worker.stop()
