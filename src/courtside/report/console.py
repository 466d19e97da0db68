"""Console output of a run: progress, speed and its most important metrics.

These are the KL to the teacher, the reward (where answers are graded), the fraction of turns with
an error (in environments), the number of trained hints, and the gradient norm.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TextIO

from courtside.recipe import Recipe
from courtside.report.summary import format_duration, format_number, summarize_recipe

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

Numbers = Mapping[str, float | int | None]


class RunConsole:
    """Prints nothing; subclasses override what they print."""

    def start(self, recipe: Recipe, total_steps: int, first_step: int) -> None:
        """`first_step` is 0, or the first step of a resumed run."""

    def phase(self, name: str) -> None:
        """A phase starts, or continues after a nested one."""

    def step(self, row: Numbers) -> None:
        """`row` are the metrics of a step that is done."""

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
    if faults := row.get("environment_faults"):
        numbers.append(("environment_faults", f"{faults:g}"))
    if "grad_norm" in row:
        numbers.append(("grad", format_number(row["grad_norm"], trim=False)))
    return numbers


class PlainConsole(RunConsole):
    """One line per step, for files and pipes."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._progress = Progress(0, 0, clock)

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
        print(text, file=self._stream, flush=True)


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
        self._live.start(refresh=True)

    def phase(self, name: str) -> None:
        self._phase, self._phase_start = name, self._clock()
        if self._live.is_started:
            self._live.refresh()

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
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        progress = self._progress
        status = Text.assemble(
            (f"step {min(progress.done + 1, progress.total)}/{progress.total}", "bold"),
            "  ",
            (self._phase, "cyan"),
            (f" {format_duration(self._clock() - self._phase_start)}", "dim"),
        )
        rates = [] if self._speed is None else [f"{format_number(self._speed)} tok/s"]
        rates.append(f"{format_duration(progress.elapsed)} elapsed")
        if progress.remaining is not None:
            rates.append(f"ETA {format_duration(progress.remaining)}")
        grid = Table.grid(padding=(0, 2, 0, 0))
        for _ in range(4):
            grid.add_column(no_wrap=True)
        bar = ProgressBar(
            total=max(progress.total, 1),
            completed=progress.done,
            width=24,
            complete_style="cyan",
            finished_style="cyan",
        )
        grid.add_row(self._spinner, status, bar, Text(" · ".join(rates), style="dim"))
        return grid


def format_headline(recipe: Recipe, total_steps: int, first_step: int) -> str:
    steps = f"steps {first_step + 1} to {total_steps}" if first_step else f"{total_steps} steps"
    return f"{summarize_recipe(recipe)} · {steps}"


def make_console(stream: TextIO) -> RunConsole:
    """Live on a terminal with cursor control, plain lines elsewhere."""
    if not stream.isatty() or os.environ.get("TERM") in ("dumb", "unknown"):
        return PlainConsole(stream)
    from rich.console import Console

    return RichConsole(Console(file=stream))
