"""Reminders in demonstrations, phrased like hints, which the expert follows.

No reader uses these texts: a student warm-started on them has not seen the hints of training.
"""

from __future__ import annotations

from courtside.environments.seeded_random import SeededRandom
from courtside.types import Message, Task

REMINDERS = (
    "Only these tools exist: {tools}.",
    "Look at the list again. It has {tools}.",
    "Note that the tools are called {tools} in this conversation.",
    "Use one of {tools}, under exactly that name.",
    "Careful, other names will not be found. Listed are {tools}.",
    "You can call {tools} and nothing else.",
)


def make_reminder(task: Task, turn: int) -> Message:
    """The one for the call of this turn; a message as `hints.position = "before_turn"` makes it."""
    template = SeededRandom(f"words {task.id} {turn}").choice(REMINDERS)
    return Message(role="user", content=template.format(tools=task.privileged["tools"]))
