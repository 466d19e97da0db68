"""Console output of a run: progress, speed and its most important metrics.

These are the KL to the teacher, the reward (where answers are graded), the fraction of turns with
an error (in environments), the number of trained hints, the mean shift of all hints, and the
gradient norm.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TextIO

from courtside.errors import UserError
from courtside.progress import PhaseProgress, ProgressMeter
from courtside.recipe import Recipe
from courtside.report.costs import PhaseCost
from courtside.report.summary import format_duration, format_number, summarize_recipe
from courtside.types import Evaluation

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

Numbers = Mapping[str, float | int | None]

FIRST_PROGRESS, PROGRESS_EVERY = 10.0, 30.0
"""Seconds until a phase has a line of its own in a log, and between further ones."""
LOOK_EVERY = 1.0
"""Seconds between looks at the progress of a phase."""
MEDIUM, WIDE = 100, 140
"""Columns that hold a bar, and the numbers of a phase and of the run side by side."""


class RunConsole:
    """Prints nothing; subclasses override what they print."""

    def start(self, recipe: Recipe, total_steps: int, first_step: int) -> None:
        """`first_step` is 0, or the first step of a resumed run."""

    def phase(self, name: str) -> None:
        """A phase starts, or continues after a nested one."""

    def watch(self, progress: ProgressMeter) -> None:
        """The counts of the phases to come, which change while they are displayed."""

    def step(self, row: Numbers) -> None:
        """`row` are the metrics of a step that is done."""

    def end_phase(self, name: str) -> None:
        """A phase is over; a nested one returns to the one around it."""

    def costs(self, totals: Mapping[str, PhaseCost]) -> None:
        """What each phase has cost so far, earlier processes of the run included."""

    def alarm(self, kind: str, message: str, *, step: int) -> None:
        """`step` is that of the alarm's row in the run folder."""
        self.print_line(message)

    def evaluation(self, evaluation: Evaluation, text: str) -> None:
        """`text`: the same for people."""
        self.print_line(text)

    def print_line(self, text: str) -> None:
        pass

    def finish(self) -> None:
        pass


class Progress:
    """Steps done, elapsed and remaining time."""

    def __init__(self, total_steps: int, first_step: int, clock: Callable[[], float]) -> None:
        self.total = total_steps
        self.done = first_step
        self._clock = clock
        self._start = clock()
        self._first: tuple[int, float] | None = None
        self._last = self._start

    def step(self, step: int) -> None:
        self.done, self._last = step + 1, self._clock()
        self._first = self._first or (self.done, self._last)

    @property
    def elapsed(self) -> float:
        return self._clock() - self._start

    @property
    def remaining(self) -> float | None:
        """None before two steps: the time until the first includes an evaluation."""
        if self._first is None or self.done == self._first[0]:
            return None
        steps, at = self._first
        per_step = (self._last - at) / (self.done - steps)
        return max(per_step * (self.total - self.done) - (self._clock() - self._last), 0.0)


def headline_metrics(row: Numbers) -> list[tuple[str, str]]:
    """Labels and values for the step's line, of the metrics that the row has."""
    numbers = []
    if "kl" in row:
        numbers.append(("kl", format_number(row["kl"], trim=False)))
    elif "loss" in row:
        numbers.append(("loss", format_number(row["loss"], trim=False)))
    reward = row.get("reward/mean")
    if reward is not None:
        numbers.append(("reward", f"{reward:.3f}"))
    errors, hints = row.get("error_rate"), row.get("hints/trained")
    if errors is not None:
        numbers.append(("error_rate", f"{errors:.1%}"))
    if hints is not None:
        numbers.append(("hints", f"{hints:g}"))
    shift = row.get("hints/shift")
    if shift is not None:
        numbers.append(("shift", f"{shift:+.2f}"))
    if faults := row.get("environment_faults"):
        numbers.append(("environment_faults", f"{faults:g}"))
    if "grad_norm" in row:
        numbers.append(("grad", format_number(row["grad_norm"], trim=False)))
    return numbers


def format_progress(progress: PhaseProgress) -> str:
    """`23/48 episodes · 310 tok/s · ETA 40s`."""
    parts = [f"{progress.finished}/{progress.total} {progress.unit}"]
    if progress.tokens_per_second is not None:
        parts.append(f"{format_number(progress.tokens_per_second)} tok/s")
    if progress.remaining is not None:
        parts.append(f"ETA {format_duration(progress.remaining)}")
    return " · ".join(parts)


class PlainConsole(RunConsole):
    """One line per step, and now and then one inside a long phase, for files and pipes."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._progress = Progress(0, 0, clock)
        self._phase = ""
        self._next_line = clock() + FIRST_PROGRESS
        self._watched = ProgressMeter()
        self._finished = threading.Event()

    def phase(self, name: str) -> None:
        self._phase, self._next_line = name, self._clock() + FIRST_PROGRESS

    def watch(self, progress: ProgressMeter) -> None:
        self.finish()
        self._watched, self._finished = progress, threading.Event()
        threading.Thread(target=self._look, args=(self._finished,), daemon=True).start()

    def finish(self) -> None:
        self._finished.set()

    def _look(self, finished: threading.Event) -> None:
        while not finished.wait(LOOK_EVERY):
            self.print_progress()

    def print_progress(self) -> None:
        """A line on the phase that is running, if it is due."""
        progress = self._watched.phase
        if progress is not None and self._clock() >= self._next_line:
            self._next_line = self._clock() + PROGRESS_EVERY
            self.print_line(f"{self._phase}: {format_progress(progress)}")

    def start(self, recipe: Recipe, total_steps: int, first_step: int) -> None:
        self._progress = Progress(total_steps, first_step, self._clock)
        self.print_line(format_headline(recipe, total_steps, first_step))

    def step(self, row: Numbers) -> None:
        self._progress.step(int(row["step"] or 0))
        parts = [f"step {self._progress.done}/{self._progress.total}"]
        parts += [f"{name} {value}" for name, value in headline_metrics(row)]
        if row.get("tokens_per_second") is not None:
            parts.append(f"{format_number(row['tokens_per_second'])} tok/s")
        parts.append(f"elapsed {format_duration(self._progress.elapsed)}")
        if self._progress.remaining:
            parts.append(f"ETA {format_duration(self._progress.remaining)}")
        self.print_line("  ".join(parts))

    def print_line(self, text: str) -> None:
        # An accent in a model's name must not end a run whose log file has another encoding.
        encoding = self._stream.encoding or "utf-8"
        text = text.encode(encoding, "replace").decode(encoding)
        self._stream.write(f"{text}\n")  # in one call: two threads print
        self._stream.flush()


class RichConsole(RunConsole):
    """A live status line at the bottom, and one line per step."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.live import Live
        from rich.spinner import Spinner

        self._console = console
        self._clock = clock
        self._progress = Progress(0, 0, clock)
        self._phase = "starting"
        self._phase_start = clock()
        self._watched = ProgressMeter()
        self._speed: float | None = None
        self._spinner = Spinner("dots", style="cyan")
        self._live = Live(
            console=console, refresh_per_second=8, transient=True, get_renderable=self._line
        )

    def start(self, recipe: Recipe, total_steps: int, first_step: int) -> None:
        from rich.text import Text

        self._progress = Progress(total_steps, first_step, self._clock)
        self._phase_start = self._clock()
        line = format_headline(recipe, total_steps, first_step)
        self._print(Text.assemble(("courtside", "bold cyan"), "  ", (line, "dim")))
        if not self._live.is_started:
            self._live.start(refresh=True)

    def phase(self, name: str) -> None:
        self._phase, self._phase_start = name, self._clock()
        if self._live.is_started:
            self._live.refresh()
        else:
            self._live.start(refresh=True)

    def watch(self, progress: ProgressMeter) -> None:
        self._watched = progress  # the live line is redrawn by itself

    def step(self, row: Numbers) -> None:
        from rich.text import Text

        self._progress.step(int(row["step"] or 0))
        self._speed = row.get("tokens_per_second")
        width = len(str(self._progress.total))
        line = Text.assemble((f"{self._progress.done:>{width}}/{self._progress.total}", "bold"))
        for name, value in headline_metrics(row):
            line.append(f"   {name} ", style="dim").append(f"{value:<6}")
        line.append(f"   {format_number(self._speed)} tok/s", style="dim")
        seconds = sum(v for k, v in row.items() if k.startswith("seconds/") and v is not None)
        if seconds:
            line.append(f"   {format_duration(seconds)}", style="dim")
        self._print(line)

    def print_line(self, text: str) -> None:
        from rich.text import Text

        self._print(Text(text))

    def finish(self) -> None:
        self._live.stop()

    def _print(self, line: RenderableType) -> None:
        self._console.print(line, highlight=False)

    def _line(self) -> RenderableType:
        from rich.table import Table

        cells: list[RenderableType] = [self._spinner, self._status()]
        # The numbers of a phase take the place of the run's where there is none for both.
        if self._progress.total and (self._watched.phase is None or self._console.width >= WIDE):
            cells += [self._bar()] if self._console.width >= MEDIUM else []
            cells.append(self._rates())
        grid = Table.grid(padding=(0, 2, 0, 0))
        for _ in cells:
            grid.add_column(no_wrap=True)
        grid.add_row(*cells)
        return grid

    def _status(self) -> Text:
        from rich.text import Text

        progress, status = self._progress, Text()
        if progress.total:  # not in an evaluation by itself
            step = min(progress.done + 1, progress.total)
            status.append(f"step {step}/{progress.total}  ", style="bold")
        status.append(self._phase, style="cyan")
        status.append(f" {format_duration(self._clock() - self._phase_start)}", style="dim")
        if (phase := self._watched.phase) is not None:
            status.append(f"  {format_progress(phase)}")
        return status

    def _bar(self) -> RenderableType:
        from rich.progress_bar import ProgressBar

        return ProgressBar(
            total=max(self._progress.total, 1),
            completed=self._progress.done,
            width=24,
            complete_style="cyan",
            finished_style="cyan",
        )

    def _rates(self) -> Text:
        """Of the whole run."""
        from rich.text import Text

        progress, has_own_numbers = self._progress, self._watched.phase is not None
        rates = []
        if self._speed is not None and not has_own_numbers:
            rates.append(f"{format_number(self._speed)} tok/s")
        rates.append(f"{format_duration(progress.elapsed)} elapsed")
        if progress.remaining is not None:
            name = "run's ETA" if has_own_numbers else "ETA"
            rates.append(f"{name} {format_duration(progress.remaining)}")
        return Text(" · ".join(rates), style="dim")


def format_headline(recipe: Recipe, total_steps: int, first_step: int) -> str:
    steps = f"steps {first_step + 1} to {total_steps}" if first_step else f"{total_steps} steps"
    return f"{summarize_recipe(recipe)} · {steps}"


class LogConsole(PlainConsole):
    """The lines of a quiet run, for whoever configures `logging`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(sys.stderr, clock)
        self._logger = logging.getLogger("courtside")

    def print_line(self, text: str) -> None:
        self._logger.info("%s", text)


def choose_console(console: RunConsole | None, *, quiet: bool) -> RunConsole:
    """For calls from Python: the given one, the logger, or standard error.

    Results of a program stay alone on its standard output; notebooks show both, one in red.
    """
    if not isinstance(console, RunConsole | None):
        raise UserError(f"console = {console!r}; give a courtside.report.console.RunConsole")
    if console is not None:
        if quiet:
            raise UserError("quiet=True and console=…: give one of the two")
        return console
    if quiet:
        return LogConsole()
    return make_console(sys.stdout if "ipykernel" in sys.modules else sys.stderr)


def make_console(stream: TextIO) -> RunConsole:
    """Live on a terminal with cursor control, plain lines elsewhere."""
    if not stream.isatty() or os.environ.get("TERM") in ("dumb", "unknown"):
        return PlainConsole(stream)
    from rich.console import Console

    return RichConsole(Console(file=stream))
