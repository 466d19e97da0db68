"""A recipe's tasks section → its world."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from courtside.environments.base import Environment, validate_task
from courtside.environments.toolbox.environment import Toolbox
from courtside.errors import TaskError
from courtside.recipe import EnvironmentTasks, TasksConfig, ToolboxTasks


def make_environment(config: TasksConfig) -> Environment | None:
    """None: the tasks are single prompts."""
    match config:
        case EnvironmentTasks():
            return load_environment(config.path, config.settings)
        case ToolboxTasks():
            return Toolbox(config)
        case _:
            return None


def load_environment(path: str, settings: Mapping[str, Any]) -> Environment:
    """The world that `module:Class` names, made with the settings and looked at."""
    where = f"tasks.path = {path!r}"
    module, _, name = path.partition(":")
    found = getattr(_module(module, where), name, None)
    if not inspect.isclass(found):
        raise TaskError(
            f"{where}: module {module!r} has no class {name!r}; correct the name after the colon"
        )
    try:
        signature = inspect.signature(found)
        signature.bind(**settings)
    except TypeError as error:
        takes = ", ".join(str(one) for one in signature.parameters.values()) or "no settings"
        raise TaskError(
            f"{where}: tasks.settings = {dict(settings)} do not fit, {error}; {name} takes {takes}"
        ) from None
    world = found(**settings)
    _check(world, where, name)
    return cast(Environment, world)


def _module(name: str, where: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:  # a command's own folder is there instead; behind all others
        sys.path.append(here)
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(f"{missing}."):
            raise TaskError(
                f"{where}: there is no module {missing!r}. Install it, or put {missing}.py where "
                f"the command runs ({here})"
            ) from None
        raise TaskError(
            f"{where}: module {name!r} imports {missing!r}, which is not installed; install it"
        ) from None


def _check(world: Any, where: str, name: str) -> None:
    """What can be told before an episode starts, which may cost something."""
    for method, call in (("task", "task(index)"), ("start", "start(task)")):
        if not callable(getattr(world, method, None)):
            raise TaskError(f"{where}: {name} has no method {call}; add it")
    size = getattr(world, "size", None)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise TaskError(
            f"{where}: {name}.size = {size!r}; set it to the number of tasks, at least 1"
        )
    first = validate_task(world.task(0), f"{where}: task(0)")
    if world.task(0) != first:
        raise TaskError(
            f"{where}: task(0) differs from call to call. Make it a pure function of the number: "
            "no clock, no global random state"
        )
