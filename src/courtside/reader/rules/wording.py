"""Texts of a trajectory inside hints: truncated, and located by span."""

from __future__ import annotations

import re

FACT_CHARS = 200
"""Of a text from the trajectory that goes into a hint: an error message can be a whole page."""


def truncate(text: str, limit: int) -> str:
    """
    >>> shortened("abcdef", 4)
    'abc…'
    """
    return text if len(text) <= limit else text[: limit - 1] + "…"


def find_span(text: str, word: str) -> str | None:
    """The word where it stands by itself, or else within others; None where it does not occur.

    >>> span_of("get_weather(); get()", "get")
    ' get'
    >>> span_of("nothing", "weather") is None
    True
    """
    whole = re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text)
    start = whole.start() if whole else text.find(word)
    return unique_span(text, start, start + len(word)) if start >= 0 else None


def unique_span(text: str, start: int, end: int) -> str | None:
    """These characters; begun earlier if a search for them would find another place first."""
    if not text[start:end].strip():
        return None
    while text.find(text[start:end]) != start:
        start -= 1
    return text[start:end]
