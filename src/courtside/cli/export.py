"""`courtside export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from courtside.cli.arguments import RunArgument, Step


def export(
    run: RunArgument,
    to: Annotated[Path, typer.Argument(metavar="TO", help="The folder to write; must be new.")],
    step: Step = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Only the LoRA adapter. Unset: whole, merged weights.")
    ] = False,
) -> None:
    """Write a student's weights for other programs.

    The folder holds safetensors, config and tokenizer.
    """
    from courtside import api

    typer.echo(f"Written: {api.export(run, to, step=step, adapter=adapter)}")
