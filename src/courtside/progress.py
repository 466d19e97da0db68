"""How far the phase that is running has come: engines, rollouts and the student count, a console
shows it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseProgress:
    finished: int
    total: int
    unit: str
    """What is counted: `answers`, `episodes`, `passes` of a teacher, or `micro-batches`."""
    num_tokens: int
    """Sampled so far."""
    fraction: float
    """Of the work. An answer or episode under way counts by how much of its limit is used, so the
    remaining time is an upper estimate."""
    seconds: float

    @property
    def tokens_per_second(self) -> float | None:
        return self.num_tokens / self.seconds if self.num_tokens and self.seconds > 0 else None

    @property
    def remaining(self) -> float | None:
        """Seconds; None before anything is done."""
        if not self.fraction:
            return None
        return max(self.seconds * (1 - self.fraction) / self.fraction, 0.0)


class ProgressMeter:
    """Counts of the work that began last. Without a `begin`, counts go nowhere."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._show: Callable[[PhaseProgress], None] | None = None
        self.clear()

    def watch(self, show: Callable[[PhaseProgress], None]) -> None:
        """`show` is called after every count, many times a second."""
        self._show = show

    def clear(self) -> None:
        self._total = self._finished = self._num_tokens = self._done_tokens = 0
        self._unit, self._max_tokens, self._fraction = "", 0, 0.0

    def begin(self, total: int, unit: str, *, max_tokens: int = 0) -> None:
        """`max_tokens`: of one sample, where each is one of the `total`; else `set_finished`."""
        self.clear()
        self._total, self._unit, self._max_tokens = total, unit, max_tokens
        self._start = self._clock()
        self._report()

    def add_samples(self, num_tokens: int, num_finished: int, num_unused: int) -> None:
        """Called by engines. `num_unused`: tokens that the finished ones left of their limit."""
        self._num_tokens += num_tokens
        if self._max_tokens:
            self._finished += num_finished
            self._done_tokens += num_tokens + num_unused
            self._fraction = self._done_tokens / (self._total * self._max_tokens or 1)
        self._report()

    def track(self, items: Sequence[T], unit: str) -> Iterator[T]:
        """The items, each counted when it is done with."""
        self.begin(len(items), unit)
        for number, item in enumerate(items, start=1):
            yield item
            self.set_finished(number, number / len(items))

    def set_finished(self, finished: int, fraction: float) -> None:
        self._finished, self._fraction = finished, fraction
        self._report()

    def _report(self) -> None:
        if self._show is None or not self._total:
            return
        self._show(
            PhaseProgress(
                finished=min(self._finished, self._total),
                total=self._total,
                unit=self._unit,
                num_tokens=self._num_tokens,
                fraction=min(self._fraction, 1.0),
                seconds=self._clock() - self._start,
            )
        )
