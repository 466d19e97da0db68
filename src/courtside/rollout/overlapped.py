"""Rollouts ahead of the update: servers sample the next steps while the student trains.

A rollout begins when an earlier step's samples are handed over, with the weights of that moment. It
is at most `max_staleness` optimizer steps behind the weights that it trains, every trajectory says
by which version it was sampled, and which version that is does not depend on the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from courtside.progress import ProgressMeter
from courtside.rollout.shares import index_tasks
from courtside.types import Task, Trajectory

Generated = TypeVar("Generated")

POLL_SECONDS = 0.2
"""Between looks at the progress of a rollout that is waited for."""
CLOSE_SECONDS = 5.0
"""For a rollout to notice that its requests were cancelled; an environment's call may take longer,
and nobody waits for it."""


class Sampler(Protocol):
    """An engine whose samples may be of older weights than its current ones."""

    pinned: Any


@dataclass(kw_only=True)
class OverlappedRollout(Generic[Generated]):
    """`generate` runs in a thread, one step after the other; `finish` where the trajectories are
    asked for, because graders have time limits that only the main thread can enforce."""

    generate: Callable[[Mapping[int, Task], int], Generated]
    """Samples by the tasks' index in the batch, with the weights that `sampler` has pinned."""
    finish: Callable[[Generated], list[Trajectory]]
    batch: Callable[[int], Sequence[Task]]
    """The tasks of a step."""
    sampler: Sampler
    find_weights: Callable[[], Any]
    """The weights of this moment, to be pinned."""
    close_sampler: Callable[[], object]
    """Cancels requests under way; nothing is sampled afterwards."""
    num_steps: int
    max_staleness: int
    progress: ProgressMeter
    ahead: ProgressMeter
    """Of the rollout that runs in the thread."""
    _futures: dict[int, Future[Generated]] = field(default_factory=dict)
    """By step."""

    def __post_init__(self) -> None:
        assert self.max_staleness > 0, "else nothing is ahead"
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="rollout")

    def __call__(self, tasks: Sequence[Task], step: int) -> list[Trajectory]:
        if step not in self._futures:
            self._begin(tasks, step)
        generated = self._wait(self._futures[step])
        del self._futures[step]  # after the wait: a signal may end it, and `close` must know
        for later in range(step + 1, min(step + 1 + self.max_staleness, self.num_steps)):
            if later not in self._futures:
                self._begin(self.batch(later), later)
        return self.finish(generated)

    def _begin(self, tasks: Sequence[Task], step: int) -> None:
        weights = self.find_weights()

        def sample() -> Generated:
            self.sampler.pinned = weights
            return self.generate(index_tasks(tasks), step)

        self._futures[step] = self._executor.submit(sample)

    def _wait(self, future: Future[Generated]) -> Generated:
        """Shows how far the rollout is; a signal ends the wait."""
        while not future.done():
            self.progress.phase = self.ahead.phase
            wait([future], timeout=POLL_SECONDS)
        return future.result()

    def close(self) -> None:
        """Give up what is sampled ahead: the same steps sample it again when the run goes on."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        running = [future for future in self._futures.values() if not future.done()]
        if running:
            self.close_sampler()
            wait(running, timeout=CLOSE_SECONDS)
