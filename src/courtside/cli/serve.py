"""`courtside serve`: starts a server of a recipe, or prints how."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from courtside.cli.commands import Overrides, RecipeName


def serve(
    recipe: RecipeName,
    overrides: Overrides = None,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL", show_default=False, help="Which of the recipe's servers, if it has more."
        ),
    ] = None,
    print_only: Annotated[
        bool, typer.Option("--print", help="Print the commands of all servers and start none.")
    ] = False,
    python: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Interpreter of an environment with vLLM. Unset: `vllm` on the path.",
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPTIONS",
            show_default=False,
            help='Further options of vLLM, e.g. --option "--max-model-len 8192".',
        ),
    ] = None,
) -> None:
    """Start the vLLM server that a recipe's rollout or teacher asks, with the flags it needs.

    It runs until it is stopped. Servers of other machines are started there, with what --print
    says.
    """
    from courtside.recipe.builtin import find_recipe
    from courtside.recipe.load import load_recipe

    parsed = load_recipe(find_recipe(recipe), overrides or ())

    from courtside.artifacts.server_commands import find_server_commands
    from courtside.errors import UserError

    commands = find_server_commands(parsed)
    if not commands:
        raise UserError(
            f"{recipe}: has no servers. Set rollout.server, or teacher.kind = 'server' (see "
            "docs/serving.md)"
        )
    if url is not None:
        commands = [command for command in commands if command.url == url.rstrip("/")]
        if not commands:
            raise UserError(f"--url {url}: the recipe has no such server")
    options = [word for text in option or () for word in shlex.split(text)]
    if print_only:
        for command in commands:
            typer.echo(f"# {command.field}: {command.url}")
            typer.echo(" ".join([command.to_shell(), *map(shlex.quote, options)]))
        return
    if len(commands) > 1:
        urls = ", ".join(command.url for command in commands)
        raise UserError(f"{recipe}: has several servers ({urls}). Name one with --url, or --print")
    (command,) = commands
    if not command.is_local:
        raise UserError(
            f"{command.url}: is not this machine. Start it there; `courtside serve --print` gives "
            "the command"
        )
    arguments = command.arguments(python, options)
    environment = {**os.environ, **command.environment}
    if command.api_key_env is not None:
        from courtside.recipe.endpoint import read_api_key

        environment["VLLM_API_KEY"] = read_api_key(command.api_key_env, command.field) or ""
    typer.echo(f"{command.field}: {shlex.join(arguments)}")
    sys.stdout.flush()
    os.execvpe(arguments[0], arguments, environment)
