"""`courtside rescore`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from courtside.cli.arguments import Json, Overrides, RunArgument


def rescore(
    run: RunArgument,
    overrides: Overrides = None,
    steps: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="Of which steps. Unset: all that are stored."),
    ] = None,
    json: Json = False,
) -> None:
    """Try other losses or teachers on a run.

    They are computed on its stored trajectories, without sampling again.
    """
    wanted = None if steps is None else _numbers(steps)

    from courtside import api
    from courtside.cli.tables import number_table, print_json, print_table
    from courtside.report.console import make_console

    rows = api.rescore(run, overrides or (), steps=wanted, console=make_console(sys.stderr))
    if json:
        print_json(rows)
    else:
        print_table(number_table(rows))


def _numbers(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise typer.BadParameter(f"{text!r}: write step numbers with commas, as in 0,5,10")
    return [int(word) for word in words]
