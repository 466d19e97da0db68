"""Identity by content: ids, splits and choices that follow from SHA-256 alone.

They are the same in every process and on every machine, and nothing is remembered between calls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

from courtside.types import Split

T = TypeVar("T")


def digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


def split_of(content: str) -> Split:
    """80 / 10 / 10 by content: the same content is never in two splits."""
    tenth = int(digest(content)[:8], 16) % 10
    return "train" if tenth < 8 else "validation" if tenth == 8 else "test"


def task_id(kind: str, content: str) -> str:
    return f"{kind}-{digest(content)[:12]}"


def choose(options: Sequence[T], key: str) -> T:
    """One of the options, the same one for the same key."""
    return options[int(digest(key)[:16], 16) % len(options)]
