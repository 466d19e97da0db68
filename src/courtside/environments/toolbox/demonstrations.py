"""Expert demonstrations for a warm start, optionally with a habit to unlearn.

The habit is to call a tool by its common name whatever the list says. A reminder of the listed
names before a call prevents it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from courtside.environments.toolbox.environment import Toolbox


def demonstration_rows(
    toolbox: Toolbox,
    indices: Iterable[int],
    habit_fraction: float = 0.0,
    reminder_fraction: float = 0.0,
) -> Iterator[dict[str, Any]]:
    """Lines for `tasks.kind = "jsonl"`: one for each call, which is its completion.

    `reminder_fraction` of the calls follow a reminder and are right. `habit_fraction` of the others
    are made by habit: the tool is not found unless its common name is the listed one.
    """
    for index in indices:
        task = toolbox.task(index)
        conversation = toolbox.demonstrate(task, habit_fraction, reminder_fraction)
        for position, message in enumerate(conversation):
            if message.role == "assistant":
                yield {
                    "messages": [
                        {"role": m.role, "content": m.content} for m in conversation[:position]
                    ],
                    "completion": message.content,
                    "privileged": dict(task.privileged),
                    "tags": list(task.tags),
                    "split": task.split,
                }
