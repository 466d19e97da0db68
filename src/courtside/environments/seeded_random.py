"""Random numbers that are the same in every process, on every machine and Python version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from courtside.hashing import digest

T = TypeVar("T")


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
