"""Answers that a student began in another run, as tasks that continue them.

The start of an answer is text here, and cut right before white space: tokenizers that split there
give the student's own token ids again, unless it spelled a word in an unusual way. All prefixes of
a problem are in one split, by its id.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace

from courtside.errors import TaskError
from courtside.hashing import SeededRandom, split_of, task_id
from courtside.recipe.prefix_tasks import PrefixTasks
from courtside.tasks.stored_trajectories import list_stored_steps, open_stored_run
from courtside.types import Grade, Message, Task, Trajectory

REPLACEMENT = "\ufffd"
"""Stands for sampled bytes that are no text, which cannot be written again."""


def read_prefix_tasks(config: PrefixTasks, notes: list[str]) -> list[Task]:
    """The tasks of a stored run's answers; `notes` says how many answers gave none."""
    folder = open_stored_run(config.path)
    where = f"tasks.path = {str(config.path)!r}"
    tasks: dict[str, Task] = {}
    num_answers = num_uncut = 0
    for step in list_stored_steps(folder, config.steps):
        for stored in folder.trajectories(step):
            trajectory = stored.trajectory
            if trajectory.source != "student" or trajectory.is_pair_copy:
                continue
            _require_answer(trajectory, where)
            if config.select == "failed" and trajectory.grade and trajectory.grade.passed:
                continue
            num_answers += 1
            cut_tasks = {task.id: task for task in cut_answer(trajectory, config)}
            num_uncut += not cut_tasks
            tasks |= cut_tasks
    if not tasks:
        raise TaskError(
            f"{where}: none of its {num_answers} answers of the student "
            f"({'that failed, ' if config.select == 'failed' else ''}with a word's end between "
            f"{config.depths[0]:.0%} and {config.depths[1]:.0%} of the text) can be continued. "
            "Widen tasks.depths, use select = 'all', or let that run store more trajectories"
        )
    if num_uncut:
        notes.append(
            f"{num_uncut} of {num_answers} answers have no word's end between {config.depths[0]:g} "
            f"and {config.depths[1]:g} of their text and are left out (tasks.depths)"
        )
    return list(tasks.values())


def cut_answer(trajectory: Trajectory, config: PrefixTasks) -> Iterator[Task]:
    """`config.cuts` tasks of an answer, fewer where it has fewer places to cut."""
    text, task = trajectory.response, trajectory.task
    end = text.find(REPLACEMENT) if REPLACEMENT in text else len(text)
    low, high = (depth * len(text) for depth in config.depths)
    places = [
        i for i in range(1, end)
        if low <= i <= high and text[i].isspace() and not text[i - 1].isspace()
    ]  # fmt: skip
    random = SeededRandom(f"cut {task.id} {text}")
    for place in sorted(random.choose_distinct(places, min(config.cuts, len(places)))):
        prefix = text[:place]
        yield replace(
            task,
            id=task_id("prefix", json.dumps([task.id, prefix])),
            split=split_of(task.id),
            messages=(*task.messages, Message(role="assistant", content=prefix)),
            completion=None,  # they answer the prompt, not this prefix
            rejected=None,
            tags=(*task.tags, "prefix"),
        )


def grade_whole_answers(
    grade: Callable[[Task, str], Grade | None],
) -> Callable[[Task, str], Grade | None]:
    """`grade` of the student's prefix with its continuation."""

    def grade_whole(task: Task, continuation: str) -> Grade | None:
        return grade(task, task.messages[-1].content + continuation)

    return grade_whole


def _require_answer(trajectory: Trajectory, where: str) -> None:
    task = trajectory.task
    if len(trajectory.turns) != 2 or not task.messages:
        raise TaskError(
            f"{where}: trajectory {trajectory.id} is an episode of {len(trajectory.turns)} turns; "
            "prefixes are made of single answers. In an environment use [takeover], which lets a "
            "teacher play on from the student's turns"
        )
    if task.messages[-1].role == "assistant":
        raise TaskError(
            f"{where}: task {task.id} begins its answer already (response_prefix); name a run "
            "whose student answered from the start"
        )
