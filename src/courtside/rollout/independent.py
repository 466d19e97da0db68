"""Many routines at once in one thread, none of which waits for another.

A routine is a generator: it yields the future that it waits for, gets its result, and returns its
own in the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, TypeVar

Result = TypeVar("Result")
Routine = Generator[Future[Any], Any, Result]


def run_independently(
    make: Callable[[int, int], Routine[Result]], num_routines: int, *, num_slots: int
) -> list[Result]:
    """Results in order. `make(index, slot)` begins a routine: at most `num_slots` run at a time,
    each in a slot of its own. The first failure is raised; what others wait for is cancelled."""
    waiting, free_slots = deque(range(num_routines)), deque(range(num_slots))
    running: dict[Future[Any], tuple[int, int, Routine[Result]]] = {}
    results: dict[int, Result] = {}

    def advance(index: int, slot: int, routine: Routine[Result], value: Any) -> None:
        try:
            running[routine.send(value)] = index, slot, routine
        except StopIteration as end:
            results[index] = end.value
            free_slots.append(slot)

    try:
        while waiting or running:
            while waiting and free_slots:
                index, slot = waiting.popleft(), free_slots.popleft()
                advance(index, slot, make(index, slot), None)
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in sorted(done, key=lambda future: running[future][0]):
                advance(*running.pop(future), future.result())
    finally:
        for future in running:
            future.cancel()
    return [results[index] for index in range(num_routines)]
