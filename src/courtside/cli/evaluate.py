"""`courtside evaluate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from courtside.cli.arguments import Json, Overrides, Step


def evaluate(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE_OR_RUN",
            help="A run's folder: its trained student. A recipe: its student before training.",
        ),
    ],
    overrides: Overrides = None,
    split: Annotated[
        Literal["train", "validation", "test"],
        typer.Option(metavar="SPLIT", help="Which tasks: train, validation or test."),
    ] = "test",
    tasks: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="How many. Unset: the recipe's evaluate.num_tasks."),
    ] = None,
    step: Step = None,
    teacher: Annotated[
        bool, typer.Option("--teacher", help="Measure the teacher with its context too.")
    ] = False,
    json: Json = False,
) -> None:
    """Measure a student on held-out tasks, with 95% intervals."""
    from courtside.errors import UserError
    from courtside.recipe.builtin import RECIPE, find_recipe
    from courtside.recipe.load import load_recipe

    run = Path(target) if (Path(target) / "checkpoints").is_dir() else None
    if run is None and step is not None:
        raise UserError(f"--step {step}: {target} is a recipe and has no checkpoints. Give a run")
    recipe = load_recipe(run / RECIPE if run else find_recipe(target), overrides or ())

    from courtside import api
    from courtside.cli.tables import evaluation_table, print_json, print_table
    from courtside.report.console import make_console
    from courtside.report.folder.parquet import serialize_evaluation

    evaluations = api.evaluate_student(
        recipe,
        run=run,
        step=step,
        split=split,
        num_tasks=tasks,
        teacher=teacher,
        console=make_console(sys.stderr),
    )
    if json:
        print_json([serialize_evaluation(evaluation) for evaluation in evaluations])
    else:
        print_table(evaluation_table(evaluations))
