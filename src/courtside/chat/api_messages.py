"""Messages and tool schemas as chat APIs and data sets write them, parsed into records.

OpenAI's format (`role`, `content` as a text or parts, `tool_calls`) and ShareGPT's (`from`,
`value`). Errors name the message, the reason and the fix.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from courtside.chat.thinking import begins_with_thoughts
from courtside.errors import TaskError
from courtside.types import Message, Role

ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
SHAREGPT_ROLES: Mapping[str, Role] = {
    **ROLES,
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
KEYS = ("role", "content", "tool_calls", "tool_call_id", "name", "weight")
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Of thoughts apart from the content; kept as the first."""
TEXT_PARTS = ("text", "input_text", "output_text")


def parse_messages(value: Any, where: str) -> tuple[Message, ...]:
    """`where` names the list: the record and its key."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise TaskError(f"{where} must be a list of at least one message")
    return tuple(parse_message(message, f"{where}[{i}]") for i, message in enumerate(value))


def parse_message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise TaskError(f"{where} must be an object with `role` and `content`")
    # A data set fills the keys that a message lacks with null.
    fields = {name: value for name, value in message.items() if value is not None}
    if "from" in fields and "role" not in fields:
        return _parse_sharegpt(fields, where)
    if "function_call" in fields:
        raise TaskError(
            f"{where}.function_call is the format before tool_calls; write it as "
            'tool_calls = [{"function": {"name": …, "arguments": …}}]'
        )
    thoughts = _parse_thoughts(fields, where)
    fields = {name: value for name, value in fields.items() if name not in THOUGHT_KEYS}
    if unknown := sorted(fields.keys() - set(KEYS)):
        raise TaskError(f"{where}: unknown key {unknown[0]!r}; a message has {', '.join(KEYS)}")
    if fields.get("weight", 1) != 1:
        raise TaskError(
            f"{where}.weight = {fields['weight']!r}: which turns train follows from the losses and "
            "hints. Remove the key, or leave the line out"
        )
    role = _find_role(fields.get("role"), ROLES)
    if role is None:
        raise TaskError(f"{where}.role = {fields.get('role')!r}; use one of {list(ROLES)}")
    calls = parse_tool_calls(fields.get("tool_calls", ()), where)
    if calls and role != "assistant":
        raise TaskError(f"{where}: tool_calls on a {role!r} message. Only assistants call tools")
    if "content" not in fields and not calls:
        raise TaskError(
            f"{where}.content is null or missing, and there are no tool_calls; write a text, or "
            "leave the message out"
        )
    extra: dict[str, Any] = {name: fields[name] for name in ("tool_call_id", "name")
                             if name in fields}  # fmt: skip
    if calls:
        extra["tool_calls"] = calls
    content = parse_content(fields.get("content", ""), f"{where}.content")
    if thoughts:
        if role != "assistant":
            raise TaskError(
                f"{where}: thoughts in a {role!r} message. Only assistants think: remove the key"
            )
        if begins_with_thoughts(content):
            raise TaskError(
                f"{where}: thoughts at the beginning of `content` and in a key of their own. Keep "
                "one of the two"
            )
        extra[THOUGHT_KEYS[0]] = thoughts
    return Message(role=role, content=content, extra=_encode(extra) if extra else "")


def _parse_thoughts(fields: Mapping[str, Any], where: str) -> str:
    """Empty: none are given apart."""
    thoughts = {key: fields[key] for key in THOUGHT_KEYS if fields.get(key)}
    for key, text in thoughts.items():
        if not isinstance(text, str):
            raise TaskError(
                f"{where}.{key} must be a text, not {json.dumps(text, default=str)[:60]}. Write "
                "the thoughts as the model has them, or remove the key"
            )
        _require_characters(text, f"{where}.{key}")
    if len({*thoughts.values()}) > 1:
        raise TaskError(f"{where}: {' and '.join(map(repr, thoughts))} differ; keep one of them")
    return next(iter(thoughts.values()), "")


def _parse_sharegpt(fields: Mapping[str, Any], where: str) -> Message:
    if unknown := sorted(fields.keys() - {"from", "value", "weight"}):
        raise TaskError(f"{where}: unknown key {unknown[0]!r}; use `from` and `value`")
    role = _find_role(fields["from"], SHAREGPT_ROLES)
    if role is None:
        raise TaskError(f"{where}.from = {fields['from']!r}; use one of {list(SHAREGPT_ROLES)}")
    value = parse_content(fields.get("value", ""), f"{where}.value")
    if fields["from"] != "function_call":
        return parse_message(
            {"role": role, "content": value, "weight": fields.get("weight")}, where
        )
    try:
        calls = json.loads(value)
    except (ValueError, RecursionError):
        calls = None
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, Mapping) for call in calls):
        raise TaskError(
            f"{where}: the value of a function_call must be JSON with name and arguments; "
            f"got {value[:60]!r}"
        )
    wrapped = [call if "function" in call else {"function": call} for call in calls]
    return parse_message({"role": "assistant", "content": "", "tool_calls": wrapped}, where)


def _find_role(name: object, roles: Mapping[str, Role]) -> Role | None:
    return roles.get(name) if isinstance(name, str) else None


def parse_content(content: Any, where: str) -> str:
    """A text, or the joined texts of a list of parts. `where` names the field."""
    if isinstance(content, str):
        return _require_characters(content, where)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise TaskError(
            f"{where} must be a text (or a list of text parts), not "
            f"{json.dumps(content, default=str)[:60]}"
        )
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind not in TEXT_PARTS:
            raise TaskError(
                f"{where}[{i}] is a part of type {kind!r}; courtside trains on text alone. Leave "
                "the part or the line out"
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise TaskError(f"{where}[{i}].text must be a text; correct the part")
        texts.append(_require_characters(text, f"{where}[{i}].text"))
    return "".join(texts)


def parse_tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """With arguments as an object; arguments that are no JSON stay the string they are."""
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise TaskError(f"{where}.tool_calls must be a list of calls")
    return [_parse_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]


def _parse_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise TaskError(
            f"{where}: a tool call is written as "
            '{"id": …, "function": {"name": …, "arguments": …}}, not as ' + f"{call!r}"
        )
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # invalid arguments stay as they were sent
            arguments = json.loads(arguments)
    id = call.get("id")
    return {
        "type": "function",
        **({} if id is None else {"id": id}),
        "function": {"name": function["name"], "arguments": arguments},
    }


def parse_tools(tools: Any, where: str) -> str:
    """Tool schemas as JSON text, for `Message.tools`; a data set may hold them as such a text."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise TaskError(f"{where}: `tools` is no JSON ({error}); write a list") from None
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise TaskError(f"{where}: `tools` must be a list of tool schemas")
    for i, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise TaskError(
                f"{where}: tools[{i}] must be a schema: "
                '{"type": "function", "function": {"name": …, "parameters": {…}}}'
            )
    wrapped = [
        tool if "function" in tool else {"type": "function", "function": tool} for tool in tools
    ]
    return _encode(wrapped) if wrapped else ""


def attach_tools(messages: Sequence[Message], tools: str) -> tuple[Message, ...]:
    """The messages, the first of which offers the tools."""
    return (replace(messages[0], tools=tools), *messages[1:])


def _encode(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=False)


def _require_characters(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise TaskError(
            f"{where} holds half of a surrogate pair, which is no character; correct it"
        ) from None
    return text
