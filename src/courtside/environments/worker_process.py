"""The program of a worker process.

It loads the environment of the recipe, then answers one call at a time in its main thread, where
libraries that use signals work too. It ends with its parent.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from courtside.environments.guard import EnvironmentFault, GuardedEnvironment, GuardedEpisode
from courtside.errors import TaskError

OPTIONAL = ("demonstrate", "example_replies")
"""Methods that an environment may have."""


def serve(connection: Connection) -> None:
    from courtside.environments.loading import load_environment

    config, tools_in_template, limits = connection.recv()
    try:
        environment = load_environment(config, limits, tools_in_template=tools_in_template)
    except TaskError as error:
        connection.send(("task_error", str(error)))
        return
    environment = replace(environment, seconds=None)  # the parent looks at the clock from now on
    optional = [name for name in OPTIONAL if getattr(environment, name) is not None]
    connection.send(("value", {"size": environment.size, "optional": optional}))
    episodes: dict[int, GuardedEpisode] = {}
    while True:
        try:
            method, args, discarded = connection.recv()
            for key in discarded:
                episodes.pop(key, None)
            connection.send(answer(environment, episodes, method, args))
        except (EOFError, OSError):  # the parent has closed the connection
            return


def answer(
    environment: GuardedEnvironment,
    episodes: dict[int, GuardedEpisode],
    method: str,
    args: tuple[Any, ...],
) -> tuple[Any, ...]:
    try:
        match method, args:
            case "task", (index,):
                return "value", environment.task(index)
            case (("demonstrate" | "example_replies"), (task,)):
                return "value", getattr(environment, method)(task)
            case "start", (key, task):
                episodes[key] = environment.start(task)
                return "value", None
            case "step", (key, reply):
                return "value", episodes[key].step(reply)
            case "grade", (key,):
                return "value", episodes[key].grade()
    except EnvironmentFault as fault:
        return "fault", str(fault), fault.trace
    except TaskError as error:
        return "task_error", str(error)
    raise AssertionError(f"no such call: {method}")


def end_with_parent(parent: int) -> None:
    """A step that hangs would not notice that the connection was closed."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main(descriptor: int) -> None:
    """`descriptor`: of the connection to the parent."""
    threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    serve(Connection(descriptor))
