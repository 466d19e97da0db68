"""Checks of an instruction by program: each says what is wrong with a response, or nothing.

An answer without any word follows no instruction; neither does one that consists of the demanded
phrase alone, or of an empty JSON object. Without that, silence would be the surest way to pass.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

ABBREVIATIONS = (
    "dr.", "mr.", "mrs.", "ms.", "mt.", "prof.", "st.", "vs.", "etc.", "e.g.", "i.e.", "a.m.",
    "p.m.", "u.s.", "u.k.", "approx.",
)  # fmt: skip
"""A full stop of these ends no sentence."""


@dataclass(frozen=True, slots=True)
class Check:
    complaint: Callable[[str, Mapping[str, Any]], str | None]
    """(stripped response with at least one word, parameters) → what is wrong, or None."""
    parameters: Mapping[str, type] = field(default_factory=dict)


def find_violation(name: str, response: str, parameters: Mapping[str, Any]) -> str | None:
    """What keeps the response from following the instruction; None if it does."""
    text = response.strip()
    if not split_words(text):
        return "The answer is empty; it must say something."
    return CHECKS[name].complaint(text, parameters)


def split_words(text: str) -> list[str]:
    """Separated by spaces; bare punctuation is no word."""
    return [word for word in text.split() if any(c.isalnum() for c in word)]


def _lower_case(text: str, _: Mapping[str, Any]) -> str | None:
    return _case(text, str.islower, str.isupper, "The answer must be in lower case", "capital")


def _upper_case(text: str, _: Mapping[str, Any]) -> str | None:
    return _case(text, str.isupper, str.islower, "The answer must be in upper case", "small")


def _case(
    text: str, right: Callable[[str], bool], wrong: Callable[[str], bool], rule: str, letters: str
) -> str | None:
    offending = next((c for c in text if wrong(c) or (c.istitle() and not right(c))), None)
    if offending is not None:
        return f"{rule}, but it contains {letters} letters such as {offending!r}."
    return None if any(map(right, text)) else f"{rule}, but it contains no letters at all."


def _word_count(text: str, parameters: Mapping[str, Any]) -> str | None:
    count, limit = len(split_words(text)), parameters["limit"]
    if count > limit:
        return f"The answer must have at most {limit} words, but it has {count}."
    return None


def _json(text: str, _: Mapping[str, Any]) -> str | None:
    rule = "The answer must be one JSON object and nothing else"
    if text.startswith("```"):
        return f"{rule}, but it is wrapped in a code fence."
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        return f"{rule}, but it is not valid JSON: {error.msg} at character {error.pos}."
    except (ValueError, RecursionError):  # NaN, numbers of thousands of digits, endless brackets
        return f"{rule}, but it is not valid JSON."
    if not isinstance(value, dict):
        kinds = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}
        return f"{rule}, but it is {kinds.get(type(value), 'a number')}."
    return None if value else f"{rule}, but the object is empty."


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _bullets(text: str, _: Mapping[str, Any]) -> str | None:
    rule = "The answer must consist of lines that start with '- '"
    lines = [line for line in text.split("\n") if line.strip()]
    for line in lines:
        if not line.startswith("- "):
            return f"{rule}, but one line is {_short(line)}."
        if not split_words(line):
            return f"{rule} and say something, but one of them is empty."
    if len(lines) < 2:
        return f"{rule}, at least two of them, but there is only one."
    return None


def _forbidden_word(text: str, parameters: Mapping[str, Any]) -> str | None:
    word = parameters["word"]
    match = re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE)
    return f"The answer must not contain the word {word!r}, but it does." if match else None


def _ending(text: str, parameters: Mapping[str, Any]) -> str | None:
    phrase = parameters["phrase"]
    rule = f"The answer must end with exactly {phrase!r}"
    if not text.endswith(phrase):
        return f"{rule}, but it ends with {_short(text[-len(phrase) :])}."
    return None if split_words(text.removesuffix(phrase)) else f"{rule}, but it says nothing else."


def _starts_with(text: str, parameters: Mapping[str, Any]) -> str | None:
    phrase = parameters["phrase"]
    rule = f"The answer must start with exactly {phrase!r}"
    if not text.startswith(phrase):
        return f"{rule}, but it starts with {_short(text[: len(phrase)])}."
    return None if split_words(text.removeprefix(phrase)) else f"{rule}, but it says nothing else."


def _one_sentence(text: str, _: Mapping[str, Any]) -> str | None:
    rule = "The answer must be exactly one sentence"
    if "\n" in text:
        return f"{rule}, but it has several lines."
    parts = text.split()
    if not _closes(parts[-1], None):
        return f"{rule}, but it does not end with '.', '!' or '?'."
    count = sum(_closes(*pair) for pair in zip(parts, [*parts[1:], None], strict=True))
    return None if count == 1 else f"{rule}, but it has {count} sentences."


def _closes(word: str, following: str | None) -> bool:
    """Whether a word ends a sentence: "hot." and "hot!)" do; "e.g.", "J." and "well... so" not."""
    bare = word.rstrip("\"'”’)]*_")
    if not bare.endswith((".", "!", "?", "…")):
        return False
    if following is None:
        return True
    core = bare.lstrip("\"'“‘([*_")
    initial = len(core) == 2 and core[0].isupper() and core not in ("I.", "I!", "I?")
    pause = core.endswith(("...", "…")) and following[0].islower()
    return not (core.lower() in ABBREVIATIONS or (initial and core[1] == ".") or pause)


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}…")


CHECKS: Mapping[str, Check] = {
    "lower_case": Check(_lower_case),
    "upper_case": Check(_upper_case),
    "word_count": Check(_word_count, {"limit": int}),
    "json": Check(_json),
    "bullets": Check(_bullets),
    "forbidden_word": Check(_forbidden_word, {"word": str}),
    "ending": Check(_ending, {"phrase": str}),
    "starts_with": Check(_starts_with, {"phrase": str}),
    "one_sentence": Check(_one_sentence),
}
