"""The teacher's privileged context: a text that only the teacher sees, and where it goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from courtside.chat.messages import insert_context
from courtside.errors import TaskError
from courtside.recipe.context import Context
from courtside.types import Message, Task, Trajectory


def choose_contexts(
    config: Context, trajectories: Sequence[Trajectory]
) -> Mapping[str, str | None]:
    """By trajectory id; None: there is no text, so the trajectory gets no target."""
    if config.kind == "system" or config.kind == "field":
        return {t.id: task_context(config, t.task) for t in trajectories}
    texts: Mapping[str, str | None]
    if config.kind == "feedback":
        texts = {t.id: t.grade.feedback if t.grade else "" for t in trajectories}
    elif config.kind == "repair":
        repairs = {
            t.draft: t.response
            for t in trajectories
            if t.correction == "rewrite" and not t.is_pair_copy
        }
        texts = {t.id: repairs.get(t.id) for t in trajectories}
    elif config.kind == "critique":
        texts = {t.id: t.critique for t in trajectories}
    else:
        texts = {t.id: _passing_sibling(t, trajectories) for t in trajectories}
    return {
        id: config.template.replace("{text}", text) if text else None for id, text in texts.items()
    }


def task_context(config: Context, task: Task, *, where: str = "teacher.context") -> str | None:
    """The text that is known before any answer; None where it depends on one."""
    if config.kind == "system":
        return config.text
    if config.kind == "field":
        if config.field not in task.privileged:
            names = ", ".join(sorted(task.privileged)) or "none"
            raise TaskError(
                f"{where}.field = {config.field!r}: task {task.id} has no such privileged "
                f"field (it has: {names}). Add it to the tasks, or name another"
            )
        return config.template.replace("{text}", task.privileged[config.field])
    return None


def insert_context_text(config: Context, task: Task, text: str) -> tuple[Message, ...]:
    """The task's messages with the privileged text where the recipe puts it."""
    place: Literal["system", "user"] = "system" if config.kind == "system" else config.position
    return insert_context(task.messages, text, place)


def _passing_sibling(trajectory: Trajectory, group: Sequence[Trajectory]) -> str:
    """Another passing answer to the same prompt: the shortest, by id when several are."""
    passing = [
        other
        for other in group
        if other.task.id == trajectory.task.id
        and other.id != trajectory.id
        and other.correction != "rewrite"
        and other.grade is not None
        and other.grade.passed
    ]
    return min(passing, key=lambda t: (t.num_completion_tokens, t.id)).response if passing else ""
