"""Short conversations that stand in for a long one where messages after an answer are rendered.

Templates may want a call before a tool's message, and its id or the name of the function in it. So
the answer is a call where it can be; ids and names that the messages lack are placeholders, and one
that comes out in the text says what is missing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from courtside.chat.answer_boundary import PROBE_PROMPT
from courtside.chat.messages import unused_noncharacters
from courtside.errors import ModelError
from courtside.types import Message

ID_LENGTH = 9
"""Of a call's id: some templates take no other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Characters that no message holds."""

    cut: str
    answer: str
    """The last of the answer's text."""
    name: str
    """Stands for the name of a function that is not known."""
    id: str
    """Stands for the id of a call that is not known."""


def choose_marks(messages: Sequence[Message]) -> Marks:
    cut, answer, name, id = unused_noncharacters(messages, 4)
    return Marks(cut=cut, answer=answer, name=name, id=id * ID_LENGTH)


def stand_in_conversations(
    messages: Sequence[Message],
    marks: Marks,
    *,
    head: Sequence[Message] = (),
    with_calls: bool,
) -> Iterator[tuple[Message, ...]]:
    """Conversations in which `messages` follow an answer, the likeliest first. `head` is how they
    begin; empty: with a short question."""
    head = head or (PROBE_PROMPT,)
    answer = Message(role="assistant", content=f"It is.{marks.answer}")
    results = [*takewhile(lambda message: message.role == "tool", messages)]
    if not results:
        yield (*head, answer, *messages)
        return
    filled = [_fill_id(message, marks) for message in results] + [*messages[len(results) :]]
    answers = [answer]
    if with_calls:
        calls = [_call_of(message, marks, is_last=message is results[-1]) for message in results]
        several = [_call_message(calls)] if len(calls) > 1 else []
        single = _call_message([_call_of(results[0], marks, is_last=True)])
        answers = [*several, single, answer]
    for reply in answers:
        yield (*head, reply, *messages)
        if filled != [*messages]:
            yield (*head, reply, *filled)


def check_placeholders(rendered: str, marks: Marks, *, name: str) -> None:
    """Refuses a text that a placeholder came out in. `name`: of the model."""
    for mark, what, key in (
        (marks.name, "the name of the function that was called", "name"),
        (marks.id, "the id of the call", "tool_call_id"),
    ):
        if mark in rendered:
            raise ModelError(
                f"{name}: its chat template writes {what} into a tool's message, and this message "
                f"lacks it. Give the message a {key} (Message.extra), or say results as 'user' "
                "(tool_role = false of an environment, hints.role = 'user')"
            )


def _call_of(message: Message, marks: Marks, *, is_last: bool) -> dict[str, Any]:
    extra = _extra(message)
    return {
        "id": extra.get("tool_call_id") or marks.id,
        "type": "function",
        "function": {
            "name": extra.get("name") or marks.name,
            "arguments": {"at": marks.answer if is_last else 1},
        },
    }


def _call_message(calls: Sequence[dict[str, Any]]) -> Message:
    extra = json.dumps({"tool_calls": calls}, ensure_ascii=False)
    return Message(role="assistant", content="", extra=extra)


def _fill_id(message: Message, marks: Marks) -> Message:
    extra = _extra(message)
    if extra.get("tool_call_id"):
        return message
    filled = {**extra, "tool_call_id": marks.id}
    return replace(message, extra=json.dumps(filled, ensure_ascii=False))


def _extra(message: Message) -> dict[str, Any]:
    extra: dict[str, Any] = json.loads(message.extra) if message.extra else {}
    return extra
