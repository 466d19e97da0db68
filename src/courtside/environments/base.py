"""The protocol of environments. docs/environments.md shows one in forty lines.

Environments keep no state between tasks: an episode follows from its `Task` alone, so that another
process can start it again, from a stored trajectory or for another sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from courtside.types import Grade, Message, Observation, Task, Turn


class Episode(Protocol):
    """One episode of a task. Used from one thread at a time; two episodes share no state."""

    def step(self, reply: str) -> Observation:
        """Answer one assistant turn.

        `reply` can be any text, also truncated or empty; a call that raises ends the episode as a
        fault of the environment, not of the student. `Observation.messages`
        are the next prompt (role `tool` or `user`), `events` the mistakes of this reply. There is
        no further step after `done`."""

    def grade(self) -> Grade:
        """Grade the current state. Also called when a limit ended the episode, even before the
        first step."""


class HostedEpisode(Episode, Protocol):
    """An episode as rollouts use it: its calls raise `EnvironmentFault` and nothing else."""

    def begin_step(self, reply: str) -> Callable[[], Observation]:
        """Starts the call in a thread; the result waits for it."""

    def begin_grade(self) -> Callable[[], Grade]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRequest:
    """An episode to run."""

    id: str
    task: Task
    seed: int
    start: Callable[[Task], HostedEpisode]
    turns: tuple[Turn, ...] = ()
    """Earlier turns of an episode that is continued, whose state `start` gives, up to the
    environment's last one; empty: the episode begins with its prompt."""
    prompt_ids: tuple[int, ...] | None = None
    """Ids that the engine gets in place of those of `turns`, where the model that plays has another
    prompt; None: the same."""


class Environment(Protocol):
    """Settings of the recipe are the keyword arguments of the class."""

    @property
    def size(self) -> int:
        """How many tasks there are, at least 1; they are numbered from 0."""

    def task(self, index: int) -> Task:
        """A pure function of the number.

        `messages` are the first prompt and end with a user message; `privileged` are named facts
        for hints and teachers; `grader_args` whatever `start` needs, as plain JSON values; `grader`
        stays None. `courtside.hashing` has `task_id` and `split_of` for the other fields."""

    def start(self, task: Task) -> Episode:
        """A fresh episode, from the task alone. `task.messages` may have a system prompt added."""


class HostedEnvironment(Protocol):
    """A user's environment as `make_environment` makes it: in this process, or in workers."""

    @property
    def size(self) -> int: ...

    def task(self, index: int) -> Task:
        """A valid task; a TaskError otherwise."""

    def start(self, task: Task) -> HostedEpisode:
        """Raises `EnvironmentFault` and nothing else."""

    @property
    def demonstrate(self) -> Callable[[Task], Sequence[Message]] | None:
        """A whole conversation to imitate; None: the environment has no such method."""

    @property
    def example_replies(self) -> Callable[[Task], Sequence[str]] | None:
        """For `courtside check-env`; None: the environment has no such method."""
