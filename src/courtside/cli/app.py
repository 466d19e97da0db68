"""`courtside VERB`: the list of verbs, and how each of them may end.

0: done. 1: the run failed, and the message says what is kept. 2: bad usage or recipe, nothing was
done. 130: interrupted, and what was saved is there.
"""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from courtside import __version__
from courtside.cli.evaluate import evaluate
from courtside.cli.export import export
from courtside.cli.init import init
from courtside.cli.recipes import recipes
from courtside.cli.rescore import rescore
from courtside.cli.schema import schema
from courtside.cli.train import train
from courtside.cli.view import view
from courtside.errors import Interrupted, RunError, UserError


class Verbs(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            say_error(str(error))
            raise typer.Exit(2) from None
        except Interrupted as stopped:
            typer.secho(str(stopped), err=True)
            raise typer.Exit(130) from None
        except RunError as error:
            say_error(str(error))
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            typer.secho("interrupted", err=True)
            raise typer.Exit(130) from None


def say_error(message: str) -> None:
    # Verbatim: the terminal wraps it, and nothing in it is taken for markup.
    color = False if os.environ.get("NO_COLOR") else None
    typer.secho("error: ", fg="red", bold=True, err=True, nl=False, color=color)
    typer.secho(message, err=True, color=color)


app = typer.Typer(
    cls=Verbs,
    help="On-policy distillation of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"courtside {__version__}")
        raise typer.Exit


@app.callback()
def courtside(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


for verb in (train, evaluate, view, rescore, export, recipes, init, schema):
    app.command()(verb)
