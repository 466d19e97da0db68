"""Who is told what a run does: its console, its log of events, its metrics endpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from courtside.progress import ProgressMeter
from courtside.recipe import Recipe
from courtside.recipe.run import RunConfig
from courtside.report.console import Numbers, PlainConsole, RichConsole, RunConsole
from courtside.report.costs import PhaseCost
from courtside.report.json_log import log_events
from courtside.report.metrics_server import MetricsServer
from courtside.report.run_monitor import RunMonitor
from courtside.types import Evaluation


class ConsoleGroup(RunConsole):
    """Tells several consoles the same."""

    def __init__(self, consoles: Sequence[RunConsole]) -> None:
        self.consoles = consoles

    def start(self, recipe: Recipe, total_steps: int, first_step: int) -> None:
        for console in self.consoles:
            console.start(recipe, total_steps, first_step)

    def phase(self, name: str) -> None:
        for console in self.consoles:
            console.phase(name)

    def end_phase(self, name: str) -> None:
        for console in self.consoles:
            console.end_phase(name)

    def watch(self, progress: ProgressMeter) -> None:
        for console in self.consoles:
            console.watch(progress)

    def step(self, row: Numbers) -> None:
        for console in self.consoles:
            console.step(row)

    def costs(self, totals: Mapping[str, PhaseCost]) -> None:
        for console in self.consoles:
            console.costs(totals)

    def alarm(self, kind: str, message: str, *, step: int) -> None:
        for console in self.consoles:
            console.alarm(kind, message, step=step)

    def evaluation(self, evaluation: Evaluation, text: str) -> None:
        for console in self.consoles:
            console.evaluation(evaluation, text)

    def print_line(self, text: str) -> None:
        for console in self.consoles:
            console.print_line(text)

    def finish(self) -> None:
        for console in self.consoles:
            console.finish()


@contextmanager
def open_observers(
    config: RunConfig, console: RunConsole, run: Path, *, rank: int = 0
) -> Iterator[RunConsole]:
    """What the recipe asks for in addition to the console. A port or file that cannot be opened is
    an error here, before the run starts."""
    with ExitStack() as stack:
        events = stack.enter_context(log_events(config, run, rank))
        is_ours = isinstance(console, PlainConsole | RichConsole)
        consoles = [] if is_ours and config.log_format == "json" else [console]
        if events is not None:
            consoles.append(events)
        if config.metrics_port is not None and rank == 0:
            monitor = RunMonitor(run.name, stall_seconds=60 * config.stall_minutes)
            server = MetricsServer(monitor, host=config.metrics_host, port=config.metrics_port)
            stack.enter_context(server)
            consoles.insert(0, monitor)
            for observer in consoles:
                observer.print_line(f"metrics: {server.url}/metrics, health: {server.url}/health")
        yield consoles[0] if len(consoles) == 1 else ConsoleGroup(consoles)
