"""One run from a recipe to its report: trained into a folder, or resumed there."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch

from courtside.assemble import assemble
from courtside.errors import RecipeError, UserError
from courtside.follower import Follower
from courtside.loop import train_loop
from courtside.ranks import ALONE, Ranks
from courtside.recipe import Recipe
from courtside.recipe.run import CHECKPOINT_STEPS
from courtside.report.console import RunConsole
from courtside.report.folder import toml
from courtside.report.folder.files import replace_file
from courtside.report.folder.folder import RunFolder
from courtside.report.folder.locking import (
    RECIPE,
    acquire_lock,
    dump_recipe,
    refuse_other_recipe,
)
from courtside.report.observers import open_observers
from courtside.run import Run
from courtside.training import checkpoints


def train_run(
    recipe: Recipe,
    path: Path,
    console: RunConsole,
    *,
    num_threads: int | None = None,
    ranks: Ranks = ALONE,
) -> RunFolder:
    """Train into the folder, or resume the run in it. Returns the folder, read-only.

    `num_threads`: those of a new run, as an earlier stage had; a resumed run takes its own.
    `ranks`: the processes that train it together; all of them call this.
    """
    with ExitStack() as stack:
        # A caller may have switched them off around this call.
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        run: Run | Follower
        with ranks.share_failures():
            observers = open_observers(recipe.run, console, path, rank=ranks.rank)
            console = stack.enter_context(observers)
            if ranks.is_leader:
                folder = stack.enter_context(_open_folder(recipe, path, console))
                run = _make_run(folder, recipe, console, num_threads, ranks)
            else:
                threads = ranks.exchange(None)[0]
                run = Follower(assemble(recipe, trains=True, num_threads=threads, ranks=ranks))
        train_loop(run.parts, run)
        if isinstance(run, Run):
            run.write_report()
    return RunFolder.read(path)


def _open_folder(recipe: Recipe, path: Path, console: RunConsole) -> RunFolder:
    _discard_failed_start(path, recipe)
    if note := _check_resumable(path, recipe):
        console.print_line(note)
    folder = RunFolder.open(path, recipe)
    if folder.was_killed:
        console.print_line(_describe_kill(path, recipe))
    return folder


def _describe_kill(path: Path, recipe: Recipe) -> str:
    note = (
        f"{path}: the last process ended without a word: killed (also for its memory), a crash, or "
        "os._exit. This one goes on from what was saved"
    )
    if recipe.tasks.kind == "environment" and not recipe.tasks.workers:
        note += (
            ". If the environment did it, tasks.workers = 1 makes it cost an episode, not the run"
        )
    return note


def _make_run(
    folder: RunFolder, recipe: Recipe, console: RunConsole, num_threads: int | None, ranks: Ranks
) -> Run:
    try:
        console.phase("loading models")
        threads = folder.recorded_threads() or num_threads
        ranks.exchange(threads)
        parts = assemble(recipe, trains=True, num_threads=threads, ranks=ranks)
        folder.record_threads(torch.get_num_threads())
        return Run(parts, folder, console)
    except BaseException:
        console.finish()  # else the loop does
        raise


def _check_resumable(path: Path, recipe: Recipe) -> str | None:
    """Refuse a run that lost its checkpoints, or did more steps; a note on one to extend."""
    if not (path / RECIPE).is_file():
        return None
    folder = RunFolder.read(path)
    # What the report will need is read now: a damaged file is refused before models are loaded.
    folder.metrics(), folder.evaluations(), folder.alarms(), folder.read_costs()
    folder.recorded_threads()
    old, latest = folder.recipe(), checkpoints.latest(folder.checkpoints)
    num_steps = 0 if latest is None else checkpoints.num_steps_of(latest)
    if latest is None:
        num_recorded = len(folder.metrics())
        is_finished = any(e.step > 0 and e.split == "test" for e in folder.evaluations())
        if num_recorded > (old.run.checkpoint_every or CHECKPOINT_STEPS) or is_finished:
            raise UserError(
                f"{path}: has metrics of {num_recorded} steps and no checkpoint; "
                f"{folder.checkpoints} was deleted. Put it back to go on, or train from the "
                "beginning in another folder"
            )
    if recipe.train.steps < num_steps:
        raise RecipeError(
            f"train.steps = {recipe.train.steps}: {path} has done {num_steps} steps already. Give "
            "at least as many, or another folder"
        )
    if recipe.train.steps == old.train.steps or not num_steps:
        return None
    note = f"train.steps: {old.train.steps} → {recipe.train.steps}"
    if recipe.train.lr_schedule != "constant":
        note += (
            f"; from here on the {recipe.train.lr_schedule} schedule reaches zero at step "
            f"{recipe.train.steps}, so the learning rate jumps"
        )
    return note


def _discard_failed_start(path: Path, recipe: Recipe) -> None:
    """A start that trained nothing must not block its folder for a corrected recipe."""
    if not (path / RECIPE).is_file():
        return
    with RunFolder(path, acquire_lock(path)) as folder:
        if folder.metrics() or checkpoints.latest(folder.checkpoints) is not None:
            return
        try:
            refuse_other_recipe(path, folder.recipe(), recipe)
        except RecipeError:
            folder.rewind(-1)  # also evaluations before the first step
            folder.write_costs({})
            # Last, and replaced: a folder with files and without a recipe is refused.
            replace_file(path / RECIPE, toml.dumps(dump_recipe(recipe)).encode())


def forget_start(path: Path) -> None:
    """Forget what a start measured that trained nothing: its evaluations are of other weights."""
    with RunFolder(path, acquire_lock(path)) as folder:
        folder.rewind(-1)
        folder.write_costs({})
