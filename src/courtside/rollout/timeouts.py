"""Calls into other people's code that may raise or hang; neither ends the run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CallResult(Generic[T]):
    value: T | None = None
    error: Exception | None = None
    timed_out: bool = False
    """It did not come back in time. Whatever it works on must not be touched any more."""


def call_all_with_timeout(
    calls: Sequence[Callable[[], T]], *, seconds: float
) -> list[CallResult[T]]:
    """All calls at the same time, each in a thread of its own, and what came of them in order."""
    outcomes: list[CallResult[T]] = [CallResult(timed_out=True)] * len(calls)

    def run(index: int, call: Callable[[], T]) -> None:
        try:
            outcomes[index] = CallResult(value=call())
        except Exception as error:  # any mistake of theirs is an observation here, not our end
            outcomes[index] = CallResult(error=error)

    # Daemons: a thread that hangs must not keep the process from ending.
    threads = [
        threading.Thread(target=run, args=(index, call), daemon=True)
        for index, call in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    end = monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - monotonic()))
    return list(outcomes)
