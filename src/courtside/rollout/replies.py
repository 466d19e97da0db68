"""Other replies in place of a turn: the episode is played again up to it."""

from __future__ import annotations

from collections.abc import Callable

from courtside.environments.base import Episode
from courtside.environments.guard import EnvironmentFault
from courtside.types import Event, Grade, Observation, Task, Trajectory


def reply_passes(
    start: Callable[[Task], Episode],
    trajectory: Trajectory,
    turn: int,
    reply: str,
) -> bool:
    """Whether `reply`, in place of that turn, causes no event."""
    try:
        return not _replay(start, trajectory, turn, reply)[1].events
    except EnvironmentFault:
        return False


def replay_with_reply(
    start: Callable[[Task], Episode], trajectory: Trajectory, turn: int, reply: str
) -> tuple[tuple[Event, ...], Grade | None]:
    """Events of `reply` in place of that turn, and the grade where it was the episode's last; a
    fault of the environment is an event."""
    is_last = not any(t.role == "assistant" for t in trajectory.turns[turn + 1 :])
    try:
        episode, observation = _replay(start, trajectory, turn, reply)
        return observation.events, episode.grade() if is_last else None
    except EnvironmentFault as fault:
        return (Event(kind="environment_fault", details={"message": str(fault)}),), None


def _replay(
    start: Callable[[Task], Episode], trajectory: Trajectory, turn: int, reply: str
) -> tuple[Episode, Observation]:
    """The episode follows from its task and the student's replies up to that turn."""
    episode = start(trajectory.task)
    for text in [t.text for t in trajectory.turns[:turn] if t.role == "assistant"]:
        episode.step(text)
    return episode, episode.step(reply)
