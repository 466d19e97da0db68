"""Validation errors of a recipe, or of another file of sections, as one line each.

Pydantic's locations contain the tags of unions, and it reports every member of a union that did
not match.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel

from courtside.recipe import Recipe
from courtside.recipe.base import RefusedValue
from courtside.recipe.schema import field_type, is_section, sections_by_kind, union_members, unwrap
from courtside.sanitize import truncate

Problem = Mapping[str, Any]
"""One of `ValidationError.errors()`."""

TYPE_MESSAGES = {
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "string_type": "must be a string",
    "bool_type": "must be true or false",
    "tuple_type": "must be a list",
}
MAX_KEY_CHARS = 100
WITHOUT_INPUT = {
    "value_error", "missing", "too_short", "too_long", "extra_forbidden", "union_tag_invalid",
    "union_tag_not_found",
}  # fmt: skip
"""Problems whose message does not need the invalid value."""


# ── locations ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    path: str
    """As in the recipe: `losses[0].support`."""
    type: Any
    """The type of the key."""
    section: Any
    """The section of the last key."""
    root: type[BaseModel]
    """The whole file's."""
    siblings: Mapping[str, type[BaseModel]]
    """The other kinds of this section."""
    union: tuple[int | str, ...] | None
    """Location of a plain union (`a number or a section`), if any."""
    is_inside: bool
    """The problem is inside a member of that union, not the member's type."""


def locate(loc: Sequence[int | str], root: type[BaseModel] = Recipe) -> Location:
    path = ""
    current: Any = root
    section: Any = None
    union: tuple[int | str, ...] | None = None
    siblings: dict[str, type[BaseModel]] = {}
    entered: dict[str, type[BaseModel]] = {}
    for i, key in enumerate(loc):
        if tagged := sections_by_kind(current):
            entered = {kind: member for kind, member in tagged.items() if kind != key}
            current = tagged[str(key)]
        elif members := union_members(current):
            union = tuple(loc[:i])
            current = next((m for m in members if getattr(m, "__name__", None) == key), Any)
        else:
            section, siblings, entered = unwrap(current), entered, {}
            current = field_type(current, key)
            name = truncate(str(key), MAX_KEY_CHARS)
            path += f"[{key}]" if isinstance(key, int) else f".{name}" if path else name
    return Location(
        path=path,
        type=unwrap(current),
        section=section,
        root=root,
        siblings=siblings,
        union=union,
        is_inside=union is not None and len(loc) > len(union) + 1,
    )


# ── messages ─────────────────────────────────────────────────────────────────────────────────────


def describe_problems(problems: Iterable[Problem], root: type[BaseModel] = Recipe) -> list[str]:
    """One line for each mistake, in the order of the file. `root`: the type of the whole file."""
    located = [(problem, locate(problem["loc"], root)) for problem in problems]
    locs = [problem["loc"] for problem, _ in located]
    explained_inside = {location.union for _, location in located if location.is_inside}
    lines: list[str] = []
    for problem, location in located:
        if problem["type"] == "too_short" and _has_inner(problem["loc"], locs):
            continue  # Invalid entries were not counted; they have their own lines.
        if location.union is None or location.is_inside:
            lines += _lines(location, [_message(problem, location)], problem)
        elif location.union not in explained_inside:
            members = [(p, at) for p, at in located if at.union == location.union]
            if members[0][0] is problem:
                lines += _lines(location, [_message(*member) for member in members], problem)
    return lines


def _has_inner(loc: tuple[int | str, ...], locs: Iterable[tuple[int | str, ...]]) -> bool:
    return any(len(other) > len(loc) and other[: len(loc)] == loc for other in locs)


def _lines(location: Location, messages: Sequence[str], problem: Problem) -> list[str]:
    message = ", or ".join(messages).replace(", or must be", ", or")
    if problem["type"] not in WITHOUT_INPUT:
        message += f"; got {_shorten_json(problem['input'])}"
    path = f"{location.path}.kind" if problem["type"].startswith("union_tag") else location.path
    return [f"{path}: {line}" if path else line for line in message.split("\n")]


def _shorten_json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:79] + "…"


def _message(problem: Problem, location: Location) -> str:
    match problem["type"]:
        case "missing":
            return "is required"
        case "extra_forbidden":
            return _unknown_key(str(problem["loc"][-1]), location)
        case "union_tag_not_found":
            return f"is required; use one of {_list_kinds(location.type)}"
        case "union_tag_invalid":
            tag = problem["ctx"]["tag"]
            guess = _did_you_mean(tag, sections_by_kind(location.type))
            return f"{tag!r} is not known; {guess}use one of {_list_kinds(location.type)}"
        case "model_type" | "dict_type":
            if sections_by_kind(location.type):
                return f"must be a section with a kind: {_list_kinds(location.type)}"
            keys = ", ".join(_keys(location.type))
            return f"must be a section with {keys}" if keys else "must be a section"
        case "tuple_type" if sections_by_kind(field_type(location.type, 0)):
            return f"must be a list of sections; write [[{location.path}]] above each"
        case "too_short":
            return f"needs at least {_entries(problem['ctx']['min_length'])}"
        case "too_long":
            return f"takes at most {_entries(problem['ctx']['max_length'])}"
        case kind if kind in TYPE_MESSAGES:
            return TYPE_MESSAGES[kind]
    text = str(problem["msg"]).removeprefix("Value error, ")
    return text.replace("Input should be", "must be", 1)


def _unknown_key(key: str, location: Location) -> str:
    keys = _keys(location.section)
    if guess := _did_you_mean(key, keys):
        return f"unknown key; {guess}".strip()
    if homes := [kind for kind, sibling in location.siblings.items() if key in _keys(sibling)]:
        return f"unknown key here; it belongs to kind = {' or '.join(map(repr, homes))}"
    sections = [
        f"{name}.{key}"
        for name, field in location.root.model_fields.items()
        if is_section(unwrap(field.annotation)) and key in _keys(unwrap(field.annotation))
    ]
    if sections:
        return f"unknown key here; did you mean {' or '.join(sections)}?"
    return f"unknown key; this section has {', '.join(keys)}"


def _keys(section: Any) -> list[str]:
    fields = section.model_fields.items() if is_section(section) else ()
    return [field.alias or name for name, field in fields]


def _did_you_mean(name: str, options: Iterable[str]) -> str:
    close = get_close_matches(name, list(options), n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}? " if close else ""


def _list_kinds(annotation: Any) -> str:
    sections = sections_by_kind(annotation).items()
    return ", ".join(
        repr(kind) for kind, section in sections if not issubclass(section, RefusedValue)
    )


def _entries(count: int) -> str:
    return "one entry" if count == 1 else f"{count} entries"
