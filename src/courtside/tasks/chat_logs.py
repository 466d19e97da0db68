"""Chat logs: one JSON object a line with messages in the format of chat APIs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from courtside.chat.messages import message_tree
from courtside.errors import TaskError
from courtside.hashing import task_id
from courtside.tasks.layouts import CONVERSATION_KEYS, read_conversation
from courtside.tasks.parsing import parse_id, parse_tags, parse_texts, read_json_lines
from courtside.types import Task

KEYS = ("id", *CONVERSATION_KEYS, "privileged", "tags", "metadata")


def read_chat_logs(path: Path, notes: list[str] | None = None) -> tuple[Task, ...]:
    """A task for each: the messages before the first answer, and the conversation after them.

    All are in the train split: nothing answers the student, so none can be evaluated. `notes` gets
    what a user should know.
    """
    tasks: dict[str, Task] = {}
    location_of: dict[str, str] = {}
    for record in read_json_lines(path):
        if unknown := sorted(record.fields.keys() - set(KEYS)):
            raise TaskError(
                f"{record.where}: unknown key {unknown[0]!r}; a conversation has {', '.join(KEYS)}"
            )
        task = _task(record.fields, record.where)
        location = location_of.get(task.id)
        if location is not None and record.fields.get("id") is not None:
            raise TaskError(
                f"{record.where}: id = {task.id!r} is also at {location}. Give each conversation "
                "its own, or remove one"
            )
        if location is not None and notes is not None:
            notes.append(f"{record.where} is the conversation of {location}; it is used once")
        location_of.setdefault(task.id, record.where)
        tasks.setdefault(task.id, task)
    if not tasks:
        raise TaskError(
            f"{path}: the file is empty. Write one conversation a line, such as "
            '{"messages": [{"role": "user", "content": "Hi"}, '
            '{"role": "assistant", "content": "Hello."}]}'
        )
    return tuple(tasks.values())


def _task(fields: Mapping[str, Any], where: str) -> Task:
    values = {name: value for name, value in fields.items() if value is not None}
    conversation = read_conversation(where, values)
    if conversation is None:
        raise TaskError(f"{where}: no `messages` and no `conversations`; add one")
    first = next((i for i, m in enumerate(conversation) if m.role == "assistant"), None)
    if not first:
        raise TaskError(
            f"{where}: the conversation needs a message to answer and an assistant's answer "
            "behind it; there is nothing to learn from here. Leave it out"
        )
    privileged, tags = parse_texts(where, values, "privileged"), parse_tags(where, values)
    log = fields.get("messages")
    if not isinstance(log, list):  # of another layout
        log = [message_tree(message) for message in conversation]
    content = json.dumps(
        [log, privileged, list(tags), *filter(None, (values.get("system"), conversation[0].tools))],
        sort_keys=True,
    )
    return Task(
        id=parse_id(where, values) or task_id("conversation", content),
        split="train",
        messages=conversation[:first],
        conversation=tuple(message_tree(message) for message in conversation[first:]),
        privileged=privileged,
        tags=tags,
    )
