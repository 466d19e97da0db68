"""Processes that train one run after the other, so that imports and CUDA's start are paid once.

A worker does what `courtside train` does, with each run's output in its own log. A run that fails
ends its worker, traceback and all: another one takes over, with a clean GPU context. A run for
which the others left no GPU memory starts again, with fewer beside it. A worker whose parent is
gone saves its run and ends.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from courtside.errors import RunError, UserError
from courtside.experiment.jobs import Job
from courtside.experiment.outcomes import Outcome, measure_run
from courtside.report.folder.files import replace_file

NUM_LAST_LINES = 3
"""Of the log of a run that ended without a word, told where it failed."""
MAX_REASON = 500
"""Characters of an error's message; the log has all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    reason: str
    is_out_of_memory: bool = False
    """Of the GPU, which other runs share."""


def run_all(
    next_job: Callable[[set[str]], Job | None],
    *,
    num_workers: int,
    on_start: Callable[[Job], None],
    on_end: Callable[[Job, str | None], None],
    on_retry: Callable[[Job, int], None],
) -> None:
    """Ask `next_job` (given the names under way) for work until it has none and none is under way.

    `on_end` gets each job that ended, with the reason if it failed; more jobs may be known then.
    `on_retry` gets one that found too little GPU memory beside others, and how many run at a time
    from there on; `next_job` is to give it again. A signal that ends this process ends the workers,
    after they have saved their runs.
    """
    context = multiprocessing.get_context("spawn")
    idle: list[tuple[Any, Connection]] = []
    busy: dict[Connection, tuple[Any, Job]] = {}
    while True:
        while len(busy) < num_workers:
            job = next_job({job.name for _, job in busy.values()})
            if job is None:
                break
            process, pipe = idle.pop() if idle else _start_worker(context)
            on_start(job)
            pipe.send(job)
            busy[pipe] = process, job
        if not busy:
            break
        for pipe in _wait_for_ends(busy):
            process, job = busy.pop(pipe)
            failure = _receive_end(pipe, process, job)
            if failure is None:
                idle.append((process, pipe))
                on_end(job, None)
            elif failure.is_out_of_memory and busy:
                num_workers = len(busy)
                on_retry(job, num_workers)
            else:
                on_end(job, failure.reason)
    for process, pipe in idle:
        pipe.close()
        process.join()


def _wait_for_ends(busy: dict[Connection, tuple[Any, Job]]) -> list[Any]:
    try:
        return wait(list(busy))
    except KeyboardInterrupt:
        # A terminal's Ctrl-C reaches the workers, too, other signals do not.
        for process, _ in busy.values():
            process.terminate()
        for process, _ in busy.values():
            process.join()  # they save what they have
        raise


def _start_worker(context: Any) -> tuple[Any, Connection]:
    parent_end, child_end = context.Pipe()
    process = context.Process(target=serve_jobs, args=(child_end,), daemon=True)
    process.start()
    child_end.close()  # or its end would not be seen
    return process, parent_end


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker is a child process"
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)  # a run in training saves its steps first


def _receive_end(pipe: Any, process: Any, job: Job) -> Failure | None:
    """None: the run went through. A worker whose run failed has ended when this returns."""
    failure: Failure | None
    try:
        failure = pipe.recv()
    except EOFError:
        process.join()
        last = job.log.read_text(errors="replace").strip().splitlines() if job.log.exists() else []
        text = " | ".join(last[-NUM_LAST_LINES:])
        return Failure(reason=f"ended with {process.exitcode}: {text}"[:MAX_REASON])
    if failure is not None:
        process.join()  # its memory is free
    return failure


def describe_error(error: Exception) -> Failure:
    import torch

    is_out_of_memory = False
    cause: BaseException | None = error
    while cause is not None and not is_out_of_memory:
        # Libraries beside torch have errors of their own for it.
        is_cuda = "CUDA" in str(cause) or "cuda" in type(cause).__module__
        is_out_of_memory = isinstance(cause, torch.OutOfMemoryError) or (
            is_cuda and bool(re.search("out of memory|ALLOC_FAILED", str(cause)))
        )
        cause = cause.__cause__ or cause.__context__
    name = "" if isinstance(error, UserError | RunError) else f"{type(error).__name__}: "
    return Failure(reason=f"{name}{error}"[:MAX_REASON], is_out_of_memory=is_out_of_memory)


def serve_jobs(jobs: Connection) -> None:
    """The main function of a worker."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            job = jobs.recv()
        except EOFError:
            return
        _redirect_output(job.log)
        try:
            run_job(job)
        except Exception as error:
            with suppress(OSError):  # the parent may be gone
                jobs.send(describe_error(error))
            raise
        jobs.send(None)


def run_job(job: Job) -> None:
    """Train, measure and write the outcome; the run is finished when that file is there."""
    from courtside.api import export, train
    from courtside.recipe.load import load_recipe
    from courtside.report.console import PlainConsole

    began = time.monotonic()
    if job.run.exists() and not any((job.run / "checkpoints").glob("step-*")):
        shutil.rmtree(job.run)  # there is nothing to go on from, and its costs would count twice
    train(load_recipe(job.recipe, job.overrides), job.run, console=PlainConsole(sys.stdout))
    _free_memory()
    result: dict[str, Any] = {}
    if job.export is None:
        result = measure_run(job.run)
        require_budget(job, result)
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


def require_budget(job: Job, outcome: Outcome) -> None:
    """Refuses a run that ended before its budget was spent: it would be compared with runs that
    spent more."""
    for unit, limit in job.budget.items():
        spent = outcome["spent"][unit]
        if spent is None or spent < limit:
            raise UserError(
                f"budget.{unit} = {limit:g}: the run ended after {outcome['spent']['steps']} steps "
                f"with {spent:g} spent. Raise train.steps, by which it ended"
            )


def _free_memory() -> None:
    import torch

    gc.collect()  # models and graphs hold on to each other in circles
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _redirect_output(path: Path) -> None:
    """Redirects all output of the process, that of libraries included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with path.open("w") as log:
        for number in (1, 2):
            os.dup2(log.fileno(), number)
