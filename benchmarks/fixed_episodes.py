"""The environment of the step benchmark's side `hints`: episodes do not depend on the replies.

A task is a prompt of the job. Its episode has `NUM_TURNS` replies of the student, the same short
message of a tool between them, and an event about two of the replies: which two follows from the
task's number, so they are the same in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from opd_step_job import HINTS_PER_EPISODE, NUM_TURNS, read_lines

from courtside.hashing import task_id
from courtside.types import Event, Grade, Message, Observation, Task

OFF_COURSE = "off_course"
"""The kind of every event: that of the reader's rule."""


def faulted_replies(number: int) -> tuple[int, ...]:
    """Which replies of a task's episodes have an event; all pairs take turns."""
    pairs = list(combinations(range(NUM_TURNS), HINTS_PER_EPISODE))
    return pairs[number % len(pairs)]


class FixedEpisodes:
    def __init__(self, path: str) -> None:
        """`path`: one line a task, with its `prompt`, the `advice` of its hints, and the
        `tool_message` between turns."""
        self.rows = read_lines(Path(path))
        self.size = len(self.rows)

    def task(self, index: int) -> Task:
        row = self.rows[index]
        return Task(
            id=task_id("fixed", row["prompt"]),
            split="train",
            messages=(Message(role="user", content=row["prompt"]),),
            privileged={"advice": row["advice"]},
            grader_args={
                "tool_message": row["tool_message"],
                "faulted": list(faulted_replies(index)),
            },
        )

    def start(self, task: Task) -> FixedEpisode:
        return FixedEpisode(task.grader_args["tool_message"], task.grader_args["faulted"])


class FixedEpisode:
    def __init__(self, tool_message: str, faulted: Sequence[int]) -> None:
        self.tool_message, self.faulted = tool_message, faulted
        self.num_replies = 0

    def step(self, reply: str) -> Observation:
        events = (Event(kind=OFF_COURSE),) if self.num_replies in self.faulted else ()
        self.num_replies += 1
        if self.num_replies == NUM_TURNS:
            return Observation(messages=(), done=True, events=events)
        return Observation(
            messages=(Message(role="tool", content=self.tool_message),), events=events
        )

    def grade(self) -> Grade:
        """Nothing trains on it."""
        return Grade(score=0.0, passed=False, feedback="")
