"""Which weights sample which step ahead of the update, and what happens when it fails or ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from support.stored_runs import make_trajectory

from courtside.progress import PhaseProgress, ProgressMeter
from courtside.rollout.overlapped import OverlappedRollout
from courtside.types import Message, Task, Trajectory

TASKS = [
    Task(id=f"t{n}", split="train", messages=(Message(role="user", content=f"{n}?"),))
    for n in range(3)
]


class Samples:
    """Says which weights each step was sampled with, and when."""

    def __init__(self, sample: Callable[[int], None] = lambda step: None) -> None:
        self.sampler = SimpleNamespace(pinned=None)
        self.version = 0
        self.by_step: dict[int, tuple[int, tuple[str, ...]]] = {}
        self.sample = sample
        self.was_closed = False
        self.meters = ProgressMeter(), ProgressMeter()

    def generate(self, tasks: Mapping[int, Task], step: int) -> list[int]:
        self.by_step[step] = self.sampler.pinned, tuple(task.id for task in tasks.values())
        self.sample(step)
        return [step]

    def close(self) -> None:
        self.was_closed = True

    def overlap(self, *, num_steps: int, max_staleness: int) -> OverlappedRollout[list[int]]:
        def finish(steps: list[int]) -> list[Trajectory]:
            assert threading.current_thread() is threading.main_thread()
            return [make_trajectory(id=str(step)) for step in steps]

        return OverlappedRollout(
            generate=self.generate,
            finish=finish,
            batch=lambda step: TASKS[: 1 + step % 3],
            sampler=self.sampler,
            find_weights=lambda: self.version,
            close_sampler=self.close,
            num_steps=num_steps,
            max_staleness=max_staleness,
            progress=self.meters[0],
            ahead=self.meters[1],
        )


def train(samples: Samples, rollout: Any, steps: range) -> list[int]:
    """Versions of the weights that the loop's steps were sampled with."""
    versions = []
    for step in steps:
        (trajectory,) = rollout(TASKS[: 1 + step % 3], step)
        assert trajectory.id == str(step)
        versions.append(samples.by_step[step][0])
        samples.version = step + 1
    return versions


@pytest.mark.parametrize(
    ("max_staleness", "versions"),
    [(1, [0, 0, 1, 2, 3, 4]), (2, [0, 0, 0, 1, 2, 3]), (4, [0, 0, 0, 0, 0, 1])],
)
def test_a_step_is_sampled_with_weights_of_a_fixed_age(
    max_staleness: int, versions: list[int]
) -> None:
    samples = Samples()
    rollout = samples.overlap(num_steps=6, max_staleness=max_staleness)
    assert train(samples, rollout, range(6)) == versions
    assert [*samples.by_step] == [*range(6)], "each once, in order, and none after the last"
    assert samples.by_step[4][1] == ("t0", "t1"), "the tasks of its own batch"
    rollout.close()
    assert not samples.was_closed, "nothing was under way"


def test_a_resumed_run_begins_with_the_weights_that_it_has() -> None:
    samples = Samples()
    samples.version = 4
    rollout = samples.overlap(num_steps=7, max_staleness=2)
    assert train(samples, rollout, range(4, 7)) == [4, 4, 4]


def test_the_next_step_is_sampled_while_the_student_trains() -> None:
    began = threading.Event()
    samples = Samples(lambda step: began.set() if step == 1 else None)
    rollout = samples.overlap(num_steps=3, max_staleness=1)
    rollout(TASKS[:1], 0)
    assert began.wait(5), "before anybody asked for step 1"
    assert samples.by_step[1][0] == 0
    rollout.close()


@pytest.mark.parametrize("error", [ValueError("no such tool"), TimeoutError("a call")])
def test_a_failure_is_raised_by_the_step_that_needs_the_samples(error: Exception) -> None:
    def fail(step: int) -> None:
        if step == 1:
            raise error

    samples = Samples(fail)
    rollout = samples.overlap(num_steps=4, max_staleness=1)
    rollout(TASKS[:1], 0)
    with pytest.raises(type(error), match=str(error)):
        rollout(TASKS[:2], 1)
    rollout.close()


def test_the_end_of_a_run_cancels_what_is_under_way() -> None:
    began, cancelled = threading.Event(), threading.Event()

    def wait(step: int) -> None:
        if step > 0:
            began.set()
            assert cancelled.wait(10)

    samples = Samples(wait)
    rollout = samples.overlap(num_steps=9, max_staleness=3)
    rollout.close_sampler = cancelled.set
    rollout(TASKS[:1], 0)
    assert began.wait(5)
    start = time.monotonic()
    rollout.close()
    assert cancelled.is_set() and time.monotonic() - start < 3
    assert [*samples.by_step] == [0, 1], "what had not begun never does"


def test_progress_is_that_of_the_rollout_that_is_waited_for() -> None:
    samples = Samples()
    counted_steps = []

    def count(step: int) -> None:
        phase = PhaseProgress(total=step + 1, unit="answers")
        samples.meters[1].phase = phase
        for _ in range(100):
            if samples.meters[0].phase is phase:
                counted_steps.append(step)
                return
            time.sleep(0.02)

    samples.sample = count
    rollout = samples.overlap(num_steps=1, max_staleness=1)
    rollout(TASKS[:1], 0)
    assert counted_steps == [0]


def test_a_signal_while_a_step_is_waited_for_cancels_its_requests() -> None:
    """The rollout that is waited for is as much under way as those after it."""
    cancelled = threading.Event()
    samples = Samples(lambda step: cancelled.wait(10) or None)
    rollout = samples.overlap(num_steps=3, max_staleness=1)
    rollout.close_sampler = cancelled.set
    rollout._wait = lambda future: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        rollout(TASKS[:1], 0)
    rollout.close()
    assert cancelled.is_set()
