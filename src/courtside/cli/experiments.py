"""`courtside experiment`: arms × learning rates × seeds."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from courtside.cli.commands import Overrides

if TYPE_CHECKING:
    from courtside.experiment.plan import Plan


def experiment(
    path: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER_OR_FILE",
            help="A folder with an experiment.toml, such a file, or a built-in recipe's name.",
        ),
    ],
    overrides: Overrides = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            show_default=False,
            help="Runs at a time. Unset: by cores and GPU memory.",
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=0, metavar="M", help="Start no further run after so many minutes."),
    ] = None,
    only: Annotated[
        str,
        typer.Option(
            metavar="REGEX", show_default=False, help="Of ARM or ARM-VARIANT. Unset: all."
        ),
    ] = "",
    plan: Annotated[
        bool, typer.Option("--plan", help="Run nothing: print the contrasts and what they detect.")
    ] = False,
    summarize: Annotated[
        bool,
        typer.Option("--summarize", help="Run nothing: write the results of what is finished."),
    ] = False,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Runs are in DIR/NAME-OF-THE-EXPERIMENT.")
    ] = Path("runs"),
) -> None:
    """Run arms over learning rates and seeds, and compare them.

    Each arm's learning rate is chosen on validation tasks with the first seed. results.json is
    written next to the experiment.toml. The same command goes on where it was stopped.
    """
    from courtside.errors import RunError, UserError
    from courtside.experiment.config import find_experiment
    from courtside.experiment.plan import describe_design, read_plan
    from courtside.experiment.schedule import list_recipes, select_arms
    from courtside.experiment.task_check import check_tasks

    experiment_plan = read_plan(find_experiment(path), out, overrides or ())
    try:
        re.compile(only)
    except re.error as error:
        raise UserError(f"--only {only}: no regular expression ({error})") from None
    if not select_arms(experiment_plan, only):
        raise UserError(f"--only {only}: matches none of {', '.join(experiment_plan.arms)}")
    if plan and summarize:
        raise UserError("--plan and --summarize: give one of them")
    recipes = list(list_recipes(experiment_plan))  # refused before anything runs
    check_tasks(experiment_plan)
    if plan:
        _print_runs(experiment_plan, len(recipes), only)
        for line in describe_design(experiment_plan):
            typer.echo(line)
        return
    failed = () if summarize else _run(experiment_plan, jobs=jobs, minutes=minutes, only=only)
    is_written = _write_results(experiment_plan)
    if failed:
        raise RunError(
            f"{len(failed)} runs failed: {', '.join(failed)}. Their reasons are above, and logs in "
            f"{experiment_plan.folder}; the same command tries them again"
        )
    if not is_written:
        raise UserError(
            f"{experiment_plan.folder}: no run of the experiment is finished, so there is nothing "
            "to write down. Without --summarize they are run"
        )


def _print_runs(plan: Plan, num_recipes: int, only: str) -> None:
    from courtside.experiment.schedule import count_runs
    from courtside.experiment.summary import load_outcomes

    outcomes = load_outcomes(plan)
    num_failed = sum("failed" in outcome for outcome in outcomes.values())
    typer.echo(
        f"{count_runs(plan, only)} runs of {len(plan.arms)} arms, "
        f"{len(outcomes) - num_failed} finished, {num_failed} failed; "
        f"{num_recipes} recipes are valid"
    )


def _run(plan: Plan, *, jobs: int | None, minutes: float | None, only: str) -> tuple[str, ...]:
    """The names of the runs that failed."""
    from courtside.experiment.capacity import choose_num_workers, inspect_machine, limit_threads
    from courtside.experiment.runner import run_experiment

    num_workers, reason = jobs or 1, "--jobs"
    if jobs != 1:
        machine = inspect_machine()
        if jobs is None:
            num_workers, reason = choose_num_workers(plan, machine)
        limit_threads(num_workers, machine.num_cores)
    plural = "s" * (num_workers > 1)
    typer.echo(f"{num_workers} run{plural} at a time ({reason}), in {plan.folder}")
    progress = run_experiment(
        plan, num_workers=num_workers, only=only, minutes=minutes, report=_print_line
    )
    if progress.num_left:
        typer.echo(f"{progress.num_left} runs are left; the same command goes on with them")
    return progress.failed


def _print_line(text: str) -> None:
    typer.echo(text)
    sys.stdout.flush()


def _write_results(plan: Plan) -> bool:
    """False: no run is finished."""
    from courtside.experiment.arms import format_summary
    from courtside.experiment.summary import load_outcomes, summarize, write_arms, write_results

    outcomes = load_outcomes(plan)
    if all("failed" in outcome for outcome in outcomes.values()):
        return False
    results = summarize(plan, outcomes)
    results["command"] = " ".join(["courtside", *sys.argv[1:]])
    path = write_results(plan, results)
    write_arms(plan, outcomes)
    for line in format_summary(results):
        typer.echo(line)
    typer.echo(f"Written: {path}")
    typer.echo(f"Costs and curves: courtside compare {shlex.quote(str(plan.folder))}")
    return True
