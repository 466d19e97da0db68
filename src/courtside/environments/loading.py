"""The environment of a recipe's [tasks] section, guarded against its own bugs."""

from __future__ import annotations

import os
from typing import Any

from courtside.environments.base import Environment, HostedEnvironment
from courtside.environments.guard import GuardedEnvironment, TimedOut, return_to_folder
from courtside.environments.switchboard.environment import Switchboard
from courtside.environments.tool_class import is_tool_class, make_tool_environment
from courtside.environments.toolbox.environment import Toolbox
from courtside.environments.validation import InvalidValue
from courtside.environments.workers import WorkerEnvironment
from courtside.errors import TaskError
from courtside.interrupts import time_limit
from courtside.plugins import describe_error, find_place, load_plugin, make_plugin
from courtside.recipe.rollout import LimitsConfig
from courtside.recipe.tasks import (
    EnvironmentTasks,
    SwitchboardTasks,
    TasksConfig,
    ToolboxTasks,
)


def make_environment(
    config: TasksConfig, limits: LimitsConfig | None = None, *, tools_in_template: bool = False
) -> HostedEnvironment | None:
    """None: the tasks are single prompts. `tools_in_template`: of `choose_tool_listing`."""
    limits = limits or LimitsConfig()
    seconds = limits.step_seconds
    match config:
        case EnvironmentTasks() if config.workers:
            return WorkerEnvironment(config, limits, tools_in_template=tools_in_template)
        case EnvironmentTasks():
            return load_environment(config, limits, tools_in_template=tools_in_template)
        case ToolboxTasks():
            name = "tasks.kind = 'toolbox'"
            return GuardedEnvironment(environment=Toolbox(config), name=name, seconds=seconds)
        case SwitchboardTasks():
            name = "tasks.kind = 'switchboard'"
            return GuardedEnvironment(environment=Switchboard(config), name=name, seconds=seconds)
        case _:
            return None


def load_environment(
    config: EnvironmentTasks, limits: LimitsConfig, *, tools_in_template: bool = False
) -> GuardedEnvironment:
    """An instance of the class at `module:Class`. No episode is started: that may be expensive."""
    name, folder = f"tasks.path = {config.path!r}", os.getcwd()
    try:
        with time_limit(limits.load_seconds, TimedOut):
            instance = _make_instance(config, tools_in_template=tools_in_template)
        return_to_folder(folder)
    except InvalidValue as problem:
        raise TaskError(f"{name}: importing the module or making the class {problem}") from None
    except (TimedOut, TaskError) as problem:
        timeout = problem if isinstance(problem, TimedOut) else problem.__cause__
        if not isinstance(timeout, TimedOut):
            raise
        raise TaskError(
            f"{name}: importing the module and making the class took longer than "
            f"{limits.load_seconds:g} seconds (rollout.limits.load_seconds){find_place(timeout)}. "
            "Give what it waits for a time limit of its own, or raise this one"
        ) from None
    environment = GuardedEnvironment(environment=instance, name=name, seconds=limits.step_seconds)
    first = environment.task(0)
    if environment.task(0) != first:
        raise TaskError(
            f"{name}: task(0) differs from call to call. Make it a pure function of the number: "
            "no clock, no global random state"
        )
    return environment


def _make_instance(config: EnvironmentTasks, *, tools_in_template: bool) -> Environment:
    where, name = f"tasks.path = {config.path!r}", config.path.partition(":")[2]
    user_class: Any = load_plugin(config.path, "class", field="tasks.path", error=TaskError)
    if is_tool_class(user_class):
        return make_tool_environment(user_class, config, tools_in_template=tools_in_template)
    if config.tool_class_fields:
        raise TaskError(
            f"tasks.{config.tool_class_fields[0]} is for classes whose methods are tools (with "
            f"`reset`, as in TRL), and {name} is none. Remove it, or use tasks.settings"
        )
    environment: Any = make_plugin(config, "class", section="tasks", error=TaskError)
    for method, call in (("task", "task(index)"), ("start", "start(task)")):
        if not callable(getattr(environment, method, None)):
            raise TaskError(f"{where}: {name} has no method {call}; add it")
    try:
        size = getattr(environment, "size", None)
    except Exception as error:  # user code: a property
        raise TaskError(f"{where}: {name}.size {describe_error(error)}") from error
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise TaskError(
            f"{where}: {name}.size = {size!r}; set it to the number of tasks, an int of at least 1"
        )
    checked: Environment = environment
    return checked
