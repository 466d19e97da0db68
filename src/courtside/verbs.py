"""What a user can ask for, from Python or the command line. Heavy imports happen inside."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from courtside.config import Recipe
from courtside.errors import UserError
from courtside.recipe_file import load_recipe
from courtside.types import Evaluation, Scored, Split

if TYPE_CHECKING:
    from courtside.report.folder import RunFolder
    from courtside.report.screen import Screen


def train(recipe: Recipe, folder: Path | str, *, screen: Screen | None = None) -> RunFolder:
    """Run a recipe in a folder, or go on with the run that is there. Returns the folder, read-only."""
    from courtside.assemble import assemble
    from courtside.loop import train_loop
    from courtside.report.folder import RunFolder
    from courtside.report.screen import SilentScreen
    from courtside.run import Run

    path = Path(folder)
    with RunFolder.open(path, recipe) as opened:
        parts = assemble(recipe)
        run = Run(parts, opened, screen or SilentScreen())
        train_loop(parts, run)
        run.write_report()
    return RunFolder.read(path)


def evaluate_student(
    recipe: Recipe,
    *,
    run: Path | None = None,
    step: int | None = None,
    split: Split = "test",
    num_tasks: int | None = None,
    teacher: bool = False,
    screen: Screen | None = None,
) -> list[Evaluation]:
    """Measure the student of a recipe, untrained or as a checkpoint of `run` has it."""
    from courtside.assemble import assemble
    from courtside.run import restore
    from courtside.student import checkpoints

    parts = assemble(recipe)
    num_steps = 0
    if run is not None:
        saved = checkpoints.load(_checkpoint(run, step))
        restore(parts, saved)
        num_steps = saved.num_steps
    if teacher and (recipe.teacher is None or not parts.teacher_can_answer()):
        raise UserError("--teacher: this recipe has no teacher that can answer before the student")
    who = ["student", "teacher"] if teacher else ["student"]
    for name in who if screen else []:
        assert screen is not None
        screen.say(f"answering as the {name}")
    return [parts.evaluate(split, step=num_steps, who=w, num_tasks=num_tasks) for w in who]


def export(run: Path, to: Path, *, step: int | None = None, adapter: bool = False) -> Path:
    """Write a checkpoint as a model folder, ready for `vllm serve` or `from_pretrained`."""
    from courtside.assemble import assemble
    from courtside.report.folder import RunFolder
    from courtside.run import restore
    from courtside.student import checkpoints

    folder = RunFolder.read(run)
    recipe = folder.recipe()
    if adapter and recipe.student.lora is None:
        raise UserError("--adapter: this run trained all weights and has no adapter. Leave it out")
    if to.exists() and any(to.iterdir()):
        raise UserError(f"{to}: exists and is not empty. Name a new folder")
    saved = checkpoints.load(_checkpoint(run, step))
    parts = assemble(recipe)
    restore(parts, saved)
    weights = parts.student.weights
    model: Any = weights.model
    if adapter:
        model = weights.adapter
    elif weights.adapter is not None:
        # In float32: a merge in bfloat16 would round the adapter away.
        model = weights.adapter.float().merge_and_unload()
    model.save_pretrained(to, safe_serialization=True)
    parts.renderer.tokenizer.save_pretrained(to)
    return to


def rescore(
    run: Path,
    overrides: Sequence[str] = (),
    *,
    steps: Sequence[int] | None = None,
    screen: Screen | None = None,
) -> list[dict[str, float | int | None]]:
    """Stored trajectories under another teacher, context or loss, without rolling out again.

    The student is as the run's last checkpoint has it; no weight is changed.
    """
    from courtside.assemble import assemble
    from courtside.report.folder import RunFolder
    from courtside.run import average_groups, restore
    from courtside.student import checkpoints
    from courtside.student.components import components
    from courtside.student.tally import Tally

    folder = RunFolder.read(run)
    stored = folder.trajectory_steps()
    missing = sorted(set(steps or ()) - set(stored))
    if missing or not stored:
        raise UserError(f"{run}: no trajectories of steps {missing}; there are {stored}")
    recipe = load_recipe(run / "recipe.toml", overrides)
    original = folder.recipe()
    if recipe.student != original.student:
        raise UserError("rescore: the student is the run's; override teacher and losses only")
    parts = assemble(recipe)
    path = checkpoints.latest(folder.checkpoints)
    if path is not None:
        saved = checkpoints.load(path)
        if not average_groups(parts) <= saved.tensors.keys():
            raise UserError("rescore: a moving-average teacher exists only in a run that trained it")
        restore(parts, saved)
    rows: list[dict[str, float | int | None]] = []
    for step in steps or stored:
        if screen:
            screen.say(f"scoring step {step}")
        scored: list[Scored] = parts.teacher([s.trajectory for s in folder.trajectories(step)])
        tally = Tally()
        chosen = components(recipe.losses, recipe.loss_names(), scored)
        parts.student.accumulate(step, scored, chosen, tally)
        parts.student.optimiser.zero_grad(set_to_none=True)
        rows.append(
            {
                "step": step,
                "trajectories": len(scored),
                "without_teacher": sum(s.target is None for s in scored),
                **{f"loss/{name}": value for name, value in tally.values.items()},
                **tally.metrics(),
            }
        )
    return rows


def _checkpoint(run: Path, step: int | None) -> Path:
    from courtside.report.folder import RunFolder
    from courtside.student import checkpoints

    folder = RunFolder.read(run).checkpoints
    path = checkpoints.at(folder, step) if step is not None else checkpoints.latest(folder)
    if path is None:
        raise UserError(f"{run}: has no checkpoint yet")
    return path
