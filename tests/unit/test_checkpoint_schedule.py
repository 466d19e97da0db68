"""How often a run saves."""

from __future__ import annotations

import pytest

from courtside.run_state import CheckpointSchedule


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def saved_steps(every: int | None, *, step: float, save: float, num_steps: int = 100) -> list[int]:
    """Of a run whose steps and checkpoints take so many seconds."""
    clock, saved = Clock(), []
    schedule = CheckpointSchedule(every, clock)
    for n in range(1, num_steps + 1):
        clock.now += step
        if schedule.is_due(n):
            saved.append(n)
            with schedule.time_save():
                clock.now += save
    return saved


@pytest.mark.parametrize("save", [0.0, 500.0])
def test_a_number_of_steps_holds_whatever_it_costs(save: float) -> None:
    assert saved_steps(30, step=1.0, save=save) == [30, 60, 90]


def test_quick_checkpoints_are_written_every_ten_steps() -> None:
    assert saved_steps(None, step=1.0, save=1.0) == [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]


@pytest.mark.parametrize(
    ("save", "saved"),
    [(2.0, [10, 30, 50, 70, 90]), (3.5, [10, 50, 90]), (50.0, [10])],
)
def test_slow_ones_take_a_tenth_of_the_time_at_most(save: float, saved: list[int]) -> None:
    assert saved_steps(None, step=1.0, save=save) == saved
