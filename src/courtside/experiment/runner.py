"""Runs what a plan still misses, several runs at a time, and reports each start and end.

It can be cut off at any time and started again: runs that are finished are not run again, those
that were under way go on from their last checkpoint, those that failed are tried again. What a run
measured is in OUT/EXPERIMENT/outcomes/, and nothing else is needed to go on elsewhere.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from courtside.errors import Interrupted
from courtside.experiment.jobs import Job, load_outcome, write_failure
from courtside.experiment.outcomes import Outcome
from courtside.experiment.plan import Plan
from courtside.experiment.schedule import (
    count_runs,
    order_prepared,
    planned_jobs,
    prepare_jobs,
)
from courtside.experiment.summary import load_outcomes
from courtside.experiment.workers import run_all
from courtside.interrupts import StopSignal
from courtside.report.summary import format_duration

INTERRUPT = 2
"""The number of Ctrl-C's signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    failed: tuple[str, ...]
    """Names of the runs that failed in this call."""
    num_left: int
    """Runs that are known and were not started."""


class Runner:
    """Runs of a plan with their outcomes, and the lines about them."""

    def __init__(self, plan: Plan, *, only: str, report: Callable[[str], None]) -> None:
        self.plan, self.only, self._report = plan, only, report
        self.prepare = prepare_jobs(plan)
        self._needed = order_prepared(plan)
        self.outcomes = {
            job.name: outcome for job in self.prepare if (outcome := load_outcome(job))
        }
        self.outcomes |= load_outcomes(plan)
        for name in [name for name, outcome in self.outcomes.items() if "failed" in outcome]:
            del self.outcomes[name]  # failed runs are run again
        self.failed: list[str] = []
        self._starts: dict[str, float] = {}

    def jobs(self) -> Iterator[Job]:
        done = {name for name, outcome in self.outcomes.items() if "failed" not in outcome}
        yield from (job for job in self.prepare if self._needed[job.name] <= done)
        if all(job.name in done for job in self.prepare):
            yield from planned_jobs(self.plan, self.outcomes, self.only)

    def next_job(self, under_way: set[str]) -> Job | None:
        names = {*self.outcomes, *under_way}
        return next((job for job in self.jobs() if job.name not in names), None)

    def report_start(self, job: Job) -> None:
        self._starts[job.name] = time.monotonic()
        self._print(f"start {job.name}")

    def report_end(self, job: Job, reason: str | None) -> None:
        seconds = time.monotonic() - self._starts.pop(job.name)
        if reason is not None:
            self.failed.append(job.name)
            self.outcomes[job.name] = {"failed": reason}
            write_failure(job, reason)
            self._print(f"FAILED {job.name}: {reason}\n  its log: {job.log}")
            return
        outcome: Outcome = json.loads(job.outcome.read_text())
        self.outcomes[job.name] = outcome
        parts = [("score", outcome), *outcome.get("suites", {}).items()]
        scores = [(name, part) for name, part in parts if "after" in part][:1]
        score = "".join(f", {n} {p['before']:.3f} → {p['after']:.3f}" for n, p in scores)
        self._print(f"done {job.name} in {format_duration(seconds)}{score} ({self._count()})")

    def report_retry(self, job: Job, num_workers: int) -> None:
        del self._starts[job.name]
        self._print(
            f"again {job.name}, later: out of GPU memory beside {num_workers} others. From now on "
            f"{num_workers} at a time"
        )

    def _count(self) -> str:
        total = count_runs(self.plan, self.only) + len(self.prepare)
        names = {job.name for job in self.jobs()} & self.outcomes.keys()
        num_failed = sum("failed" in self.outcomes[name] for name in names)
        failed = f", {num_failed} failed" if num_failed else ""
        return f"{len(names) - num_failed} of {total}{failed}"

    def _print(self, text: str) -> None:
        self._report(f"{time.strftime('%H:%M:%S')} {text}")


def run_experiment(
    plan: Plan,
    *,
    num_workers: int,
    only: str = "",
    minutes: float | None = None,
    report: Callable[[str], None],
) -> Progress:
    """Run what is missing. After `minutes` no further run is started; those under way end.

    `only`: a regular expression for ARM or ARM-VARIANT. A failed run is recorded with its reason
    and stops no other.
    """
    began = time.monotonic()
    runner = Runner(plan, only=only, report=report)

    def next_job(under_way: set[str]) -> Job | None:
        if minutes is not None and time.monotonic() - began > 60 * minutes:
            return None
        return runner.next_job(under_way)

    try:
        run_all(
            next_job,
            num_workers=num_workers,
            on_start=runner.report_start,
            on_end=runner.report_end,
            on_retry=runner.report_retry,
        )
    except KeyboardInterrupt as stop:
        number = stop.number if isinstance(stop, StopSignal) else INTERRUPT
        raise Interrupted(
            f"stopped; the runs under way are saved in {plan.folder}. The same command goes on, "
            "with --summarize it tells what is finished",
            number,
        ) from None
    missing = {job.name for job in runner.jobs()} - runner.outcomes.keys()
    return Progress(failed=tuple(runner.failed), num_left=len(missing))
