"""Tools: parameters, effects on the episode's state, and the requests that need them.

Every tool is bounded in time and memory for any arguments, and raises `ToolFailure` only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from courtside.hashing import SeededRandom

Arguments = Mapping[str, Any]
"""Checked arguments of a call: exactly the parameters, each of its kind."""
MAX_NUMBER = 10**15


class ToolFailure(ValueError):
    """A failed call; the text is the tool's output."""


@dataclass(slots=True)
class ToolState:
    """The mutable state of an episode."""

    notes: dict[str, str] = field(default_factory=dict)
    """Title → text, the latest written last."""

    def copy(self) -> ToolState:
        return ToolState(notes=dict(self.notes))


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    kind: Literal["string", "number", "integer"] = "string"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a user wants, and the call that does it."""

    capability: str
    text: str
    """The user's message."""
    arguments: Arguments


class RequestDraft(NamedTuple):
    """A request before its wording is chosen."""

    arguments: Arguments
    topic: str | None
    """A topic belongs to one split; None: about the state of the episode only."""


@dataclass(frozen=True, slots=True)
class Tool:
    about: str
    """A few words for the list of tools."""
    parameters: tuple[Parameter, ...]
    run: Callable[[ToolState, Arguments], str]
    """Returns the result, and may change the state; raises only ToolFailure."""
    phrases: tuple[str, ...]
    """Wordings of requests, with a slot for each argument."""
    draft_request: Callable[[SeededRandom, ToolState], RequestDraft]
    """A request that this tool solves in the given state."""
    needs_notes: bool = False
    """Whether requests need an existing note."""


def invalid_arguments(tool: Tool, arguments: Arguments) -> str | None:
    """What is wrong with the arguments of a call, or None."""
    names = [parameter.name for parameter in tool.parameters]
    takes = ", ".join(names) or "no arguments"
    for name in arguments:
        if name not in names:
            return f"unexpected argument {name!r} (takes {takes})"
    for parameter in tool.parameters:
        if parameter.name not in arguments:
            return f"missing argument {parameter.name!r} (takes {takes})"
        if problem := _wrong_kind(parameter.kind, arguments[parameter.name]):
            return f"{parameter.name} {problem}"
    return None


def _wrong_kind(kind: str, value: object) -> str | None:
    if kind == "string":
        return None if isinstance(value, str) else "must be a string"
    number = as_number(value)
    if number is None:
        return f"must be {'an integer' if kind == 'integer' else 'a number'}"
    # Also refuses infinity, which JSON's 1e999 becomes.
    if not abs(number) <= MAX_NUMBER:
        return "is out of range"
    return "must be an integer" if kind == "integer" and number != int(number) else None


def as_number(value: object) -> int | float | None:
    """A number, or a text that is one: `"5"` is what many models write for 5."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"\s*-?[0-9]{1,20}(\.[0-9]{1,20})?\s*", value):
        return float(value) if "." in value else int(value)
    return None


def numeric_argument(arguments: Arguments, name: str) -> int | float:
    number = as_number(arguments[name])
    assert number is not None, "arguments are checked before a tool runs"
    return number


def format_number(number: float) -> str:
    """With at most four decimals, and none that are zero."""
    text = f"{number:.4f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
