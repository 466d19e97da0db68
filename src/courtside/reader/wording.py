"""Words of others made safe for a hint: one line, no control characters, a visible cut.

Special tokens of a chat template need nothing here: the renderer takes them as plain text.
"""

from __future__ import annotations

import re
import unicodedata

STEERING = re.compile(
    "[\u00ad\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\U000e0000-\U000e0fff]"
)
"""Invisible marks that reorder, hide or smuggle text. Joiners stay: scripts and emoji need them."""

FACT_CHARS = 200
"""Of a text from the trajectory that goes into a hint: an error message can be a whole page."""


def is_no_character(c: str) -> bool:
    """A control code, half of a surrogate pair, or what Unicode keeps out of texts."""
    code = ord(c)
    reserved = code & 0xFFFE == 0xFFFE or 0xFDD0 <= code <= 0xFDEF
    return reserved or unicodedata.category(c) in ("Cc", "Cs")


def printable(text: str) -> str:
    """Without what cannot be seen; tabs stay, and every line break becomes the usual one."""
    text = "\n".join(text.splitlines())
    return STEERING.sub("", "".join(c for c in text if c in "\n\t" or not is_no_character(c)))


def one_line(text: str) -> str:
    r"""
    >>> one_line("Use\n  meteo\x00.\u2028Now ")
    'Use meteo. Now'
    """
    # Line breaks first become spaces, so that the words on their two sides stay apart.
    return " ".join(printable(" ".join(text.split())).split())


def shortened(text: str, limit: int) -> str:
    """
    >>> shortened("abcdef", 4)
    'abc…'
    """
    return text if len(text) <= limit else text[: limit - 1] + "…"


def span_of(text: str, word: str) -> str | None:
    """The word where it stands by itself, or else within others; None where it does not occur.

    >>> span_of("get_weather(); get()", "get")
    ' get'
    >>> span_of("nothing", "weather") is None
    True
    """
    whole = re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text)
    start = whole.start() if whole else text.find(word)
    return span_at(text, start, start + len(word)) if start >= 0 else None


def span_at(text: str, start: int, end: int) -> str | None:
    """These characters; begun earlier if a search for them would find another place first."""
    if not text[start:end].strip():
        return None
    while text.find(text[start:end]) != start:
        start -= 1
    return text[start:end]
