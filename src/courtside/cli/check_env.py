"""`courtside check-env`: an environment is played without a model, and what is wrong is printed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from courtside.environments.check import CheckReport
    from courtside.recipe.rollout import LimitsConfig
    from courtside.recipe.tasks import TasksConfig


def check_env(
    target: Annotated[
        str,
        typer.Argument(
            metavar="CLASS_OR_RECIPE",
            help="module:Class of an environment, or a recipe with one in [tasks].",
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OVERRIDES",
            show_default=False,
            help="Of a class: fields of [tasks], each key=value: settings.high=50 "
            "rows=rows.jsonl. Of a recipe: as for train.",
        ),
    ] = None,
    tasks: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tasks whose episodes are played.")
    ] = 3,
    turns: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Turns of an episode, or more where a script has more."
        ),
    ] = 8,
    seconds: Annotated[
        float, typer.Option(min=0.1, metavar="S", help="After these, no new episode is started.")
    ] = 60.0,
    step_seconds: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            metavar="S",
            show_default=False,
            help="Time for one call. Unset: rollout.limits.step_seconds of the recipe, or 60.",
        ),
    ] = None,
    in_process: Annotated[
        bool,
        typer.Option(
            "--in-process",
            help="Not in a worker process: for debuggers. A crash ends the check then.",
        ),
    ] = False,
) -> None:
    """Play an environment without a model, and say what is wrong with it.

    Exit code 0: nothing is. 1: there are problems.
    """
    from courtside.environments.check import EnvironmentChecker
    from courtside.environments.loading import make_environment
    from courtside.errors import TaskError

    config, limits = _read_target(target, overrides or [])
    if step_seconds is not None:
        limits = limits.model_copy(update={"step_seconds": step_seconds})
    if config.kind == "environment":
        config = config.model_copy(update={"workers": 0 if in_process else max(config.workers, 1)})
    try:
        environment = make_environment(config, limits)
    except TaskError as error:
        typer.echo(f"problems (1):\n  {error}")
        raise typer.Exit(1) from None
    assert environment is not None
    checker = EnvironmentChecker(
        environment=environment,
        limits=limits,
        num_tasks=tasks,
        max_turns=turns,
        max_seconds=seconds,
    )
    report = checker.run()
    typer.echo(format_report(report))
    raise typer.Exit(1 if report.problems else 0)


def _read_target(target: str, overrides: list[str]) -> tuple[TasksConfig, LimitsConfig]:
    from courtside.errors import UserError
    from courtside.recipe.builtin import find_recipe
    from courtside.recipe.load import load_recipe, parse_tasks_section
    from courtside.recipe.rollout import LimitsConfig

    if ":" in target:
        return parse_tasks_section({"kind": "environment", "path": target}, overrides), (
            LimitsConfig()
        )
    if target.endswith(".py"):
        module = target.removesuffix(".py").replace("/", ".")
        raise UserError(f"{target}: is a file. Give module and class, as in {module}:Class")
    recipe = load_recipe(find_recipe(target), overrides)
    if not recipe.tasks.is_environment:
        raise UserError(
            f"{target}: tasks.kind = {recipe.tasks.kind!r} is no environment, so there is nothing "
            "to play. Give module:Class, or a recipe with tasks.kind = 'environment'"
        )
    return recipe.tasks, recipe.rollout.limits


def format_report(report: CheckReport) -> str:
    splits = ", ".join(f"{count} {split}" for split, count in sorted(report.splits.items()))
    lines = [
        f"tasks: {report.size:,}; looked at: {splits or 'none'}",
        f"episodes: {report.num_episodes} without a bug, {report.num_turns} turns; scores: "
        + (", ".join(f"{score:g} ({n}x)" for score, n in sorted(report.grades.items())) or "none"),
        "speed: "
        + "; ".join(
            f"{method} {1000 * timing.total / timing.count:.2f} ms "
            f"(longest {1000 * timing.longest:.1f})"
            for method, timing in report.timings.items()
        ),
        *_format_reader_view(report),
    ]
    if report.notes:
        lines += ["notes:", *(f"  {note}" for note in report.notes)]
    if report.problems:
        lines.append(f"problems ({len(report.problems)}):")
        lines += [f"  {problem}\n    first at: {at}" for problem, at in report.problems.items()]
    else:
        lines.append("no problems")
    return "\n".join(lines)


def _format_reader_view(report: CheckReport) -> list[str]:
    """Events and the slots that hints can use."""
    from courtside.recipe.rules import EVENT_DETECTORS
    from courtside.sanitize import to_one_line, truncate

    slots = " ".join(f"{{{name}}}" for name in report.privileged) or "none"
    lines = [f"what a reader sees: slots of every hint from the tasks: {slots}"]
    for kind, summary in sorted(report.events.items()):
        assert summary.example is not None
        rule = f'detect = "{kind}"'
        if kind not in EVENT_DETECTORS:
            rule = f'detect = "event", event = "{kind}"'
        lines.append(f"  {kind}: {summary.num_turns} turns; rule: {{ {rule} }}")
        for name in summary.example.details:
            text = truncate(to_one_line(summary.example.detail(name)), 60)
            lines.append(f"    {{{name}}}: {text}")
    return lines
