"""The world of the step benchmark's side `hints`: whatever the student writes, episodes go the same
way.

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
"""The kind of every event: what the reader's rule looks for."""


def faulted_replies(number: int) -> tuple[int, ...]:
    """Which replies of a task's episodes have an event; all pairs take turns."""
    pairs = list(combinations(range(NUM_TURNS), HINTS_PER_EPISODE))
    return pairs[number % len(pairs)]


class FixedEpisodes:
    def __init__(self, path: str) -> None:
        """`path`: one line a task, with its `prompt`, the `advice` of its hints, and what the tool
        has `said` in between."""
        self.rows = read_lines(Path(path))
        self.size = len(self.rows)

    def task(self, index: int) -> Task:
        row = self.rows[index]
        return Task(
            id=task_id("fixed", row["prompt"]),
            split="train",
            messages=(Message(role="user", content=row["prompt"]),),
            privileged={"advice": row["advice"]},
            grader_args={"said": row["said"], "faulted": list(faulted_replies(index))},
        )

    def start(self, task: Task) -> FixedEpisode:
        return FixedEpisode(task.grader_args["said"], task.grader_args["faulted"])


class FixedEpisode:
    def __init__(self, said: str, faulted: Sequence[int]) -> None:
        self.said, self.faulted = said, faulted
        self.num_replies = 0

    def step(self, reply: str) -> Observation:
        events = (Event(kind=OFF_COURSE),) if self.num_replies in self.faulted else ()
        self.num_replies += 1
        if self.num_replies == NUM_TURNS:
            return Observation(messages=(), done=True, events=events)
        return Observation(messages=(Message(role="tool", content=self.said),), events=events)

    def grade(self) -> Grade:
        """Nothing trains on it."""
        return Grade(score=0.0, passed=False, feedback="")
