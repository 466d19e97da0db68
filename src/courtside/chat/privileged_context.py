"""Inserts privileged context into a prompt, for the teacher's forward pass only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from courtside.types import Message


def insert_context(
    messages: Sequence[Message], text: str, place: Literal["system", "user"]
) -> tuple[Message, ...]:
    """The prompt with `text` in its system message, or at the end of its last user message.

    >>> insert_context([Message(role="user", content="Hi")], "Be brief.", "system")[0].content
    'Be brief.'
    """
    if place == "system":
        if messages[0].role == "system":
            joined = replace(messages[0], content=f"{messages[0].content}\n\n{text}")
            return (joined, *messages[1:])
        return (Message(role="system", content=text), *messages)
    last = max((i for i, m in enumerate(messages) if m.role == "user"), default=None)
    if last is None:
        return (*messages, Message(role="user", content=text))
    joined = replace(messages[last], content=f"{messages[last].content}\n\n{text}")
    return (*messages[:last], joined, *messages[last + 1 :])
