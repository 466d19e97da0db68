"""Makes untrusted text safe to display: no control characters, no invisible marks.

Special tokens need no escaping: `ChatTemplate` tokenizes them as plain text.
"""

from __future__ import annotations

import re
import unicodedata

INVISIBLE = re.compile(
    "[\u00ad\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\U000e0000-\U000e0fff]"
)
"""Invisible marks that reorder, hide or smuggle text. Joiners stay: scripts and emoji need them."""


RENDERED_AS_CODE = re.compile(rf"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|{INVISIBLE.pattern}")


def is_no_character(c: str) -> bool:
    """Whether it is a control code, half of a surrogate pair, or a Unicode noncharacter."""
    code = ord(c)
    reserved = code & 0xFFFE == 0xFFFE or 0xFDD0 <= code <= 0xFDEF
    return reserved or unicodedata.category(c) in ("Cc", "Cs")


def escape_control_characters(text: str) -> str:
    """Removes invisible characters except tabs, and normalizes line breaks."""
    text = "\n".join(text.splitlines())
    return INVISIBLE.sub("", "".join(c for c in text if c in "\n\t" or not is_no_character(c)))


def show_invisible(text: str) -> str:
    r"""Marks that reorder or hide text, and control codes, as their code points.

    >>> show_invisible("user\u202e\u2066// admin\x1b[0m")
    'user[U+202E][U+2066]// admin[U+001B][0m'
    """
    return RENDERED_AS_CODE.sub(lambda match: f"[U+{ord(match[0]):04X}]", text)


def to_one_line(text: str) -> str:
    r"""
    >>> to_one_line("Use\n  meteo\x00.\u2028Now ")
    'Use meteo. Now'
    """
    # Line breaks first become spaces, so that the words on their two sides stay apart.
    return " ".join(escape_control_characters(" ".join(text.split())).split())


def truncate(text: str, limit: int) -> str:
    """
    >>> truncate("abcdef", 4)
    'abc…'
    """
    return text if len(text) <= limit else text[: limit - 1] + "…"
