"""`courtside train`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from courtside.cli.arguments import Overrides


def train(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A TOML file, or a built-in recipe's name.")
    ],
    overrides: Overrides = None,
    run: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            show_default=False,
            help="Where everything is written. Unset: runs/NAME-OF-THE-RECIPE.",
        ),
    ] = None,
) -> None:
    """Train a student. The same command goes on with a run that was interrupted."""
    from courtside.recipe.builtin import find_recipe, recipe_name
    from courtside.recipe.load import load_recipe

    file = find_recipe(recipe)
    tree = load_recipe(file, overrides or ())
    folder = run or Path("runs") / recipe_name(file)

    from courtside import api
    from courtside.report.console import make_console

    done = api.train(tree, folder, console=make_console(sys.stdout))
    typer.echo(f"\nReport: {done.path / 'report.html'} (open it in a browser)")
    name = shlex.quote(str(done.path))
    typer.echo(f"Trajectories, and hints of your own: courtside view {name}")
    typer.echo(f"Weights: courtside export {name} FOLDER")
