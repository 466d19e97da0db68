"""Processes that train one run after the other, so that imports and CUDA's start are paid once.

A worker does what `courtside train` does, with each run's output in its own log. A run that fails
ends its worker, traceback and all: another one takes over, with a clean GPU context.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from study_results import outcome

NUM_LAST_LINES = 3
"""Of a failed run's log, told where it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    name: str
    recipe: Path
    overrides: tuple[str, ...]
    folder: Path
    """The folder of the study's runs: a run has the job's name, next to its log."""
    export: Path | None = None
    """Where the trained model goes; such a job is not measured."""
    keep: bool = True
    """Whether its checkpoints stay."""

    @property
    def run(self) -> Path:
        return self.folder / self.name

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def outcome(self) -> Path:
        return self.folder / "outcomes" / f"{self.name}.json"

    def identity(self) -> str:
        """What decides its numbers: the recipe as it is written, overrides included."""
        from courtside.recipe.load import load_recipe

        recipe = load_recipe(self.recipe, self.overrides)
        return recipe.model_dump_json(exclude_unset=True, exclude={"run"})


def run_all(
    next_job: Callable[[set[str]], Job | None],
    *,
    num_workers: int,
    done: Callable[[Job, str | None], None],
) -> None:
    """Ask `next_job` (given the names under way) for work until it has none and none is under way.

    `done` is told each job that ended, with the reason if it failed; more jobs may be known then.
    """
    context = multiprocessing.get_context("spawn")
    idle: list[tuple[Any, Connection]] = []
    busy: dict[Connection, tuple[Any, Job]] = {}
    while True:
        while len(busy) < num_workers:
            job = next_job({job.name for _, job in busy.values()})
            if job is None:
                break
            process, pipe = idle.pop() if idle else _started(context)
            pipe.send(job)
            busy[pipe] = process, job
        if not busy:
            break
        for pipe in _first_ended(busy):
            process, job = busy.pop(pipe)
            try:
                pipe.recv()
            except EOFError:
                process.join()
                done(job, _reason(job, process.exitcode))
                continue
            idle.append((process, pipe))
            done(job, None)
    for process, pipe in idle:
        pipe.close()
        process.join()


def _first_ended(busy: dict[Connection, tuple[Any, Job]]) -> list[Any]:
    try:
        return wait(list(busy))
    except KeyboardInterrupt:
        for process, _ in busy.values():
            process.join()  # they got it, too, and save what they have
        raise


def _started(context: Any) -> tuple[Any, Connection]:
    parent_end, child_end = context.Pipe()
    process = context.Process(target=work, args=(child_end,), daemon=True)
    process.start()
    child_end.close()  # or its end would not be seen
    return process, parent_end


def _reason(job: Job, code: int | None) -> str:
    last = job.log.read_text(errors="replace").strip().splitlines() if job.log.exists() else []
    return f"ended with {code}: " + " | ".join(last[-NUM_LAST_LINES:])


def work(jobs: Connection) -> None:
    while True:
        try:
            job = jobs.recv()
        except EOFError:
            return
        _log_into(job.log)
        do(job)
        jobs.send(job.name)


def do(job: Job) -> None:
    """Train, measure and write the outcome; the run is finished when that file is there."""
    from courtside.api import export, train
    from courtside.recipe.load import load_recipe
    from courtside.report.console import PlainConsole
    from courtside.report.folder.files import replace_file

    began = time.monotonic()
    if job.run.exists() and not any((job.run / "checkpoints").glob("step-*")):
        shutil.rmtree(job.run)  # there is nothing to go on from, and its costs would count twice
    train(load_recipe(job.recipe, job.overrides), job.run, console=PlainConsole(sys.stdout))
    _free_memory()
    result: dict[str, Any] = {}
    if job.export is None:
        result = outcome(job.run)
    elif not job.export.exists():
        # Renamed when it is whole: a folder that is there counts as made.
        unfinished = job.export.with_name(f".{job.export.name}-unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        export(job.run, unfinished).rename(job.export)
    result |= {"recipe": job.identity(), "wall_seconds": round(time.monotonic() - began, 1)}
    job.outcome.parent.mkdir(exist_ok=True)
    replace_file(job.outcome, (json.dumps(result) + "\n").encode())
    if not job.keep:
        shutil.rmtree(job.run / "checkpoints", ignore_errors=True)
    _free_memory()


def _free_memory() -> None:
    import torch

    gc.collect()  # models and graphs hold on to each other in circles
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _log_into(path: Path) -> None:
    """Redirects all output of the process, that of libraries included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with path.open("w") as log:
        for number in (1, 2):
            os.dup2(log.fileno(), number)


def write_failure(job: Job, reason: str) -> None:
    """Kept, so that a summary knows what is missing; another start of the study tries again."""
    job.outcome.parent.mkdir(parents=True, exist_ok=True)
    job.outcome.write_text(json.dumps({"recipe": job.identity(), "failed": reason}) + "\n")
