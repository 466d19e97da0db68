"""Tasks from user code: the function at `module:function` returns them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from courtside.environments.validation import validate_task
from courtside.errors import TaskError
from courtside.plugins import describe_error, make_plugin
from courtside.recipe.tasks import CustomTasks
from courtside.tasks.graders import require_gradable
from courtside.tasks.parsing import Record, parse_tasks, with_default_grader
from courtside.types import Task

MAX_TASKS = 5_000_000
"""All of them are in memory."""


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
    items = _list_items(result, where)
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


def _list_items(result: Iterable[Any], where: str) -> list[Any]:
    """A generator runs here, so it may raise, or never end."""
    try:
        items = list(islice(result, MAX_TASKS + 1))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # user code, also sys.exit and cancelled tasks
        raise TaskError(f"{where} {describe_error(error)}") from error
    if not items:
        raise TaskError(f"{where} returned no tasks; return at least one")
    if len(items) > MAX_TASKS:
        raise TaskError(f"{where} gives more than {MAX_TASKS:,} tasks; return fewer")
    return items


def _validate_task(item: Any, where: str) -> Task:
    if not isinstance(item, Task):
        raise TaskError(
            f"{where} is {type(item).__name__}; return courtside.types.Task only, or dicts only"
        )
    task = validate_task(item, where, is_episode=False)
    try:
        require_gradable(task)
    except TaskError as error:
        raise TaskError(f"{where}: {error}") from None
    return task
