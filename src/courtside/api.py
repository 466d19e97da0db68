"""The public functions: train, evaluate, report, export and re-score. Heavy imports are inside.

Progress is printed by default, as the command line does; `quiet` sends it to `logging` instead.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from courtside.errors import ModelError, UserError
from courtside.recipe import Recipe
from courtside.recipe.load import RECIPE_PATH, load_recipe, require_path
from courtside.sanitize import truncate
from courtside.types import Evaluation, Scored, Split

if TYPE_CHECKING:
    from courtside.artifacts.corrections import CorrectionFormat, ExportedCorrections
    from courtside.artifacts.export import ExportDtype
    from courtside.assemble.preview import Preview
    from courtside.recipe.pipeline import Pipeline
    from courtside.report.console import RunConsole
    from courtside.report.folder.folder import RunFolder
    from courtside.runtime import Runtime


@contextmanager
def _keep_output() -> Iterator[None]:
    """User code may put something else in place of the standard streams and leave it there, as
    `redirect_stdout` in two threads does."""
    with redirect_stdout(sys.stdout), redirect_stderr(sys.stderr):
        yield


@_keep_output()
def train(
    recipe: Recipe | Pipeline | str | Path,
    folder: str | Path | None = None,
    *,
    console: RunConsole | None = None,
    quiet: bool = False,
) -> RunFolder:
    """Train into a run folder, or resume the run in it. Returns the folder, read-only.

    `recipe`: also a TOML file or the name of a built-in recipe, whose folder is runs/NAME by
    default. `quiet`: print nothing; the lines go to the logger `courtside`. `console`: print there.

    A pipeline (a TOML file with [[stages]], or `load_pipeline`'s) runs its stages one after the
    other, each into `stages/01-NAME` of the folder, and the last stage's run folder is returned.

    In processes that torchrun started, all of them call it, and train one student together.
    """
    from courtside.pipeline.runner import run_pipeline
    from courtside.ranks import connect
    from courtside.recipe.builtin import find_recipe
    from courtside.recipe.pipeline import Pipeline, is_pipeline, load_pipeline
    from courtside.report.console import RunConsole, choose_console
    from courtside.train_run import train_run

    if not isinstance(recipe, Pipeline):
        _check_recipe(recipe, "train")
    if folder is not None:
        folder = require_path(folder, "train: folder", "the path of the run folder as str or Path")
    console = choose_console(console, quiet=quiet)
    path = _default_folder(recipe) if folder is None else folder
    if isinstance(recipe, str | Path) and is_pipeline(find_recipe(str(recipe))):
        recipe = load_pipeline(recipe)
    if not isinstance(recipe, Pipeline):
        recipe = _load(recipe)
    recipes = [s.recipe for s in recipe.stages] if isinstance(recipe, Pipeline) else [recipe]
    timeout = timedelta(minutes=max(r.sharding.timeout_minutes for r in recipes))
    ranks = connect(device=recipes[0].student.device, timeout=timeout)
    console = console if ranks.is_leader else RunConsole()
    if isinstance(recipe, Pipeline):
        return run_pipeline(recipe, path, console, ranks=ranks)
    return train_run(recipe, path, console, ranks=ranks)


def write_report(run: str | Path) -> Path:
    """Write `report.html` again from the folder of a run or pipeline, and return its path.

    Damaged parts of the folder are named on the page. Where the student's tokenizer cannot be
    loaded, tokens are not colored, and a warning is logged.
    """
    from courtside.evaluate.comparisons import compare_evaluations
    from courtside.report.folder.folder import RunFolder
    from courtside.report.folder.pipeline_folder import PipelineFolder, is_pipeline_folder
    from courtside.report.page.page import write_report

    _check_run(run, "write_report")
    if is_pipeline_folder(run):
        from courtside.pipeline.reporting import write_pipeline_report

        return write_pipeline_report(PipelineFolder.read(Path(run)))
    folder = RunFolder.read(run)
    decode = _make_decode(folder.recipe())
    return write_report(folder, differences=compare_evaluations(folder), decode=decode)


@_keep_output()
def show(recipe: Recipe | str | Path) -> Preview:
    """What a recipe would train on, as tokens: no weights are loaded and nothing is trained.

    `recipe`: also a TOML file, or the name of a built-in recipe.
    """
    from courtside.assemble.preview import make_preview

    _check_recipe(recipe, "show")
    return make_preview(_load(recipe))


@_keep_output()
def evaluate_student(
    recipe: Recipe | str | Path | None = None,
    *,
    run: str | Path | None = None,
    step: int | None = None,
    split: Split = "test",
    num_tasks: int | None = None,
    teacher: bool = False,
    console: RunConsole | None = None,
    quiet: bool = False,
) -> list[Evaluation]:
    """Evaluate the student of a recipe: untrained, or at `step` of `run` (the last checkpoint).

    Where nothing answers the student in its tasks (documents), it is evaluated on the suites.
    `recipe`: unset, the run's own; also a TOML file or a built-in recipe's name. `teacher`:
    evaluate the teacher with its context, too. What is measured of a run is stored in it
    (`RunFolder.further_evaluations`). `console`, `quiet`: as in `train`.
    """
    from courtside.report.console import choose_console
    from courtside.report.folder.folder import RunFolder

    if split not in get_args(Split):
        raise UserError(f"evaluate_student: split = {split!r}; use one of {list(get_args(Split))}")
    _check_number(num_tasks, "evaluate_student: num_tasks", at_least=1)
    _check_number(step, "evaluate_student: step", at_least=0)
    if recipe is not None:
        _check_recipe(recipe, "evaluate_student")
    if run is not None:
        _check_run(run, "evaluate_student")
    console = choose_console(console, quiet=quiet)
    if recipe is not None:
        recipe = _load(recipe)
    elif run is not None:
        recipe = RunFolder.read(run).recipe()
    else:
        raise UserError("evaluate_student: give a recipe, or run= for the student of a run")
    if recipe.tasks.is_recorded and not recipe.evaluate.suites:
        raise UserError(
            f"tasks.kind = {recipe.tasks.kind!r}: nothing answers the student there. Override "
            "tasks.kind and the rest of [tasks] with tasks that can be answered, and set "
            "rollout.student_fraction=1; or add a suite with a kind of its own, as in "
            "evaluate.suites.sums.kind=arithmetic"
        )
    try:
        return _evaluate(
            recipe, run, step, split, num_tasks=num_tasks, teacher=teacher, console=console
        )
    finally:
        console.finish()


def _evaluate(
    recipe: Recipe,
    run: str | Path | None,
    step: int | None,
    split: Split,
    *,
    num_tasks: int | None,
    teacher: bool,
    console: RunConsole,
) -> list[Evaluation]:
    from courtside.assemble import assemble
    from courtside.report.folder.folder import RunFolder

    console.phase("loading models")
    if run is None:
        parts, num_steps, store = assemble(recipe), 0, None
    else:
        parts, num_steps = _restore_run(recipe, run, _find_checkpoint(run, step))
        store = RunFolder.read(run).open_further_evaluations(recipe)
        if store is None:
            console.print_line(f"{run}: not writable, so the results are not stored in it")
    if teacher and (recipe.teacher is None or not parts.evaluator.teacher_can_answer()):
        raise UserError("--teacher: this recipe has no teacher that can answer before the student")
    console.watch(parts.progress)
    evaluations = []
    policies = ["student", *(["teacher"] if teacher else [])]
    if recipe.tasks.is_recorded:  # nothing answers in its own tasks
        policies = [f"student:{suite}" for suite in recipe.evaluate.suites]
    for policy in policies:
        console.print_line(f"evaluating the {policy}")
        console.phase("evaluate")
        evaluation = parts.evaluator.evaluate(
            split, step=num_steps, policy=policy, num_tasks=num_tasks
        ).evaluation
        if store is not None:
            store(evaluation)
        evaluations.append(evaluation)
    return evaluations


def export(
    run: str | Path,
    to: str | Path,
    *,
    step: int | None = None,
    adapter: bool = False,
    base: bool = False,
    dtype: ExportDtype = "float32",
    push: str | None = None,
) -> Path:
    """Write a checkpoint as a model folder for `vllm serve` or `from_pretrained`, with a card.

    `adapter`: only the LoRA adapter, not the merged weights. `base`: only the frozen base of a run
    that held it in 4 bits, dequantized, for its adapters. `dtype`: of the merged weights or base.
    `push`: a repository of the hub, to upload the folder to.
    """
    from courtside.artifacts.export import (
        ExportDtype,
        refuse_adapter,
        refuse_base,
        write_base,
        write_export,
    )
    from courtside.artifacts.hub import open_hub, push_folder
    from courtside.report.folder.folder import RunFolder

    _check_run(run, "export")
    to = require_path(to, "export: to", "the path of the folder to write as str or Path")
    _check_number(step, "export: step", at_least=0)
    if dtype not in get_args(ExportDtype):
        raise UserError(f"export: dtype = {dtype!r}; use one of {list(get_args(ExportDtype))}")
    if push is not None and not isinstance(push, str):
        raise UserError(f"export: push = {push!r}; give a repository of the hub, as 'owner/name'")
    folder = RunFolder.read(run)
    config = folder.recipe().student
    if base and (adapter or step is not None):
        other = "--adapter" if adapter else "--step"
        raise UserError(
            f"--base: no step changed the base, and it has no adapter. Leave {other} out"
        )
    if base:
        refuse_base(config)
    if adapter:
        refuse_adapter(config, dtype=dtype)
    hub = None if push is None else open_hub(push, config if adapter else None)
    if base:
        write_base(folder, to, dtype=dtype)
    else:
        write_export(folder, _find_checkpoint(run, step), to, adapter=adapter, dtype=dtype)
    if push is not None:
        push_folder(hub, to, push)
    return to


def export_corrections(
    run: str | Path, to: str | Path, *, format: CorrectionFormat = "pairs"
) -> ExportedCorrections:
    """Write a run's corrected drafts as JSON lines that `datasets` and TRL read.

    `format`: "pairs" has prompt, chosen and rejected; "completions" prompt and completion, of
    repairs and of the better ones of pairs.
    """
    from courtside.artifacts.corrections import CorrectionFormat, write_corrections
    from courtside.report.folder.folder import RunFolder

    _check_run(run, "export_corrections")
    to = require_path(to, "export_corrections: to", "the path of the file to write as str or Path")
    if format not in (formats := get_args(CorrectionFormat)):
        raise UserError(f"export_corrections: format = {format!r}; use one of {list(formats)}")
    return write_corrections(RunFolder.read(run), to, format=format)


def serving_command(
    run: str | Path, exported: str | Path, *, base: str | Path | None = None
) -> str | None:
    """The command that serves an export of a run with vLLM; None: vLLM cannot serve it. `base`: of
    an adapter, a folder in place of the run's `student.model`."""
    from courtside.artifacts.serving import exact_base, vllm_command
    from courtside.report.folder.folder import RunFolder

    _check_run(run, "serving_command")
    exported = require_path(exported, "serving_command: exported", "the path of an export")
    student = RunFolder.read(run).recipe().student
    return vllm_command(
        Path(exported),
        exact_base(student.model) if base is None else str(base),
        str(exported),
        context_length=student.context_length,
    )


@_keep_output()
def rescore(
    run: str | Path,
    overrides: Sequence[str] = (),
    *,
    steps: Sequence[int] | None = None,
    console: RunConsole | None = None,
    quiet: bool = False,
) -> list[dict[str, float | int | None]]:
    """Losses and metrics of stored trajectories with another teacher, context or loss.

    `overrides` change the run's recipe; `steps`: which stored steps (all). The student is that of
    the last checkpoint, and nothing is trained. Returns a row for each step. `console`, `quiet`: as
    in `train`.
    """
    from courtside.report.console import choose_console
    from courtside.report.folder.folder import RunFolder
    from courtside.training import checkpoints
    from courtside.training.metrics import MetricAccumulator, reward_metrics

    _check_run(run, "rescore")
    if steps is not None and not isinstance(steps, Sequence):
        raise UserError(f"rescore: steps = {steps!r}; give a list of numbers, or None for all")
    for step in steps or ():
        _check_number(step, "rescore: steps", at_least=0)
    console = choose_console(console, quiet=quiet)
    folder = RunFolder.read(run)
    stored = folder.trajectory_steps()
    missing = sorted(set(steps or ()) - set(stored))
    if missing or not stored:
        raise UserError(f"{run}: no trajectories of steps {missing}; there are {stored}")
    recipe = load_recipe(folder.path / "recipe.toml", overrides)
    _refuse_unused_changes(folder.recipe(), recipe)
    parts, _ = _restore_run(recipe, run, checkpoints.latest(folder.checkpoints))
    rows: list[dict[str, float | int | None]] = []
    for step in steps or stored:
        console.print_line(f"scoring step {step}")
        trajectories = [stored.trajectory for stored in folder.trajectories(step)]
        reading = parts.reader(trajectories)
        scored: list[Scored] = parts.teacher.score(trajectories, reading.hints)
        metrics = MetricAccumulator()
        terms = parts.student.make_terms(scored)
        parts.student.accumulate(step, scored, terms, metrics)
        parts.student.optimizer.zero_grad(set_to_none=True)
        rows.append(
            {
                "step": step,
                "trajectories": len(scored),
                "without_teacher": sum(not s.has_target for s in scored),
                **{f"loss/{name}": value for name, value in metrics.losses.items()},
                **metrics.means(),
                **reward_metrics(terms),
            }
        )
    return rows


UNUSED_IN_RESCORING = (
    r"(evaluate|run|seed|tasks|train\.(betas|learning_rate|lr_schedule|max_\w+|prompts_per_step|steps"
    r"|warmup_steps|weight_decay))[.:\[]"
)
"""What decides which trajectories there are, and updates."""


def _refuse_unused_changes(old: Recipe, new: Recipe) -> None:
    from courtside.report.folder.locking import dump_recipe, find_differences

    for line in find_differences(dump_recipe(old), dump_recipe(new)):
        if re.match(UNUSED_IN_RESCORING, line):
            raise UserError(
                f"{line}: changes nothing, because rescoring takes the trajectories as they are "
                "stored and updates no weight. Change losses, teacher, reader or hints"
            )


# ── arguments ────────────────────────────────────────────────────────────────────────────────────


def _check_recipe(recipe: object, call: str) -> None:
    if not isinstance(recipe, Recipe):
        require_path(recipe, f"{call}: recipe", f"a Recipe, {RECIPE_PATH}")


def _check_run(run: object, call: str) -> None:
    require_path(run, f"{call}: run", "the path of a run folder as str or Path")


def _check_number(value: object, where: str, *, at_least: int) -> None:
    """None is accepted: the argument was not given."""
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise UserError(f"{where} = {truncate(repr(value), 60)}; use {at_least} or more, an int")


def _load(recipe: Recipe | str | Path) -> Recipe:
    return recipe if isinstance(recipe, Recipe) else load_recipe(recipe)


def _default_folder(recipe: Recipe | Pipeline | str | Path) -> Path:
    from courtside.recipe.builtin import default_run_folder, find_recipe

    if not isinstance(recipe, str | Path):
        raise UserError(
            f"train: a {type(recipe).__name__} has no name. Give the run folder, as in "
            "train(recipe, DIR)"
        )
    return default_run_folder(find_recipe(str(recipe)))


def _make_decode(recipe: Recipe) -> Callable[[Sequence[int]], list[str]] | None:
    """Texts of single tokens; None: the tokenizer is not there any more."""
    from courtside.engines.loading import load_tokenizer

    config = recipe.student
    try:
        tokenizer = load_tokenizer(config.model, trust_remote_code=config.trust_remote_code)
    except ModelError as error:
        logging.getLogger("courtside").warning("the report's tokens are not colored: %s", error)
        return None
    return lambda ids: [str(tokenizer.decode([token])) for token in ids]


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
    from courtside.run_state import model_tensors, restore
    from courtside.training import checkpoints

    trained = RunFolder.read(run).recipe().student
    for field in ("model", "adapter", "average_with", "lora", "keep_layers"):
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
