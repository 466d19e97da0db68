"""The commands, as functions for Typer. Heavy imports are inside them, after input checks."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A TOML file, or a built-in recipe's name.")
]
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

VIEWER_PACKAGES = ("fastapi", "starlette", "uvicorn")


def train(
    recipe: RecipeName,
    overrides: Overrides = None,
    run: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            show_default=False,
            help="The run folder. Unset: runs/NAME-OF-THE-RECIPE.",
        ),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            "--nproc",
            min=1,
            metavar="N",
            show_default=False,
            help="Train one student in N processes of this machine, one for each GPU. Unset: one "
            "process, without sharding; or those of torchrun.",
        ),
    ] = None,
) -> None:
    """Train a student, or run a pipeline of stages.

    The same command resumes what was interrupted, also with another --nproc. Overrides of a
    pipeline name the stage: stages.NAME.train.steps=10. Exit code 3: a gate of the pipeline failed.
    """
    from courtside.recipe.builtin import default_run_folder, find_recipe
    from courtside.recipe.load import load_recipe
    from courtside.recipe.pipeline import is_pipeline, load_pipeline

    file = find_recipe(recipe)
    folder = run or default_run_folder(file)
    has_stages = is_pipeline(file)
    load = load_pipeline if has_stages else load_recipe
    parsed = load(file, overrides or ())

    from courtside.ranks import should_report, was_launched

    if nproc is not None:
        from courtside.cli.launch import launch
        from courtside.errors import UserError

        if was_launched():
            raise UserError(
                "--nproc: torchrun has started this process already. Leave one of the two out"
            )
        arguments = ["train", recipe, *(overrides or ()), "--run", str(folder)]
        if code := launch([sys.executable, "-m", "courtside", *arguments], nproc):
            raise typer.Exit(code)
        return

    from courtside import api
    from courtside.report.console import make_console

    done = api.train(parsed, folder, console=make_console(sys.stdout))
    if not should_report():
        return
    if has_stages:
        typer.echo(f"\nReport of all stages: {folder / 'report.html'} (open it in a browser)")
    typer.echo(f"\nReport: {done.path / 'report.html'} (open it in a browser)")
    name = shlex.quote(str(done.path))
    typer.echo(f"Trajectories and your own hints: courtside view {name}")
    typer.echo(f"Weights: courtside export {name} FOLDER")


def show(
    recipe: RecipeName,
    overrides: Overrides = None,
    all_tokens: Annotated[
        bool, typer.Option("--all", help="Every token of long sequences, not their ends alone.")
    ] = False,
    json: Json = False,
) -> None:
    """Show what a recipe would train on, as tokens, without loading a model.

    A rendered prompt, the teacher's context and a hinted turn, and which of their tokens train.
    """
    from courtside.recipe.builtin import find_recipe
    from courtside.recipe.load import load_recipe

    parsed = load_recipe(find_recipe(recipe), overrides or ())

    from dataclasses import asdict

    from courtside import api
    from courtside.cli.preview import format_preview
    from courtside.cli.tables import print_json

    preview = api.show(parsed)
    if json:
        print_json(asdict(preview))
    else:
        for line in format_preview(preview, every_token=all_tokens):
            typer.echo(line)


def evaluate(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE_OR_RUN",
            help="A run folder: its trained student. A recipe: its student before training.",
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
        bool, typer.Option("--teacher", help="Evaluate the teacher with its context, too.")
    ] = False,
    json: Json = False,
) -> None:
    """Evaluate a student on held-out tasks, with 95% intervals."""
    from courtside.errors import UserError
    from courtside.recipe.builtin import RECIPE, find_recipe
    from courtside.recipe.load import load_recipe

    # The files that a run has from its start; a built-in recipe's folder has none of them.
    is_run = any((Path(target) / name).exists() for name in ("checkpoints", "environment.json"))
    run = Path(target) if is_run else None
    if run is None and step is not None:
        raise UserError(f"--step {step}: {target} is a recipe and has no checkpoints. Give a run")
    recipe = load_recipe(run / RECIPE if run else find_recipe(target), overrides or ())

    from courtside import api
    from courtside.cli.tables import (
        evaluation_summary,
        evaluation_table,
        print_json,
        print_table,
    )
    from courtside.report.console import make_console

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
        print_json([evaluation_summary(evaluation) for evaluation in evaluations])
    else:
        print_table(evaluation_table(evaluations))


def report(run: RunArgument) -> None:
    """Write a run's report.html again, from its folder."""
    from courtside import api

    typer.echo(f"Written: {api.write_report(run)}")


def view(
    run: RunArgument,
    hints: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", show_default=False, help="The hints file. Unset: RUN/hints.jsonl."
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
    """Read a run's trajectories in a browser, and write hints for their turns."""
    from courtside.errors import UserError
    from courtside.report.folder.folder import RunFolder

    folder = RunFolder.read(run)
    file = hints or run / "hints.jsonl"
    try:
        from courtside.viewer.server import listen, open_browser
    except ModuleNotFoundError as error:
        if error.name not in VIEWER_PACKAGES:
            raise
        raise UserError(
            f"the viewer needs {error.name}, which is not installed: pip install -e '.[viewer]' "
            "in the clone of courtside"
        ) from None
    from courtside.viewer.hints_recipe import hints_recipe

    listening = listen(folder, file, host=host, port=port)
    typer.echo(f"Viewer: {listening.url} (Ctrl-C ends it)")
    if host not in ("127.0.0.1", "localhost", "::1"):
        typer.echo(f"Whoever can reach {host} can read this run and write hints.")
    recipe = hints_recipe(folder.recipe(), run=folder.path, hints=file)
    typer.echo(f"Hints: {file}. A recipe that trains on them:\n\n{recipe}")
    if browser:
        open_browser(listening.url)
    listening.run()


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
    numbers = None if steps is None else [text.strip() for text in steps.split(",")]
    if numbers is not None and not all(text.isdecimal() for text in numbers):
        raise typer.BadParameter(f"{steps!r}: write step numbers with commas, as in 0,5,10")

    from courtside import api
    from courtside.cli.tables import number_table, print_json, print_table
    from courtside.report.console import make_console

    rows = api.rescore(
        run,
        overrides or (),
        steps=None if numbers is None else [int(text) for text in numbers],
        console=make_console(sys.stderr),
    )
    if json:
        print_json(rows)
    else:
        print_table(number_table(rows))


def export(
    run: RunArgument,
    to: Annotated[Path, typer.Argument(metavar="TO", help="The folder to write; must be new.")],
    step: Step = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Only the LoRA adapter. Unset: whole, merged weights.")
    ] = False,
    base: Annotated[
        bool,
        typer.Option(
            "--base", help="Only the base that a run held in 4 bits, dequantized: for its adapters."
        ),
    ] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        typer.Option(
            metavar="DTYPE",
            help="Of merged weights: float32, bfloat16 or float16. float32 is exact.",
        ),
    ] = "float32",
    push: Annotated[
        str | None,
        typer.Option(
            metavar="REPO",
            show_default=False,
            help="Upload the folder to this repository of the hub (OWNER/NAME), new ones private.",
        ),
    ] = None,
) -> None:
    """Write a student's weights for other programs.

    The folder holds safetensors, config, tokenizer and a model card, and loads in transformers 4
    and 5 and in vLLM.
    """
    from courtside import api
    from courtside.report.folder.folder import RunFolder

    folder = api.export(run, to, step=step, adapter=adapter, base=base, dtype=dtype, push=push)
    typer.echo(f"Written: {folder}")
    if push is not None:
        typer.echo(f"Pushed: {push}")
    command = api.serving_command(run, folder)
    if command is None:
        command = "vLLM leaves an adapter on lm_head out of log-probs; export without --adapter"
    typer.echo(f"Serve: {command}")
    lora = RunFolder.read(run).recipe().student.lora
    if adapter and lora is not None and lora.in_4_bits:
        typer.echo(
            "Trained on the base in 4 bits. For the log-probs of the run, serve the folder that "
            f"`courtside export {run} FOLDER --base` writes in place of that base"
        )


def export_corrections(
    run: RunArgument,
    to: Annotated[Path, typer.Argument(metavar="FILE", help="The JSONL file; must be new.")],
    format: Annotated[
        Literal["pairs", "completions"],
        typer.Option(
            metavar="FORMAT",
            help="pairs: prompt, chosen, rejected. completions: prompt, completion.",
        ),
    ] = "pairs",
) -> None:
    """Write a run's corrected drafts as JSON lines for other programs.

    The format is the conversational one of TRL, which `datasets` loads and tasks of kind jsonl
    read.
    """
    from courtside import api

    done = api.export_corrections(run, to, format=format)
    typer.echo(f"Written: {done.path} ({done.num_rows} rows of {len(done.steps)} stored steps)")
    if done.num_skipped:
        typer.echo(f"Left out: {done.num_skipped} without a text, or with that of their draft")


def recipes() -> None:
    """List the built-in recipes."""
    from courtside.cli.tables import print_table, text_table
    from courtside.recipe.builtin import list_builtin_recipes

    rows = [(recipe.name, recipe.about, recipe.needs or "–") for recipe in list_builtin_recipes()]
    print_table(text_table(("recipe", "what it does", "time and hardware"), rows))


def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of a built-in recipe.")],
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", show_default=False, help="Unset: a folder called NAME."),
    ] = None,
) -> None:
    """Copy a built-in recipe to edit it."""
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


def schema(
    pipeline: Annotated[
        bool, typer.Option("--pipeline", help="That of a pipeline instead.")
    ] = False,
) -> None:
    """Print the JSON schema of a recipe, for editors."""
    from courtside.cli.tables import print_json
    from courtside.recipe import Recipe
    from courtside.recipe.pipeline_schema import make_pipeline_schema

    print_json(make_pipeline_schema() if pipeline else Recipe.model_json_schema())
