"""Tasks from user code: the function at `module:function` returns them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from courtside.errors import TaskError
from courtside.plugins import make_plugin
from courtside.recipe.tasks import CustomTasks
from courtside.tasks.graders import require_gradable
from courtside.tasks.parsing import Record, parse_tasks, with_default_grader
from courtside.types import Message, Split, Task


def load_custom_tasks(config: CustomTasks, notes: list[str] | None = None) -> tuple[Task, ...]:
    """All tasks of the function: `Task` records, or dicts with the keys of JSONL tasks. `notes`
    gets what a user should know."""
    where = f"tasks.path = {config.path!r}"
    result = make_plugin(config, "function", section="tasks", error=TaskError)
    if not isinstance(result, Iterable) or isinstance(result, str | bytes | Mapping):
        raise TaskError(
            f"{where} returned {type(result).__name__}; return an iterable of courtside.types.Task "
            "or of dicts with the keys of JSONL tasks"
        )
    items = list(result)
    if not items:
        raise TaskError(f"{where} returned no tasks; return at least one")
    if all(isinstance(item, Mapping) for item in items):
        records = (
            Record(where=f"{where}, item {index}", fields=item) for index, item in enumerate(items)
        )
        return parse_tasks("custom", with_default_grader(records, config.grader), notes)
    if config.grader is not None:
        raise TaskError(
            "tasks.grader is the default of tasks written as dicts, and "
            f"{config.path} returns Task records; set `grader` on them, and remove it here"
        )
    tasks: dict[str, Task] = {}
    for index, item in enumerate(items):
        task = _validate_task(item, f"{where}, item {index}")
        if tasks.setdefault(task.id, task) != task:
            raise TaskError(
                f"{where}, item {index}: id = {task.id!r} is that of another task; make it a hash "
                "of the content (courtside.hashing.task_id)"
            )
    return tuple(tasks.values())


def _validate_task(item: Any, where: str) -> Task:
    if not isinstance(item, Task):
        raise TaskError(
            f"{where} is {type(item).__name__}; return courtside.types.Task only, or dicts only"
        )
    if not isinstance(item.id, str) or not item.id:
        raise TaskError(f"{where}: id = {item.id!r}; give the task a text that identifies it")
    if item.split not in get_args(Split):
        raise TaskError(f"{where}: split = {item.split!r}; use one of {list(get_args(Split))}")
    if not isinstance(item.messages, tuple) or not all(
        isinstance(message, Message) for message in item.messages
    ):
        raise TaskError(f"{where}: messages must be a tuple of courtside.types.Message")
    if not item.messages or item.messages[-1].role not in ("user", "tool"):
        raise TaskError(f"{where}: the last message must be a user's, for the student to answer")
    try:
        json.dumps(dict(item.grader_args), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TaskError(
            f"{where}: grader_args must hold JSON values, as they are stored with the run; use "
            f"texts, numbers, lists and dicts ({error})"
        ) from None
    try:
        require_gradable(item)
    except TaskError as error:
        raise TaskError(f"{where}: {error}") from None
    return item
