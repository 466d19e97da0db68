"""Arguments that several verbs take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="OVERRIDES",
        show_default=False,
        help="Changes to the recipe, each section.key=value: train.steps=10 losses.0.weight=2. "
        "null removes a key.",
    ),
]
RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="A folder that `courtside train` wrote.")
]
Step = Annotated[
    int | None,
    typer.Option(min=0, metavar="N", help="Of the checkpoint. Unset: the last one."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
