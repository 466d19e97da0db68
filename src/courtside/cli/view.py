"""`courtside view`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from courtside.cli.arguments import RunArgument

PACKAGES = ("fastapi", "starlette", "uvicorn")


def view(
    run: RunArgument,
    hints: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Where hints are written. Unset: RUN/hints.jsonl.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Which address of this machine to listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            metavar="N",
            show_default=False,
            help="Unset: the first free one from 8765 on.",
        ),
    ] = None,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Whether to open a browser.")
    ] = True,
) -> None:
    """Read a run's trajectories in a browser, and write hints above their turns."""
    from courtside.errors import UserError
    from courtside.report.folder.folder import RunFolder

    folder = RunFolder.read(run)
    file = hints or run / "hints.jsonl"
    try:
        from courtside.viewer.server import listen, open_browser
    except ModuleNotFoundError as error:
        if error.name not in PACKAGES:
            raise
        raise UserError(
            f"the viewer needs {error.name}, which is not installed: pip install "
            "'courtside[viewer]'"
        ) from None
    from courtside.viewer.service import recipe_lines

    listening = listen(folder, file, host=host, port=port)
    typer.echo(f"Viewer: {listening.url} (Ctrl-C ends it)")
    if host not in ("127.0.0.1", "localhost", "::1"):
        typer.echo(f"Whoever can reach {host} can read this run and write hints.")
    typer.echo(f"Hints: {file}. In a recipe:\n\n{recipe_lines(folder, file)}")
    if browser:
        open_browser(listening.url)
    listening.run()
