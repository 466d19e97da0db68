"""Events of a run as JSON lines, for machines that collect logs.

One mechanism for all of them: records of `logging`. What the run tells its console, what the
clients of servers log (with the request's id), and, where JSON replaces the console, warnings of
Python and of libraries. A line that cannot be written is dropped; the run goes on.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from courtside.errors import Interrupted, RunError, UserError
from courtside.interrupts import StopSignal
from courtside.recipe import Recipe
from courtside.recipe.run import RunConfig
from courtside.report.console import Numbers, RunConsole
from courtside.report.folder.files import replace_non_finite
from courtside.report.summary import summarize_recipe
from courtside.types import Evaluation

ROOT = logging.getLogger()
LOGGER = logging.getLogger("courtside")
STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonConsole(RunConsole):
    """Logs events; `context` is what every line has."""

    def __init__(self, run: Path, rank: int = 0) -> None:
        self.context: dict[str, Any] = {
            "run": str(run), "rank": rank, "step": None, "phase": None
        }  # fmt: skip

    def start(self, recipe: Recipe, total_steps: int, first_step: int) -> None:
        self.context["step"] = first_step
        self._log("run_started", summarize_recipe(recipe), total_steps=total_steps)

    def phase(self, name: str) -> None:
        self.context["phase"] = name
        self._log("phase_started", name)

    def end_phase(self, name: str) -> None:
        self._log("phase_ended", name)
        self.context["phase"] = None

    def step(self, row: Numbers) -> None:
        number = int(row["step"] or 0)
        self._log("step", f"step {number + 1}", metrics=dict(row))
        self.context["step"] = number + 1  # the one that comes next

    def alarm(self, kind: str, message: str, *, step: int) -> None:
        self._log("alarm", message, logging.WARNING, kind=kind, alarm_step=step)

    def evaluation(self, evaluation: Evaluation, text: str) -> None:
        fields = {"policy": evaluation.policy, "split": evaluation.split}
        self._log("evaluation", text, score=evaluation.mean_score, **fields)

    def print_line(self, text: str) -> None:
        self._log("note", text)

    def _log(self, event: str, text: str, level: int = logging.INFO, /, **fields: Any) -> None:
        LOGGER.log(level, "%s", text, extra={"event": event, **fields})


class JsonLinesHandler(logging.Handler):
    def __init__(self, stream: TextIO, context: Mapping[str, Any]) -> None:
        super().__init__()
        self.stream, self.context = stream, context

    def emit(self, record: logging.LogRecord) -> None:
        # A full disk, a closed pipe, or a message of a library whose arguments do not fit it.
        with suppress(OSError, ValueError, TypeError):
            self.stream.write(self.format(record) + "\n")  # in one call: several threads log
            self.stream.flush()

    def format(self, record: logging.LogRecord) -> str:
        fields = {k: v for k, v in vars(record).items() if k not in STANDARD_FIELDS}
        if record.exc_info:
            fields["traceback"] = logging.Formatter().formatException(record.exc_info)
        tree = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": fields.pop("event", record.name),
            "message": record.getMessage(),
            **self.context,
            **fields,
        }
        return json.dumps(replace_non_finite(tree), default=str)


@contextmanager
def log_events(config: RunConfig, run: Path, rank: int) -> Iterator[RunConsole | None]:
    """The console whose events are logged as the recipe says, while the context is open; None: it
    asks for no log."""
    replaces_console = config.log_format == "json"
    if not replaces_console and config.log_file is None:
        yield None
        return
    console = JsonConsole(run, rank)
    with ExitStack() as stack:
        streams = [sys.stderr] if replaces_console else []
        if config.log_file is not None:
            streams.append(stack.enter_context(_open_log(config.log_file, rank)))
        # Where people read the console, warnings of libraries stay there.
        logger = ROOT if replaces_console else LOGGER
        for stream in streams:
            handler = JsonLinesHandler(stream, console.context)
            logger.addHandler(handler)
            stack.callback(logger.removeHandler, handler)
        level = LOGGER.level
        LOGGER.setLevel(min(level, logging.INFO) if level else logging.INFO)
        stack.callback(LOGGER.setLevel, level)
        if replaces_console:
            logging.captureWarnings(True)
            stack.callback(logging.captureWarnings, False)
        with _log_end(console):
            yield console


@contextmanager
def _log_end(console: JsonConsole) -> Iterator[None]:
    start = time.monotonic()

    def log(level: int, event: str, text: str, **more: Any) -> None:
        fields = {"event": event, "seconds": time.monotonic() - start}
        LOGGER.log(level, "%s", text, extra=fields, **more)

    try:
        yield
    except (Interrupted, StopSignal, KeyboardInterrupt) as stopped:
        log(logging.WARNING, "run_interrupted", str(stopped) or "interrupted")
        raise
    except (UserError, RunError) as error:
        log(logging.ERROR, "run_failed", str(error))
        raise
    except BaseException as error:
        log(logging.ERROR, "run_failed", f"{type(error).__name__}: {error}", exc_info=True)
        raise
    log(logging.INFO, "run_ended", "the run has ended")


def _open_log(path: Path, rank: int) -> TextIO:
    if rank:
        path = path.with_name(f"{path.name}.rank-{rank}")
    try:
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"run.log_file = {str(path)!r}: cannot be written ({error.strerror}). Give a file in a "
            "folder that exists and that you may write to"
        ) from None
