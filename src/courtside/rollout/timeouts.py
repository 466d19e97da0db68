"""Calls of user code that may raise or hang, without ending the run."""

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
    """The call is still running; the objects it uses must not be used any more."""


def call_all_with_timeout(
    calls: Sequence[Callable[[], T]], *, seconds: float
) -> list[CallResult[T]]:
    """Runs all calls concurrently, each in a thread of its own; results in their order."""
    outcomes: list[CallResult[T]] = [CallResult(timed_out=True)] * len(calls)

    def run(index: int, call: Callable[[], T]) -> None:
        try:
            outcomes[index] = CallResult(value=call())
        except Exception as error:  # user code: its errors become observations
            outcomes[index] = CallResult(error=error)

    # Daemon threads: a hanging call must not keep the process alive.
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
