"""Chance that is the same in every process, on every machine and in every version of Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from courtside.hashing import digest

T = TypeVar("T")


class SeededRandom:
    """A stream of draws that `key` names. Through SHA-256 alone, as everything in `tasks.base`."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._num_drawn = 0

    def randbelow(self, size: int) -> int:
        """One of 0 … size - 1."""
        self._num_drawn += 1
        return int(digest(f"{self._key}/{self._num_drawn}")[:16], 16) % size

    def randint(self, low: int, high: int) -> int:
        """Both ends included."""
        return low + self.randbelow(high - low + 1)

    def choice(self, options: Sequence[T]) -> T:
        return options[self.randbelow(len(options))]

    def choose_distinct(self, options: Sequence[T], count: int) -> list[T]:
        """Different ones, in the order drawn."""
        rest = list(options)
        return [rest.pop(self.randbelow(len(rest))) for _ in range(count)]

    def bernoulli(self, share: float) -> bool:
        return self.randbelow(1 << 52) < share * (1 << 52)
