"""The protocol of environments. docs/environments.md writes one in forty lines.

Nothing is remembered between tasks: an episode follows from its `Task` alone, so that it can be
started again by another process, from a stored trajectory, or for another sample.
"""

from __future__ import annotations

from typing import Protocol

from courtside.errors import TaskError
from courtside.types import Grade, Observation, Task


class Episode(Protocol):
    """One run through a task. Used from one thread at a time; two episodes share nothing."""

    def step(self, reply: str) -> Observation:
        """Take what the student wrote and answer it.

        Any text can come, cut off or empty; none may raise. `Observation.messages` are put before
        the student next (role `tool` or `user`), `events` say what was wrong with this reply.
        After `done` there is no further step."""

    def grade(self) -> Grade:
        """Of the state as it is now, by a program. Also asked of an episode that ran into a limit,
        even before its first step."""


class Environment(Protocol):
    """A world. Its settings are the keyword arguments of the class."""

    @property
    def size(self) -> int:
        """How many tasks there are, at least 1; they are numbered from 0."""

    def task(self, index: int) -> Task:
        """A pure function of the number.

        `messages` are what the student reads first and end with a user's; `privileged` are named
        facts for hints and teachers; `grader_args` whatever `start` needs, as plain JSON values;
        `grader` stays None. `courtside.hashing` has `task_id` and `split_of` for the rest."""

    def start(self, task: Task) -> Episode:
        """A fresh episode, from the task alone. `task.messages` may have got a system prompt."""


def validate_task(task: object, where: str) -> Task:
    if not isinstance(task, Task):
        raise TaskError(
            f"{where} gave {type(task).__name__}; return a courtside.types.Task with id, split and "
            "messages"
        )
    if not task.messages or task.messages[-1].role not in ("user", "tool"):
        raise TaskError(
            f"{where} has messages that the student cannot answer; the last one must be a user's"
        )
    if task.grader is not None:
        raise TaskError(
            f"{where} has grader = {task.grader!r}, but an episode grades itself; leave it out"
        )
    return task
