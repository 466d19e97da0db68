"""Ids, splits, choices and random streams that follow from SHA-256 alone.

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


class SeededRandom:
    """A random stream that follows from `key` through SHA-256 alone."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._counter = 0

    def randbelow(self, size: int) -> int:
        """One of 0 … size - 1."""
        self._counter += 1
        return int(digest(f"{self._key}/{self._counter}")[:16], 16) % size

    def randint(self, low: int, high: int) -> int:
        """Both ends included."""
        return low + self.randbelow(high - low + 1)

    def choice(self, options: Sequence[T]) -> T:
        return options[self.randbelow(len(options))]

    def choose_distinct(self, options: Sequence[T], count: int) -> list[T]:
        """Distinct options, in random order."""
        remaining = list(options)
        return [remaining.pop(self.randbelow(len(remaining))) for _ in range(count)]

    def bernoulli(self, share: float) -> bool:
        return self.randbelow(1 << 52) < share * (1 << 52)
