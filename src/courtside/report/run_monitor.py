"""What a run is doing, for those who ask over HTTP, and whether it still progresses.

The run tells a monitor what it tells a console; threads of the metrics server ask it. Nothing is
computed before somebody asks, and what they read is replaced, never changed in place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Literal

from courtside.progress import ProgressMeter
from courtside.recipe import Recipe
from courtside.report.console import Numbers, RunConsole
from courtside.report.costs import PhaseCost
from courtside.types import Evaluation

MIN_PHASES, STALL_FACTOR = 3, 6.0
"""Times that a phase must have ended before a stall is claimed, and how many times its median time
may pass without progress."""
NUM_REMEMBERED = 50
"""Of the latest times of each phase, for the median."""
BETWEEN = "record"
"""The phase between others, in which a step is stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    status: Literal["starting", "running", "stalled", "finished"]
    phase: str
    phase_seconds: float
    """Since it began."""
    seconds_since_progress: float
    """Since a phase began or ended, or a count inside it was seen to grow."""
    stalls_after_seconds: float | None
    """None: the phase has not ended often enough to say."""
    steps_done: int
    steps_planned: int


class RunMonitor(RunConsole):
    def __init__(
        self,
        run_name: str,
        *,
        stall_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run_name, self.stall_seconds = run_name, stall_seconds
        self._clock = clock
        self._status: Literal["starting", "running", "finished"] = "starting"
        self._steps_done = self._steps_planned = 0
        self._phase = BETWEEN
        self._opened = {BETWEEN: clock()}
        """When each phase that is open began."""
        self._durations: Mapping[str, tuple[float, ...]] = {}
        self.progress = ProgressMeter()
        self._counts: tuple[float, ...] = ()
        self._last_progress = clock()
        self.row: Numbers = {}
        self.totals: Mapping[str, PhaseCost] = {}
        self.num_alarms: Mapping[str, int] = {}
        self.scores: Mapping[tuple[str, str], Evaluation] = {}

    # ── what the run tells ───────────────────────────────────────────────────────────────────────

    def start(self, recipe: Recipe, total_steps: int, first_step: int) -> None:
        self._status = "running"
        self._steps_done, self._steps_planned = first_step, total_steps

    def watch(self, progress: ProgressMeter) -> None:
        self.progress = progress

    def phase(self, name: str) -> None:
        self._close(BETWEEN)
        self._enter(name)

    def end_phase(self, name: str) -> None:
        self._close(name)
        self._enter(BETWEEN)  # until the run returns to a phase around it, if there is one

    def step(self, row: Numbers) -> None:
        self.row = row
        self._steps_done = int(row["step"] or 0) + 1
        self._last_progress = self._clock()

    def costs(self, totals: Mapping[str, PhaseCost]) -> None:
        self.totals = totals

    def alarm(self, kind: str, message: str, *, step: int) -> None:
        self.num_alarms = {**self.num_alarms, kind: self.num_alarms.get(kind, 0) + 1}

    def evaluation(self, evaluation: Evaluation, text: str) -> None:
        self.scores = {**self.scores, (evaluation.policy, evaluation.split): evaluation}

    def finish(self) -> None:
        self._status = "finished"

    def _enter(self, name: str) -> None:
        now = self._clock()
        self._opened = {name: now} | self._opened
        self._phase, self._counts, self._last_progress = name, self._read_counts(), now

    def _close(self, name: str) -> None:
        begin = self._opened.get(name)
        if begin is not None:
            self._opened = {key: at for key, at in self._opened.items() if key != name}
            times = (*self._durations.get(name, ()), self._clock() - begin)[-NUM_REMEMBERED:]
            self._durations = {**self._durations, name: times}

    # ── what a scraper asks ──────────────────────────────────────────────────────────────────────

    def health(self) -> Health:
        now, phase = self._clock(), self._phase
        limit = self._stall_limit(phase)
        waited = max(0.0, now - self._find_last_progress())
        status: Literal["starting", "running", "stalled", "finished"] = self._status
        if status != "finished" and limit is not None and waited > limit:
            status = "stalled"
        return Health(
            status=status,
            phase=phase,
            phase_seconds=max(0.0, now - self._opened.get(phase, now)),
            seconds_since_progress=waited,
            stalls_after_seconds=limit,
            steps_done=self._steps_done,
            steps_planned=self._steps_planned,
        )

    def _stall_limit(self, phase: str) -> float | None:
        times = self._durations.get(phase, ())
        if len(times) < MIN_PHASES:
            return None
        return max(STALL_FACTOR * median(times), self.stall_seconds)

    def _find_last_progress(self) -> float:
        """Counts are compared when somebody asks, so that counting costs nothing."""
        if (counts := self._read_counts()) != self._counts:
            self._counts, self._last_progress = counts, self._clock()
        return self._last_progress

    def _read_counts(self) -> tuple[float, ...]:
        phase = self.progress.phase
        counts: tuple[float, ...] = tuple(r.num_answered for r in self.progress.replicas)
        return (
            counts if phase is None else (*counts, phase.finished, phase.partial, phase.num_tokens)
        )
