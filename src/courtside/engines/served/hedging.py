"""When a request that was not answered yet is sent to a second replica, too.

What answers of its kind took so far is the measure: a server that hangs, or is far slower than the
others, costs a few times that and not the whole timeout.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Literal

FACTOR = 3.0
"""Over the longest of the kind's recent answers. Answers of one batch end one after the other, so
that the longest one grows as long as servers work."""
FLOOR = 5.0
"""Seconds, for `auto`."""
MIN_ANSWERS = 4
"""Of a kind, before `auto` knows what they take."""
NUM_RECENT = 256
"""Answers of a kind that count: an outage that made one of them long is forgotten."""


@dataclass(kw_only=True)
class HedgeTimer:
    hedge_after: float | Literal["auto"]
    num_hedged: int = 0
    """Requests that went to a second replica."""
    num_won: int = 0
    """Of these, how many it answered first."""
    _recent: dict[str, deque[float]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=NUM_RECENT))
    )
    """Seconds, by kind."""

    def add_answer(self, kind: str | None, seconds: float) -> None:
        if kind is not None:
            self._recent[kind].append(seconds)

    def seconds(self, kind: str | None) -> float | None:
        """To wait for an answer; None: as long as it takes."""
        if kind is None or self.hedge_after != "auto":
            return None if kind is None else float(self.hedge_after)
        if len(self._recent[kind]) < MIN_ANSWERS:
            return None
        return max(FACTOR * max(self._recent[kind]), FLOOR)
