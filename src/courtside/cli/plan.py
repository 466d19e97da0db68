"""`courtside plan`, and a plan as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from courtside.cli.commands import Json, Overrides, RecipeName

if TYPE_CHECKING:
    from rich.table import Table

    from courtside.planning.pipeline import PipelinePlan
    from courtside.planning.plan import CostPlan

GIB = 2**30


def plan(
    recipe: RecipeName,
    overrides: Overrides = None,
    gpu: Annotated[
        str,
        typer.Option(
            metavar="KIND",
            help="h200, h100, a100-80, a100-40, l40s, rtx4090, b200, or cpu for this machine's.",
        ),
    ] = "h200",
    gpus: Annotated[
        int,
        typer.Option(metavar="N", help="How many train. More than one is on paper."),
    ] = 1,
    rollout_gpus: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            show_default=False,
            help="GPUs of all servers of rollout.server together. Unset: planned as if the "
            "training GPUs sampled.",
        ),
    ] = None,
    teacher_gpus: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            show_default=False,
            help="GPUs of all servers of a teacher of kind 'server'. Unset: left out.",
        ),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="The student's shape instead of its files, e.g. qwen3-8b.",
        ),
    ] = None,
    teacher_shape: Annotated[
        str | None,
        typer.Option(metavar="NAME", show_default=False, help="The same for the teacher."),
    ] = None,
    prompt_tokens: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            show_default=False,
            help="Mean tokens of a prompt. Unset: measured on the recipe's tasks.",
        ),
    ] = None,
    new_tokens: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            show_default=False,
            help="Mean tokens of an answer or turn. Unset: rollout.max_new_tokens.",
        ),
    ] = None,
    turns: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            show_default=False,
            help="Mean assistant turns of an episode. Unset: the most that the recipe allows.",
        ),
    ] = None,
    observation_tokens: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            show_default=False,
            help="Mean tokens of an environment's message between two turns. Unset: 64.",
        ),
    ] = None,
    context_tokens: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            show_default=False,
            help="Tokens that a teacher scores in addition to a trajectory: its context, or hints "
            "with their turns.",
        ),
    ] = None,
    assume: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            show_default=False,
            help="What only grades decide about drafts, e.g. failed_fraction=0.4; once for each. "
            "Unset: the most that it can cost.",
        ),
    ] = None,
    price_per_hour: Annotated[
        float | None,
        typer.Option(metavar="PRICE", show_default=False, help="Of one GPU, in any currency."),
    ] = None,
    from_run: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            show_default=False,
            help="An earlier run on this kind of device: its lengths, rates and speed replace "
            "defaults.",
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default=False, help="Also write the plan as a page."),
    ] = None,
    json: Json = False,
) -> None:
    """Estimate memory, time and cost of a recipe or pipeline before it runs. Loads no weights.

    Exits with 0 also where the recipe does not fit: the output says what to change.
    """
    from courtside.recipe.builtin import find_recipe
    from courtside.recipe.load import load_recipe
    from courtside.recipe.pipeline import Pipeline, is_pipeline, load_pipeline

    file = find_recipe(recipe)
    load = load_pipeline if is_pipeline(file) else load_recipe
    parsed = load(file, overrides or ())

    from courtside.cli.tables import print_json, print_table
    from courtside.planning.gpus import find_device
    from courtside.planning.lengths import KnownLengths
    from courtside.planning.pipeline import plan_pipeline
    from courtside.planning.plan import PlanOptions, plan_run

    options = PlanOptions(
        device=find_device(gpu, gpus),
        num_gpus=gpus,
        rollout_gpus=rollout_gpus,
        teacher_gpus=teacher_gpus,
        lengths=KnownLengths(
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            turns=turns,
            observation_tokens=observation_tokens,
            context_tokens=context_tokens,
        ),
        assume=_parse_rates(assume or ()),
        price_per_hour=price_per_hour,
    )
    models = {"shape": shape, "teacher_shape": teacher_shape}
    result: CostPlan | PipelinePlan
    if isinstance(parsed, Pipeline):
        result = plan_pipeline(parsed, options, **models, run=from_run)
    else:
        result = plan_run(parsed, options, **models, run=from_run)
    if html is not None:
        from courtside.planning.page import write_plan_page

        write_plan_page(result, html)
    if json:
        print_json(plan_tree(result))
        return
    for part in format_plan(result):
        if isinstance(part, str):
            typer.echo(part)
        else:
            print_table(part)
    if html is not None:
        typer.echo(f"\nPage: {html}")


def _parse_rates(assignments: Sequence[str]) -> dict[str, float]:
    from courtside.errors import PlanError

    rates = {}
    for assignment in assignments:
        name, _, value = assignment.partition("=")
        try:
            rates[name.strip()] = float(value)
        except ValueError:
            raise PlanError(
                f"--assume {assignment}: give NAME=VALUE with a number, e.g. failed_fraction=0.4"
            ) from None
    return rates


def plan_tree(result: CostPlan | PipelinePlan) -> dict[str, Any]:
    """For programs: all fields, and what follows from them."""
    derived = {
        "fits": result.fits,
        "hours": result.hours,
        "gpu_hours": result.gpu_hours,
        "num_all_gpus": result.num_all_gpus,
        "cost": result.cost,
    }
    from courtside.planning.pipeline import PipelinePlan

    if isinstance(result, PipelinePlan):
        stages = {name: plan_tree(stage) for name, stage in result.stages.items()}
        return {"stages": stages, "flops": asdict(result.flops), **derived}
    tree = asdict(result)
    estimate = result.estimate
    tree["estimate"] |= {
        "step_seconds": estimate.step_seconds,
        "seconds": estimate.seconds,
        "flops": asdict(estimate.flops),
        "peak_bytes": estimate.peak.total,
        "peak_phase": estimate.peak.phase,
    }
    models = result.models
    tree["models"] |= {
        "num_student": models.num_student,
        "num_trained": models.num_trained,
        "num_teachers": [teacher.shape.num_parameters for teacher in models.teachers],
    }
    return {**tree, **derived}


def format_plan(result: CostPlan | PipelinePlan) -> Iterator[str | Table]:
    """Lines and tables for a terminal."""
    from courtside.cli.tables import text_table
    from courtside.planning.pipeline import PipelinePlan
    from courtside.planning.text import (
        change_rows,
        headline,
        memory_rows,
        phase_rows,
        pipeline_headline,
        pipeline_lines,
        stage_rows,
        summary_lines,
    )

    if isinstance(result, PipelinePlan):
        yield pipeline_headline(result)
        yield ""
        yield text_table(*stage_rows(result))
        yield ""
        yield from pipeline_lines(result)
        for name, plan in result.stages.items():
            yield f"\n── stage {name} " + "─" * (60 - len(name))
            yield from format_plan(plan)
        return
    yield headline(result)
    yield ""
    yield text_table(*phase_rows(result))
    yield ""
    yield text_table(*memory_rows(result))
    yield ""
    yield from summary_lines(result)
    if result.changes:
        yield ""
        yield text_table(*change_rows(result))
    for title, lines in (("assumed", result.assumptions), ("note", result.notes)):
        if lines:
            yield ""
        for line in lines:
            yield f"{title}: {line}"
