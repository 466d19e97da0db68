"""The layouts in which data sets hold prompts and answers, as one: prompt, completion, rejected.

Chat APIs' fine-tuning lines (`messages` with `tools`), ShareGPT (`conversations`), TRL's
prompt/completion and preference columns, plain or conversational.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from courtside.chat.api_messages import (
    attach_tools,
    parse_content,
    parse_messages,
    parse_tools,
)
from courtside.chat.messages import split_thoughts
from courtside.errors import TaskError
from courtside.types import Message

CONVERSATION_KEYS = ("messages", "conversations", "system", "tools", "parallel_tool_calls")
KEYS = ("prompt", *CONVERSATION_KEYS, "response_prefix", "completion", "chosen", "rejected")


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """What a task says, whichever layout it came in."""

    messages: tuple[Message, ...]
    """The prompt; a last message of the assistant is a response prefix."""
    completion: str | None
    rejected: str | None
    completion_thoughts: str
    rejected_thoughts: str


def read_texts(where: str, fields: Mapping[str, Any]) -> Texts:
    """`fields`: without nulls."""
    prompt = _read_prompt(where, fields)
    if "chosen" in fields and "completion" in fields:
        raise TaskError(f"{where}: both `completion` and `chosen`; keep one of them")
    better = next((name for name in ("chosen", "completion") if name in fields), None)
    if better == "chosen" and "rejected" not in fields:
        raise TaskError(f"{where}: `chosen` needs a `rejected` beside it; add one")
    names = [name for name in (better, "rejected") if name is not None and name in fields]
    answers = {name: _read_answer(where, fields, name) for name in names}
    prefixes = {name: prefix for name, (prefix, *_) in answers.items() if prefix}
    if len({*prefixes.values()}) > 1:
        raise TaskError(
            f"{where}: `{better}` and `rejected` are conversations that differ before their last "
            "message; a pair answers one prompt. Leave it out, or correct it"
        )
    texts = {name: text for name, (_, text, _) in answers.items()}
    thoughts = {name: thoughts for name, (*_, thoughts) in answers.items()}
    for prefix in prefixes.values():
        prompt = _join_prompt(where, prompt, prefix)
    if prompt is None:
        raise TaskError(
            f"{where}: no `prompt` (text), and no `messages` or `conversations` (list); add one"
        )
    completion, completion_thoughts = (
        (texts.get(better), thoughts.get(better, "")) if better else (None, "")
    )
    rejected_thoughts = thoughts.get("rejected", "")
    if completion is not None and (
        (completion, completion_thoughts) == (texts.get("rejected"), rejected_thoughts)
    ):
        raise TaskError(
            f"{where}: `{better}` and `rejected` are the same text, so there is nothing to prefer. "
            "Leave the pair out"
        )
    if prompt[-1].role == "assistant":
        if completion is not None:
            raise TaskError(
                f"{where}: the last message is the assistant's, and there is a `{better}`; keep "
                "one of them"
            )
        last = f"{where}: the last message"
        text, completion_thoughts = _answer_text(prompt[-1], last)
        completion = _require_answer(text, last, "completion")
        prompt = prompt[:-1]
    messages = _attach(where, _require_prompt(where, prompt), fields)
    if "response_prefix" in fields:
        messages = (*messages, _read_response_prefix(where, fields["response_prefix"]))
        if completion_thoughts or rejected_thoughts:
            raise TaskError(
                f"{where}: `response_prefix` is how the answer begins, and its thoughts come "
                "before that. Remove one of the two"
            )
    return Texts(
        messages=messages,
        completion=completion,
        rejected=texts.get("rejected"),
        completion_thoughts=completion_thoughts,
        rejected_thoughts=rejected_thoughts,
    )


def read_conversation(where: str, fields: Mapping[str, Any]) -> tuple[Message, ...] | None:
    """Of `messages` or `conversations`, with the tools on the first; None: there is neither."""
    if "messages" in fields and "conversations" in fields:
        raise TaskError(f"{where}: both `messages` and `conversations`; keep one of them")
    name = next((name for name in ("messages", "conversations") if name in fields), None)
    if name is None:
        return None
    messages = parse_messages(fields[name], f"{where}: {name}")
    if "system" in fields:
        if messages[0].role == "system":
            raise TaskError(f"{where}: `system`, and `{name}` begins with one; keep one of them")
        system = parse_content(fields["system"], f"{where}: system")
        messages = (Message(role="system", content=system), *messages)
    return _attach(where, messages, fields)


def _attach(
    where: str, messages: tuple[Message, ...], fields: Mapping[str, Any]
) -> tuple[Message, ...]:
    if not isinstance(fields.get("parallel_tool_calls", True), bool):
        raise TaskError(f"{where}: `parallel_tool_calls` must be true or false")
    return (
        attach_tools(messages, parse_tools(fields["tools"], where))
        if "tools" in fields
        else (messages)
    )


def _read_prompt(where: str, fields: Mapping[str, Any]) -> tuple[Message, ...] | None:
    if "prompt" in fields:
        for name in fields.keys() & {"messages", "conversations"}:
            raise TaskError(f"{where}: both `prompt` and `{name}`; keep one of them")
    if conversation := read_conversation(where, fields):
        return conversation
    prompt = fields.get("prompt")
    if prompt is None:
        return None
    if isinstance(prompt, str):
        text = parse_content(prompt, f"{where}: prompt")
        if not text.strip():
            raise TaskError(f"{where}: `prompt` is empty; write one, or remove the task")
        messages: tuple[Message, ...] = (Message(role="user", content=text),)
    elif isinstance(prompt, list):
        messages = parse_messages(prompt, f"{where}: prompt")
    else:
        raise TaskError(
            f"{where}: `prompt` must be a text (or a list of messages), not {name_kind(prompt)}"
        )
    if "system" in fields:
        system = parse_content(fields["system"], f"{where}: system")
        messages = (Message(role="system", content=system), *messages)
    return messages


def _read_response_prefix(where: str, value: Any) -> Message:
    """The start of the answer, which is given and not trained."""
    if not isinstance(value, str):
        raise TaskError(f"{where}: `response_prefix` must be a text, not {name_kind(value)}")
    text = parse_content(value, f"{where}: response_prefix")
    if not text:
        raise TaskError(
            f"{where}: `response_prefix` is empty; write how the answer begins, or remove it"
        )
    return Message(role="assistant", content=text)


def _read_answer(
    where: str, fields: Mapping[str, Any], name: str
) -> tuple[tuple[Message, ...], str, str]:
    """The messages before the answer, where there are any; its text, and its thoughts where they
    are apart."""
    value = fields[name]
    if isinstance(value, str):
        text = parse_content(value, f"{where}: {name}")
        return (), _require_answer(text, f"{where}: `{name}`", name), ""
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list):
        raise TaskError(
            f"{where}: `{name}` must be a text (or a list of messages), not {name_kind(value)}"
        )
    *prefix, last = parse_messages(value, f"{where}: {name}")
    if last.role != "assistant":
        raise TaskError(f"{where}: the last message of `{name}` must be the assistant's")
    text, thoughts = _answer_text(last, f"{where}: `{name}`")
    return tuple(prefix), _require_answer(text, f"{where}: `{name}`", name), thoughts


def _answer_text(message: Message, where: str) -> tuple[str, str]:
    """And its thoughts."""
    message, thoughts = split_thoughts(message)
    if message.extra:
        raise TaskError(
            f"{where} calls tools, which an answer to imitate cannot hold as text. Use tasks.kind "
            "= 'conversations', whose turns the model's chat template renders"
        )
    return message.content, thoughts


def _require_answer(text: str, where: str, name: str) -> str:
    """The text itself. To say nothing may be worse than an answer, but is none to imitate."""
    if name != "rejected" and not text.strip():
        raise TaskError(
            f"{where} is empty, so the student would learn to say nothing; write the answer, or "
            "leave the line out"
        )
    return text


def _join_prompt(
    where: str, prompt: tuple[Message, ...] | None, prefix: tuple[Message, ...]
) -> tuple[Message, ...]:
    """The prefix of a pair's conversations; a prompt beside it must be its own."""
    if prompt is None or prompt == prefix[-len(prompt) :]:
        return prefix
    raise TaskError(
        f"{where}: `prompt` is not how the conversations of the pair begin; remove one of the two"
    )


def _require_prompt(where: str, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    if not messages or messages[-1].role not in ("user", "tool"):
        last = f"the {messages[-1].role}'s" if messages else "missing"
        raise TaskError(
            f"{where}: the last message of the prompt is {last}, but the model must answer a user "
            "or tool message; add one"
        )
    if not messages[-1].content.strip():
        raise TaskError(f"{where}: the last message is empty; write one, or remove the task")
    return messages


def name_kind(value: object) -> str:
    kinds = {list: "a list", dict: "an object", str: "a text", bool: "true or false"}
    return kinds.get(type(value), "a number")
