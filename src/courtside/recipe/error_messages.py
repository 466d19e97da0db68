"""What is wrong with a recipe, in the words of the person who wrote it.

Pydantic names a problem's place by its own path, with the tags of unions in between, and reports
every member of a union that did not fit. Here the path becomes the keys that stand in the recipe,
and each mistake one line.
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

Problem = Mapping[str, Any]
"""One of `ValidationError.errors()`."""

WANTED = {
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "string_type": "must be a string",
    "bool_type": "must be true or false",
    "tuple_type": "must be a list",
}
SPEAKS_FOR_ITSELF = {
    "value_error", "missing", "too_short", "too_long", "extra_forbidden", "union_tag_invalid",
    "union_tag_not_found",
}  # fmt: skip
"""Problems whose message does not need the offending value after it."""


# ── places ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    path: str
    """As in the recipe: `losses[0].support`."""
    wanted: Any
    """The type that belongs here."""
    section: Any
    """The type that the last key is looked up in."""
    siblings: Mapping[str, type[BaseModel]]
    """The kinds that this section could also have had."""
    union: tuple[int | str, ...] | None
    """Where a plain union (`a number or a section`) was tried, the way to it."""
    is_inside: bool
    """The problem lies within a member of that union; otherwise the member did not fit at all."""


def place_of(loc: Sequence[int | str]) -> Place:
    path = ""
    here: Any = Recipe
    section: Any = None
    union: tuple[int | str, ...] | None = None
    siblings: dict[str, type[BaseModel]] = {}
    entered: dict[str, type[BaseModel]] = {}
    for i, key in enumerate(loc):
        if tagged := sections_by_kind(here):
            entered = {kind: member for kind, member in tagged.items() if kind != key}
            here = tagged[str(key)]
        elif members := union_members(here):
            union = tuple(loc[:i])
            here = next((m for m in members if getattr(m, "__name__", None) == key), Any)
        else:
            section, siblings, entered = unwrap(here), entered, {}
            here = field_type(here, key)
            path += f"[{key}]" if isinstance(key, int) else f".{key}" if path else key
    return Place(
        path=path,
        wanted=unwrap(here),
        section=section,
        siblings=siblings,
        union=union,
        is_inside=union is not None and len(loc) > len(union) + 1,
    )


# ── words ────────────────────────────────────────────────────────────────────────────────────────


def describe_problems(problems: Iterable[Problem]) -> list[str]:
    """One line for each mistake, in the order of the recipe."""
    found = [(problem, place_of(problem["loc"])) for problem in problems]
    locs = [problem["loc"] for problem, _ in found]
    explained_inside = {place.union for _, place in found if place.is_inside}
    lines: list[str] = []
    for problem, place in found:
        if problem["type"] == "too_short" and _has_inner(problem["loc"], locs):
            continue  # Invalid entries were not counted; they have lines of their own.
        if place.union is None or place.is_inside:
            lines += _lines(place, [_message(problem, place)], problem)
        elif place.union not in explained_inside:
            tried = [(other, at) for other, at in found if at.union == place.union]
            if tried[0][0] is problem:
                lines += _lines(place, [_message(*attempt) for attempt in tried], problem)
    return lines


def _has_inner(loc: tuple[int | str, ...], locs: Iterable[tuple[int | str, ...]]) -> bool:
    return any(len(other) > len(loc) and other[: len(loc)] == loc for other in locs)


def _lines(place: Place, messages: Sequence[str], problem: Problem) -> list[str]:
    message = ", or ".join(messages).replace(", or must be", ", or")
    if problem["type"] not in SPEAKS_FOR_ITSELF:
        message += f"; got {_shortened(problem['input'])}"
    path = f"{place.path}.kind" if problem["type"].startswith("union_tag") else place.path
    return [f"{path}: {line}" if path else line for line in message.split("\n")]


def _shortened(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:79] + "…"


def _message(problem: Problem, place: Place) -> str:
    match problem["type"]:
        case "missing":
            return "is required"
        case "extra_forbidden":
            return _unknown_key(str(problem["loc"][-1]), place)
        case "union_tag_not_found":
            return f"is required; use one of {_usable(place.wanted)}"
        case "union_tag_invalid":
            tag = problem["ctx"]["tag"]
            guess = _did_you_mean(tag, sections_by_kind(place.wanted))
            return f"{tag!r} is not known; {guess}use one of {_usable(place.wanted)}"
        case "model_type" | "dict_type":
            if sections_by_kind(place.wanted):
                return f"must be a section with a kind: {_usable(place.wanted)}"
            keys = ", ".join(_keys(place.wanted))
            return f"must be a section with {keys}" if keys else "must be a section"
        case "tuple_type" if sections_by_kind(field_type(place.wanted, 0)):
            return f"must be a list of sections; write [[{place.path}]] above each"
        case "too_short":
            return f"needs at least {_entries(problem['ctx']['min_length'])}"
        case "too_long":
            return f"takes at most {_entries(problem['ctx']['max_length'])}"
        case known if known in WANTED:
            return WANTED[known]
    text = str(problem["msg"]).removeprefix("Value error, ")
    return text.replace("Input should be", "must be", 1)


def _unknown_key(key: str, place: Place) -> str:
    keys = _keys(place.section)
    if guess := _did_you_mean(key, keys):
        return f"unknown key; {guess}".strip()
    if homes := [kind for kind, sibling in place.siblings.items() if key in _keys(sibling)]:
        return f"unknown key here; it belongs to kind = {' or '.join(map(repr, homes))}"
    sections = [
        f"{name}.{key}"
        for name, field in Recipe.model_fields.items()
        if is_section(unwrap(field.annotation)) and key in _keys(unwrap(field.annotation))
    ]
    if sections:
        return f"unknown key here; did you mean {' or '.join(sections)}?"
    return f"unknown key; this section has {', '.join(keys)}"


def _keys(section: Any) -> list[str]:
    return list(section.model_fields) if is_section(section) else []


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}? " if close else ""


def _usable(annotation: Any) -> str:
    sections = sections_by_kind(annotation).items()
    return ", ".join(repr(kind) for kind, one in sections if not issubclass(one, RefusedValue))


def _entries(count: int) -> str:
    return "one entry" if count == 1 else f"{count} entries"
