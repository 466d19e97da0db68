"""When a request that was not answered yet is sent to a second replica, too.

What answers of its kind took so far is the measure: a server that hangs, or is far slower than the
others, costs a few times that and not the whole timeout.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Literal

FACTOR = 3.0
"""Over the longest answer of the kind. Answers of one batch end one after the other, so that the
longest one grows as long as servers work."""
FLOOR = 5.0
"""Seconds, for `auto`."""
MIN_ANSWERS = 8
"""Of a kind, before `auto` knows what they take."""


@dataclass(kw_only=True)
class HedgeTimer:
    hedge_after: float | Literal["auto"]
    num_hedged: int = 0
    """Requests that went to a second replica."""
    num_won: int = 0
    """Of these, how many it answered first."""
    _longest: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add_answer(self, kind: str | None, seconds: float) -> None:
        if kind is not None:
            self._longest[kind] = max(self._longest[kind], seconds)
            self._counts[kind] += 1

    def seconds(self, kind: str | None) -> float | None:
        """To wait for an answer; None: as long as it takes."""
        if kind is None or self.hedge_after != "auto":
            return None if kind is None else float(self.hedge_after)
        if self._counts[kind] < MIN_ANSWERS:
            return None
        return max(FACTOR * self._longest[kind], FLOOR)
