"""Chat logs: one JSON object a line with messages in the format of chat APIs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from courtside.errors import TaskError
from courtside.hashing import task_id
from courtside.tasks.parsing import parse_tags, parse_texts, read_json_lines
from courtside.types import Message, Role, Task

KEYS = ("id", "messages", "privileged", "tags")


def read_chat_logs(path: Path) -> tuple[Task, ...]:
    """A task for each: the messages before the first answer, and the conversation after them.

    All are in the train split: nothing answers the student, so none can be evaluated.
    """
    tasks: dict[str, Task] = {}
    location_of: dict[str, str] = {}
    for record in read_json_lines(path):
        if unknown := sorted(record.fields.keys() - set(KEYS)):
            raise TaskError(
                f"{record.where}: unknown key {unknown[0]!r}; a conversation has {', '.join(KEYS)}"
            )
        task = _task(record.fields, record.where)
        if "id" in record.fields:
            if task.id in location_of:
                raise TaskError(
                    f"{record.where}: id = {task.id!r} is also at {location_of[task.id]}. Give "
                    "each conversation its own, or remove one"
                )
            location_of[task.id] = record.where
        tasks.setdefault(task.id, task)
    if not tasks:
        raise TaskError(
            f"{path}: the file is empty. Write one conversation a line, such as "
            '{"messages": [{"role": "user", "content": "Hi"}, '
            '{"role": "assistant", "content": "Hello."}]}'
        )
    return tuple(tasks.values())


def _task(fields: Mapping[str, Any], where: str) -> Task:
    conversation = fields.get("messages")
    if not isinstance(conversation, list) or not all(isinstance(m, dict) for m in conversation):
        raise TaskError(f"{where}: `messages` must be a list of objects with role and content")
    first = next((i for i, m in enumerate(conversation) if m.get("role") == "assistant"), None)
    if not first:
        raise TaskError(
            f"{where}: the conversation needs a message to answer and an assistant's answer "
            "behind it; there is nothing to learn from here. Leave it out"
        )
    values = {name: value for name, value in fields.items() if value is not None}
    privileged, tags = parse_texts(where, values, "privileged"), parse_tags(where, values)
    messages = tuple(
        _prompt(m, f"{where}, message {i}") for i, m in enumerate(conversation[:first])
    )
    id = fields.get("id")
    if "id" in fields and not (isinstance(id, str) and id.strip()):
        raise TaskError(f"{where}: `id` must be a text by which hints name the conversation")
    content = json.dumps([conversation, privileged, list(tags)], sort_keys=True)
    return Task(
        id=id or task_id("conversation", content),
        split="train",
        messages=messages,
        conversation=tuple(conversation[first:]),
        privileged=privileged,
        tags=tags,
    )


def _prompt(message: Mapping[str, Any], where: str) -> Message:
    role: Any = message.get("role")
    content = message.get("content")
    if role not in get_args(Role) or not isinstance(content, str):
        raise TaskError(f"{where}: needs a role of {list(get_args(Role))} and a text as content")
    return Message(role=role, content=content)
