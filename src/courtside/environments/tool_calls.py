"""Parses a tool call from an assistant reply, or gives the error that an agent framework prints.

Only assistant replies are parsed, never messages of tools and users. Text around the call is
allowed. Of several calls the first is run and the others are counted: one reply is one step.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

CallFormat = Literal["json", "plain"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_CALL = 20_000
"""Characters. A longer call is refused before anything is built from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any]
    """JSON values."""
    num_ignored: int = 0
    """Further calls in the same reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallError:
    kind: Literal["no_call", "unparsable_call"]
    message: str


def parse_call(reply: str, call_format: CallFormat) -> ToolCall | CallError:
    """Never raises. The result can be encoded as UTF-8, even if the text cannot."""
    return _parse_json(reply) if call_format == "json" else _parse_plain(reply)


def format_call(name: str, arguments: Mapping[str, Any], call_format: CallFormat) -> str:
    """The call as `parse_call` reads it."""
    if call_format == "json":
        body = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
        return f"{OPEN}{body}{CLOSE}"
    pairs = (f"{key}={json.dumps(v, ensure_ascii=False)}" for key, v in arguments.items())
    return f"{name}({', '.join(pairs)})"


class _Unreadable(ValueError):
    """Of one call; its text becomes the message."""


def _unparsable(reason: object) -> CallError:
    return CallError(kind="unparsable_call", message=f"Could not parse a tool call: {reason}")


def _no_call(reason: str) -> CallError:
    return CallError(kind="no_call", message=f"Could not parse a tool call: {reason}")


# ── json ─────────────────────────────────────────────────────────────────────────────────────────


def _parse_json(reply: str) -> ToolCall | CallError:
    start = reply.find(OPEN)
    if start < 0:
        return _no_call(f"the reply has no {OPEN}")
    try:
        value, end = _json_value(reply, start + len(OPEN))
        _require_close(reply, end)
        name, arguments = _json_call(value)
    except _Unreadable as error:
        return _unparsable(error)
    return ToolCall(name=name, arguments=arguments, num_ignored=reply.count(OPEN, end))


def _json_value(reply: str, start: int) -> tuple[Any, int]:
    text = reply[start : start + MAX_CALL]
    offset = len(text) - len(text.lstrip())
    try:
        value, length = DECODER.raw_decode(text, offset)
        _require_text(json.dumps(value, ensure_ascii=False))
    except _Unreadable:
        raise
    except json.JSONDecodeError as error:
        raise _Unreadable(f"{error.msg} at character {error.pos - offset}") from None
    except RecursionError:
        raise _Unreadable("nested too deeply") from None
    except ValueError:  # more digits than Python turns into a number
        raise _Unreadable("a number is too long") from None
    return value, start + length


def _no_constant(word: str) -> NoReturn:
    raise _Unreadable(f"{word} is not JSON")


DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _require_close(reply: str, end: int) -> None:
    remainder = reply[end:].lstrip()
    # The closing tag may be missing at the end: it can be a stop string of sampling.
    if remainder and not remainder.startswith(CLOSE):
        raise _Unreadable(f"{CLOSE} is missing after the call")


def _json_call(value: Any) -> tuple[str, dict[str, Any]]:
    if not isinstance(value, dict):
        raise _Unreadable("a call is an object with name and arguments")
    for key in value:
        if key not in ("name", "arguments"):
            raise _Unreadable(f"unexpected key {key!r}; a call has name and arguments")
    name, arguments = value.get("name"), value.get("arguments", {})
    if not isinstance(name, str) or not name.strip():
        raise _Unreadable("the call has no name")
    if not isinstance(arguments, dict):
        raise _Unreadable("arguments must be an object")
    return name.strip(), arguments


# ── plain ────────────────────────────────────────────────────────────────────────────────────────

HEAD = re.compile(r"(?<![\w.-])([A-Za-z_][A-Za-z0-9_.-]{0,99})\(")
KEY = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]{0,99})\s*=\s*")
TEXT = re.compile(r'"((?:[^"\\]|\\.)*)"|\'((?:[^\'\\]|\\.)*)\'', re.S)
NUMBER = re.compile(r"-?[0-9]{1,40}(?:\.[0-9]{1,40})?(?![\w.])")
COMMA, END = re.compile(r"\s*,"), re.compile(r"\s*\)")
LITERAL = re.compile(r"(true|false|null|True|False|None)\b")
LITERALS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.S)
ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", '"': '"', "'": "'", "\\": "\\", "/": "/",
}  # fmt: skip
MAX_HEADS = 100
"""Maximum number of candidates; prose can look like the start of a call."""


def _parse_plain(reply: str) -> ToolCall | CallError:
    calls: list[tuple[str, dict[str, Any]]] = []
    first_error: _Unreadable | None = None
    for call in _plain_calls(reply):
        if isinstance(call, _Unreadable):
            first_error = first_error or call
        else:
            calls.append(call)
    if calls:
        name, arguments = calls[0]
        return ToolCall(name=name, arguments=arguments, num_ignored=len(calls) - 1)
    if first_error is not None:
        return _unparsable(first_error)
    return _no_call('the reply has no name(argument="value")')


def _plain_calls(reply: str) -> Iterator[tuple[str, dict[str, Any]] | _Unreadable]:
    at = 0
    for _ in range(MAX_HEADS):
        head = HEAD.search(reply, at)
        if head is None:
            return
        try:
            arguments, at = _plain_arguments(reply[: head.end() + MAX_CALL], head.end())
        except _Unreadable as error:
            at = head.end()
            yield error
        else:
            yield head[1], arguments


def _plain_arguments(reply: str, at: int) -> tuple[dict[str, Any], int]:
    arguments: dict[str, Any] = {}
    while not (close := END.match(reply, at)):
        if arguments:
            comma = COMMA.match(reply, at)
            if comma is None:
                raise _Unreadable(_expected("',' or ')'", reply, at))
            at = comma.end()
        key = KEY.match(reply, at)
        if key is None:
            raise _Unreadable(_expected("argument=value", reply, at))
        if key[1] in arguments:
            raise _Unreadable(f"argument {key[1]!r} is given twice")
        arguments[key[1]], at = _plain_value(reply, key.end())
    return arguments, close.end()


def _plain_value(reply: str, at: int) -> tuple[Any, int]:
    if text := TEXT.match(reply, at):
        return _unescaped(text[1] if text[1] is not None else text[2]), text.end()
    if number := NUMBER.match(reply, at):
        return (float if "." in number[0] else int)(number[0]), number.end()
    if word := LITERAL.match(reply, at):
        return LITERALS[word[1]], word.end()
    raise _Unreadable(_expected("a quoted text or a number", reply, at))


def _unescaped(text: str) -> str:
    def plain(escape: re.Match[str]) -> str:
        if escape[1] is not None:
            return chr(int(escape[1], 16))
        if escape[2] not in ESCAPES:
            raise _Unreadable(f"unknown escape \\{escape[2]}")
        return ESCAPES[escape[2]]

    return _require_text(ESCAPE.sub(plain, _require_text(text)))


def _expected(what: str, reply: str, at: int) -> str:
    remainder = reply[at : at + 20].strip()
    return f"expected {what} " + (
        f"before {remainder!r}" if remainder else "at the end of the reply"
    )


def _require_text(text: str) -> str:
    """Half of a surrogate pair can be escaped but is no character: nothing could encode it."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise _Unreadable("half of a surrogate pair is no character")
    return text
