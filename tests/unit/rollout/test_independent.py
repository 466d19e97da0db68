"""Routines that wait for futures: none waits for another, and a failure ends all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from courtside.rollout.independent import run_independently


def test_a_slow_routine_holds_up_no_other() -> None:
    """The slow one waits until all others have ended."""
    others_have_ended = threading.Event()
    num_ended = 0
    with ThreadPoolExecutor(3) as threads:

        def routine(index: int, slot: int) -> Generator[Future[Any], Any, str]:
            nonlocal num_ended
            if index == 0:
                assert (yield threads.submit(others_have_ended.wait, 10))
                return "slow"
            total = 0
            for number in range(5):
                total += yield threads.submit(pow, number, 2)
            num_ended += 1
            if num_ended == 8:
                others_have_ended.set()
            return f"{index}: {total}"

        results = run_independently(routine, 9, num_slots=3)
    assert results == ["slow", *(f"{index}: 30" for index in range(1, 9))]


def test_a_slot_has_one_routine_at_a_time() -> None:
    running: dict[int, int] = {}
    most = 0
    with ThreadPoolExecutor(4) as threads:

        def routine(index: int, slot: int) -> Generator[Future[Any], Any, int]:
            nonlocal most
            assert slot not in running
            running[slot] = index
            most = max(most, len(running))
            yield threads.submit(time.sleep, 0.001 * (index % 3))
            del running[slot]
            return slot

        slots = run_independently(routine, 20, num_slots=4)
    assert set(slots) == {0, 1, 2, 3} and most == 4


def test_routines_without_a_future_and_no_routines() -> None:
    def routine(index: int, slot: int) -> Generator[Future[Any], Any, int]:
        return index
        yield

    assert run_independently(routine, 5, num_slots=2) == [0, 1, 2, 3, 4]
    assert run_independently(routine, 0, num_slots=2) == []


@pytest.mark.parametrize("where", ["future", "routine"])
def test_the_first_failure_is_raised_and_the_rest_cancelled(where: str) -> None:
    never: list[Future[Any]] = []

    def routine(index: int, slot: int) -> Generator[Future[Any], Any, None]:
        future: Future[Any] = Future()
        if index == 2:
            if where == "future":
                future.set_exception(OSError("no route"))
                yield future
            raise OSError("no route")
        never.append(future)
        yield future

    with pytest.raises(OSError, match="no route"):
        run_independently(routine, 3, num_slots=3)
    assert len(never) == 2 and all(future.cancelled() for future in never)
