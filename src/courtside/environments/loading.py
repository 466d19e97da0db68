"""The environment of a recipe's [tasks] section."""

from __future__ import annotations

from typing import Any, cast

from courtside.environments.base import Environment, validate_task
from courtside.environments.toolbox.environment import Toolbox
from courtside.errors import TaskError
from courtside.plugins import make_plugin
from courtside.recipe.tasks import EnvironmentTasks, TasksConfig, ToolboxTasks


def make_environment(config: TasksConfig) -> Environment | None:
    """None: the tasks are single prompts."""
    match config:
        case EnvironmentTasks():
            return load_environment(config)
        case ToolboxTasks():
            return Toolbox(config)
        case _:
            return None


def load_environment(config: EnvironmentTasks) -> Environment:
    """An instance of the class at `module:Class`. No episode is started: that may be expensive."""
    environment: Any = make_plugin(config, "class", section="tasks", error=TaskError)
    where, name = f"tasks.path = {config.path!r}", config.path.partition(":")[2]
    for method, call in (("task", "task(index)"), ("start", "start(task)")):
        if not callable(getattr(environment, method, None)):
            raise TaskError(f"{where}: {name} has no method {call}; add it")
    size = getattr(environment, "size", None)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise TaskError(
            f"{where}: {name}.size = {size!r}; set it to the number of tasks, at least 1"
        )
    first = validate_task(environment.task(0), f"{where}: task(0)")
    if environment.task(0) != first:
        raise TaskError(
            f"{where}: task(0) differs from call to call. Make it a pure function of the number: "
            "no clock, no global random state"
        )
    return cast(Environment, environment)
