"""`courtside compare`: finished runs side by side."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from courtside.cli.commands import Json

if TYPE_CHECKING:
    from courtside.comparison.comparison import Comparison
    from courtside.comparison.differences import Interval


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Folders that `courtside train` wrote, the folder of an experiment's runs, or "
            "recipes and pipelines (TOML files, built-in names), which are trained first.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The page to write.")] = Path(
        "compare.html"
    ),
    only: Annotated[
        str,
        typer.Option(metavar="REGEX", show_default=False, help="Of the arms' names. Unset: all."),
    ] = "",
    suite: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="Of evaluations (evaluate.suites). Unset: the runs' own kind of tasks.",
        ),
    ] = "",
    price_per_hour: Annotated[
        float | None,
        typer.Option(
            metavar="X", show_default=False, help="Of the machine, for costs in money. Unset: none."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Compare finished runs: scores, paired differences, costs, scores at equal budgets.

    Runs of one recipe with other seeds are one arm. Prints tables and writes one HTML page. A
    recipe is trained into runs/NAME, as `courtside train` does; what is finished there stays.
    """
    from courtside.cli.tables import print_json, print_table, text_table
    from courtside.comparison.comparison import compare as compare_runs

    comparison = compare_runs(
        _train_recipes(runs), price_per_hour=price_per_hour, only=only, suite=suite
    )
    page = comparison.write_html(out)
    if json:
        print_json(comparison.to_dict())
        return
    print_table(text_table(*_arm_table(comparison)))
    if comparison.differences:
        typer.echo("")
        print_table(text_table(*_difference_table(comparison)))
    for note in comparison.notes:
        typer.echo(f"\n{note}")
    typer.echo(f"\nWritten: {page} (open it in a browser)")


def _train_recipes(runs: Sequence[str]) -> list[Path]:
    """Run folders, in place of recipes too. All recipes are checked before the first one trains."""
    from courtside.recipe.builtin import builtin_recipe_files, default_run_folder, find_recipe
    from courtside.recipe.load import load_recipe
    from courtside.recipe.pipeline import is_pipeline, load_pipeline

    recipes = {}
    for name in runs:
        is_recipe = name.endswith(".toml") or name in builtin_recipe_files()
        if is_recipe and not Path(name).is_dir():
            file = find_recipe(name)
            load = load_pipeline if is_pipeline(file) else load_recipe
            recipes[name] = (load(file), default_run_folder(file))
    if not recipes:
        return [Path(name) for name in runs]

    from courtside import api
    from courtside.report.console import make_console

    for recipe, folder in recipes.values():
        api.train(recipe, folder, console=make_console(sys.stderr))
    return [recipes[name][1] if name in recipes else Path(name) for name in runs]


def _arm_table(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    from courtside.comparison.formats import UNIT_NAMES, format_spent

    units = [unit for unit in UNIT_NAMES if unit != "money" or comparison.price_per_hour]
    heads = ["arm", "seeds", "before", "after", "95% interval", *(UNIT_NAMES[u] for u in units)]
    rows = [
        [
            arm.name,
            str(len(arm.seeds)),
            _format_mean(arm.before),
            _format_mean(arm.after),
            f"{arm.after.low:.1%} to {arm.after.high:.1%}",
            *(format_spent(unit, arm.spent[unit]) for unit in units),
        ]
        for arm in comparison.arms
    ]
    return heads, rows


def _difference_table(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    from courtside.comparison.formats import format_p

    heads = ["difference", "points", "95% interval", "p", "paired by", "interval covers"]
    rows = [
        [
            f"{d.first} minus {d.other}",
            f"{100 * d.interval.mean:+.1f}",
            f"{100 * d.interval.low:+.1f} to {100 * d.interval.high:+.1f}",
            format_p(d.p_value),
            d.pairing,
            d.interval.method,
        ]
        for d in comparison.differences
    ]
    return heads, rows


def _format_mean(interval: Interval | None) -> str:
    return "not measured" if interval is None else f"{interval.mean:.1%}"
