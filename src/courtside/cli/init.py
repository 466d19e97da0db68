"""`courtside init`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer


def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of a built-in recipe.")],
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", show_default=False, help="Unset: a folder called NAME."),
    ] = None,
) -> None:
    """Copy a built-in recipe, to be edited."""
    from courtside.errors import UserError
    from courtside.recipe.builtin import RECIPE, find_builtin_recipe

    source = find_builtin_recipe(name)
    target = (folder or Path(name)) / RECIPE
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as copy:
            copy.write(source.read_bytes())
    except FileExistsError:
        raise UserError(f"{target}: exists already. Name another folder, or remove it") from None
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror})") from None
    typer.echo(f"Written: {target}")
    typer.echo(f"Edit it, then: courtside train {shlex.quote(str(target))}")
