"""The public functions: train, evaluate, export and re-score. Heavy imports are inside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from courtside.errors import RecipeError, UserError
from courtside.recipe import Recipe
from courtside.recipe.load import load_recipe
from courtside.types import Evaluation, Scored, Split

if TYPE_CHECKING:
    from courtside.artifacts.export import ExportDtype
    from courtside.report.console import RunConsole
    from courtside.report.folder.folder import RunFolder
    from courtside.runtime import Runtime


def train(recipe: Recipe, folder: str | Path, *, console: RunConsole | None = None) -> RunFolder:
    """Train into a run folder, or resume the run in it. Returns the folder, read-only."""
    import torch

    from courtside.assemble import assemble
    from courtside.loop import train_loop
    from courtside.report.console import RunConsole
    from courtside.report.folder.folder import RunFolder
    from courtside.run import Run

    path, console = Path(folder), console or RunConsole()
    _discard_failed_start(path, recipe)
    if note := _check_resumable(path, recipe):
        console.print_line(note)
    with RunFolder.open(path, recipe) as opened:
        parts = assemble(recipe, num_threads=opened.environment().get("threads"))
        opened.record_threads(torch.get_num_threads())
        run = Run(parts, opened, console)
        train_loop(parts, run)
        run.write_report()
    return RunFolder.read(path)


def evaluate_student(
    recipe: Recipe,
    *,
    run: str | Path | None = None,
    step: int | None = None,
    split: Split = "test",
    num_tasks: int | None = None,
    teacher: bool = False,
    console: RunConsole | None = None,
) -> list[Evaluation]:
    """Evaluate the student of a recipe: untrained, or at `step` of `run` (the last checkpoint).

    `teacher`: evaluate the teacher with its context, too.
    """
    from courtside.assemble import assemble

    if recipe.tasks.is_recorded:
        raise UserError(
            f"tasks.kind = {recipe.tasks.kind!r}: nothing answers the student there. Override "
            "tasks.kind and the rest of [tasks] with tasks that can be answered, and set "
            "rollout.student_fraction=1"
        )
    if run is None:
        parts, num_steps = assemble(recipe), 0
    else:
        parts, num_steps = _restore_run(recipe, run, _find_checkpoint(run, step))
    if teacher and (recipe.teacher is None or not parts.evaluator.teacher_can_answer()):
        raise UserError("--teacher: this recipe has no teacher that can answer before the student")
    evaluations = []
    for policy in ("student", "teacher") if teacher else ("student",):
        if console is not None:
            console.print_line(f"evaluating the {policy}")
        evaluations.append(
            parts.evaluator.evaluate(
                split, step=num_steps, policy=policy, num_tasks=num_tasks
            ).evaluation
        )
    return evaluations


def export(
    run: str | Path,
    to: str | Path,
    *,
    step: int | None = None,
    adapter: bool = False,
    dtype: ExportDtype = "float32",
    push: str | None = None,
) -> Path:
    """Write a checkpoint as a model folder for `vllm serve` or `from_pretrained`, with a card.

    `adapter`: only the LoRA adapter, not the merged weights. `dtype`: of the merged weights.
    `push`: a repository of the hub, to upload the folder to.
    """
    from courtside.artifacts.export import refuse_adapter, write_export
    from courtside.artifacts.hub import open_hub, push_folder
    from courtside.report.folder.folder import RunFolder

    folder, to = RunFolder.read(run), Path(to)
    config = folder.recipe().student
    if adapter:
        refuse_adapter(config, dtype=dtype)
    hub = None if push is None else open_hub(push, config if adapter else None)
    write_export(folder, _find_checkpoint(run, step), to, adapter=adapter, dtype=dtype)
    if push is not None:
        push_folder(hub, to, push)
    return to


def serving_command(run: str | Path, exported: str | Path) -> str | None:
    """The command that serves an export of a run with vLLM; None: vLLM cannot serve it."""
    from courtside.artifacts.serving import exact_base, vllm_command
    from courtside.report.folder.folder import RunFolder

    model = RunFolder.read(run).recipe().student.model
    return vllm_command(Path(exported), exact_base(model), str(exported))


def rescore(
    run: str | Path,
    overrides: Sequence[str] = (),
    *,
    steps: Sequence[int] | None = None,
    console: RunConsole | None = None,
) -> list[dict[str, float | int | None]]:
    """Losses and metrics of stored trajectories with another teacher, context or loss.

    `overrides` change the run's recipe; `steps`: which stored steps (all). The student is that of
    the last checkpoint, and nothing is trained. Returns a row for each step.
    """
    from courtside.report.folder.folder import RunFolder
    from courtside.training import checkpoints
    from courtside.training.loss_terms import make_loss_terms
    from courtside.training.metrics import MetricAccumulator

    folder = RunFolder.read(run)
    stored = folder.trajectory_steps()
    missing = sorted(set(steps or ()) - set(stored))
    if missing or not stored:
        raise UserError(f"{run}: no trajectories of steps {missing}; there are {stored}")
    recipe = load_recipe(folder.path / "recipe.toml", overrides)
    parts, _ = _restore_run(recipe, run, checkpoints.latest(folder.checkpoints))
    rows: list[dict[str, float | int | None]] = []
    for step in steps or stored:
        if console:
            console.print_line(f"scoring step {step}")
        trajectories = [stored.trajectory for stored in folder.trajectories(step)]
        reading = parts.reader(trajectories)
        scored: list[Scored] = parts.teacher(trajectories, reading.hints)
        metrics = MetricAccumulator()
        terms = make_loss_terms(recipe.losses, recipe.loss_names(), scored)
        parts.student.accumulate(step, scored, terms, metrics)
        parts.student.optimizer.zero_grad(set_to_none=True)
        rows.append(
            {
                "step": step,
                "trajectories": len(scored),
                "without_teacher": sum(not s.has_target for s in scored),
                **{f"loss/{name}": value for name, value in metrics.losses.items()},
                **metrics.means(),
            }
        )
    return rows


def _find_checkpoint(run: str | Path, step: int | None) -> Path:
    from courtside.report.folder.folder import RunFolder
    from courtside.training import checkpoints

    folder = RunFolder.read(run).checkpoints
    path = checkpoints.at(folder, step) if step is not None else checkpoints.latest(folder)
    if path is None:
        raise UserError(
            f"{run}: has no checkpoint. None was saved yet, or {folder} was deleted: train it with "
            "the same command"
        )
    return path


def _restore_run(recipe: Recipe, run: str | Path, checkpoint: Path | None) -> tuple[Runtime, int]:
    """The assembled recipe with a checkpoint's weights, and the checkpoint's number of steps."""
    from courtside.assemble import assemble
    from courtside.report.folder.folder import RunFolder
    from courtside.run import model_tensors, restore
    from courtside.training import checkpoints

    trained = RunFolder.read(run).recipe().student
    for field in ("model", "adapter", "lora", "keep_layers"):
        if getattr(recipe.student, field) != getattr(trained, field):
            raise UserError(
                f"student.{field}: {run} trained another student. Override other sections only"
            )
    saved = checkpoints.load(checkpoint) if checkpoint else None
    parts = assemble(recipe)
    if saved is None:
        return parts, 0
    if not model_tensors(parts).keys() <= saved.tensors.keys():
        raise UserError(
            f"teacher.weights = 'ema': a moving average exists only in a run that trained with it, "
            f"and {run} has none of that name. Use weights = 'frozen' or 'live'"
        )
    restore(parts, saved)
    return parts, saved.num_steps


def _check_resumable(path: Path, recipe: Recipe) -> str | None:
    """Refuse a run that lost its checkpoints, or did more steps; a note on one to extend."""
    from courtside.report.folder.folder import RunFolder
    from courtside.report.folder.locking import RECIPE
    from courtside.training import checkpoints

    if not (path / RECIPE).is_file():
        return None
    folder = RunFolder.read(path)
    old, latest = folder.recipe(), checkpoints.latest(folder.checkpoints)
    num_steps = 0 if latest is None else checkpoints.num_steps_of(latest)
    if latest is None:
        num_recorded = len(folder.metrics())
        is_finished = any(e.step == old.train.steps for e in folder.evaluations())
        if num_recorded > old.run.checkpoint_every or is_finished:
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
    from courtside.report.folder import toml
    from courtside.report.folder.files import replace_file
    from courtside.report.folder.folder import RunFolder
    from courtside.report.folder.locking import (
        RECIPE,
        acquire_lock,
        dump_recipe,
        refuse_other_recipe,
    )
    from courtside.training import checkpoints

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
