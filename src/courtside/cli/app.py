"""The list of commands, and their exit codes.

0: done. 1: the run failed, and the message says what is saved. 2: bad usage or recipe, and nothing
was done; or standard output could not be written, and files of the run are complete. 3: a gate of a
pipeline failed; all stages are saved.
128 + N: stopped by signal N, after saving (130 Ctrl-C, 143 SIGTERM, 129 SIGHUP).
"""

from __future__ import annotations

import errno
import os
from contextlib import nullcontext
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from courtside import __version__
from courtside.cli import commands
from courtside.cli.check_env import check_env
from courtside.cli.comparisons import compare
from courtside.cli.experiments import experiment
from courtside.cli.plan import plan
from courtside.cli.serve import serve
from courtside.errors import GateFailedError, Interrupted, RunError, UserError
from courtside.interrupts import StopSignal
from courtside.ranks import should_report

PATH_ERRORS = (
    errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.EROFS,
)  # fmt: skip
"""Of a path that the user named, or of what the user put into a folder: no bug of ours."""


class CommandGroup(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        signals = nullcontext if ctx.obj is None else ctx.obj
        try:
            with signals():
                return super().invoke(ctx)
        except UserError as error:
            report_error(error)
            raise typer.Exit(2) from None
        except Interrupted as stopped:
            if should_report(stopped):
                typer.secho(str(stopped), err=True)
            raise typer.Exit(128 + stopped.signal_number) from None
        except GateFailedError as error:
            report_error(error)
            raise typer.Exit(3) from None
        except RunError as error:
            report_error(error)
            raise typer.Exit(1) from None
        except OSError as error:
            if error.errno not in PATH_ERRORS or error.filename is None:
                raise
            print_error(f"{str(error.filename)[:100]}: {error.strerror}. Give another path")
            raise typer.Exit(2) from None
        except StopSignal as stopped:
            if should_report(stopped):
                typer.secho(str(stopped), err=True)
            raise typer.Exit(128 + stopped.number) from None
        except KeyboardInterrupt as stopped:
            if should_report(stopped):
                typer.secho("interrupted", err=True)
            raise typer.Exit(130) from None


def report_error(error: Exception) -> None:
    """Once, however many processes raise it."""
    if should_report(error):
        print_error(str(error))


def print_error(message: str) -> None:
    # Verbatim: the terminal wraps it, and nothing in it is parsed as markup.
    color = False if os.environ.get("NO_COLOR") else None
    typer.secho("error: ", fg="red", bold=True, err=True, nl=False, color=color)
    typer.secho(message, err=True, color=color)


app = typer.Typer(
    cls=CommandGroup,
    help="On-policy distillation of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"courtside {__version__}")
        raise typer.Exit


@app.callback()
def courtside(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


COMMANDS = "train show evaluate report view rescore export export_corrections recipes init schema"
for name in COMMANDS.split():
    app.command()(getattr(commands, name))
app.command()(experiment)
app.command()(compare)
app.command()(check_env)
app.command()(plan)
app.command()(serve)
