"""`report.html`: a run on one self-contained page, without network access or scripts.

Made from the run folder alone. All text of models, tasks and recipes is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from courtside.recipe import Recipe
from courtside.report.budget import BudgetMeter
from courtside.report.costs import PhaseCost
from courtside.report.evaluation_pairs import Differences, pair_evaluations
from courtside.report.folder import toml
from courtside.report.folder.files import Row, replace_file
from courtside.report.folder.folder import RunFolder
from courtside.report.folder.locking import dump_recipe
from courtside.report.folder.parquet import StoredTrajectory
from courtside.report.metrics import is_multi_turn
from courtside.report.page.changed_tasks import render_changed_tasks
from courtside.report.page.corrections import render_corrections
from courtside.report.page.curves import (
    error_figure,
    evaluation_figure,
    find_empty_steps,
    metric_figures,
)
from courtside.report.page.errors import render_error_rates
from courtside.report.page.hints import render_hints
from courtside.report.page.layout import Section, render_page
from courtside.report.page.reading import FolderReader, list_steps
from courtside.report.page.results import render_further_evaluations, render_result
from courtside.report.page.samples import first_per_task, informative_first, render_scored_answer
from courtside.report.page.shifted_tokens import find_shifted_tokens, render_shifted_tokens
from courtside.report.page.svg import SMOOTH_FROM
from courtside.report.page.tables import render_mark, render_table
from courtside.report.page.token_gaps import Decode, render_legend
from courtside.report.page.transcript import render_episode
from courtside.report.summary import (
    format_duration,
    format_number,
    summarize_recipe,
)
from courtside.types import Evaluation

NUM_SAMPLES = 4
"""Of each kind."""


def write_report(
    folder: RunFolder, *, differences: Differences | None = None, decode: Decode | None = None
) -> Path:
    """Write the page into the run folder. A part that cannot be read is named on it.

    `differences` between the first and last evaluations come from `evaluate.comparisons`. Without
    `decode`, answers are not colored: the stored text is per turn, not per token.
    """
    recipe, reader = folder.recipe(), FolderReader(folder)
    metrics: list[Row] = reader.read(folder.metrics, [])
    are_metrics_readable = not reader.problems
    evaluations: list[Evaluation] = reader.read(folder.evaluations, [])
    if are_metrics_readable:
        reader.check_metrics(metrics, evaluations)
    alarms: list[Row] = reader.read(folder.alarms, [])
    sections = _make_sections(reader, metrics, evaluations, differences or {}, decode)
    page = render_page(
        title=folder.path.resolve().name,
        summary=summarize_recipe(recipe),
        progress=_describe_progress(recipe, metrics),
        alerts=render_problems(reader.problems) + _render_alarms(alarms),
        sections=sections,
    )
    path = folder.path / "report.html"
    replace_file(path, page)
    return path


def _make_sections(
    reader: FolderReader,
    metrics: Sequence[Row],
    evaluations: Sequence[Evaluation],
    differences: Differences,
    decode: Decode | None,
) -> list[Section]:
    folder = reader.folder
    main, more = metric_figures(metrics)
    held_out = [error_figure(evaluations), evaluation_figure(evaluations)]
    main = [figure for figure in held_out if figure is not None] + main
    stored, suites = reader.first_and_last_step(), pair_evaluations(evaluations)
    curves = _render_empty_steps(metrics) + _render_grid(main) + _smoothing_note(metrics)
    further = render_further_evaluations(reader.read(folder.further_evaluations, []))
    return [
        Section("Result", render_result(evaluations, differences, suites)),
        Section("Errors", render_error_rates(suites, differences)),
        Section("Same tasks before and after", render_changed_tasks(suites, reader)),
        Section("Further evaluations", further),
        Section("Metrics", curves),
        Section("More metrics", _render_grid(more) if more else "", is_folded=True),
        Section("Hints", render_hints(reader, metrics, decode)),
        Section("Corrected drafts", render_corrections(metrics, stored, decode)),
        Section("Tokens with the largest shift", _render_shifted(stored, decode)),
        Section("Costs", render_costs(reader.read(folder.read_costs, {}))),
        Section("Episodes", _render_episodes(stored, decode)),
        Section(
            "Training samples, colored by the teacher's scores", _render_answers(stored, decode)
        ),
        Section("Environment", render_facts(reader.read(folder.environment, {}))),
        Section("Recipe", _render_recipe(folder.recipe()), is_folded=True),
    ]


def render_costs(costs: Mapping[str, PhaseCost]) -> str:
    if not costs:
        return ""
    seconds = sum(cost.seconds for cost in costs.values())
    flops = sum(cost.flops for cost in costs.values())
    total = PhaseCost(
        seconds=seconds,
        input_tokens=sum(cost.input_tokens for cost in costs.values()),
        output_tokens=sum(cost.output_tokens for cost in costs.values()),
        flops=flops,
    )
    rows = [(name, cost, "") for name, cost in costs.items()] + [("total", total, ' class="total"')]
    lines = (
        f"<tr{kind}><th>{escape(name)}</th><td>{format_duration(cost.seconds)}</td>"
        f"<td>{_render_fraction(cost.seconds, seconds)}</td><td>{cost.input_tokens:,}</td>"
        f"<td>{cost.output_tokens:,}</td><td>{format_number(cost.flops)}</td>"
        f"<td>{_render_fraction(cost.flops, flops)}</td></tr>"
        for name, cost, kind in rows
    )
    heads = ["phase", "time", "% of time", "input tokens", "output tokens", "FLOPs"]
    return render_table([*heads, "% of FLOPs"], lines)


def _render_fraction(part: float, whole: float) -> str:
    percent = 100 * part / whole if whole else 0.0
    bar = f'<span class="meter"><i style="width:{percent:.1f}%"></i></span>'
    return f'{bar}<span class="percent">{percent:.0f}%</span>'


def _render_shifted(ends: Sequence[Sequence[StoredTrajectory]], decode: Decode | None) -> str:
    if decode is None:
        return ""
    tokens_by_step = [(s[0].step, find_shifted_tokens(s, decode)) for s in reversed(ends) if s]
    tables = [
        f"<h3>Step {step}</h3>{render_shifted_tokens(tokens)}"
        for step, tokens in tokens_by_step
        if tokens
    ]
    caption = (
        '<p class="caption">Turns with a trained hint: the tokens whose probability changes most '
        "with the hint in the context. Hover over a row for the hint.</p>"
    )
    return caption + "".join(tables) if tables else ""


def _render_episodes(ends: Sequence[Sequence[StoredTrajectory]], decode: Decode | None) -> str:
    cards = [
        render_episode(stored, decode, is_open=number == index == 0)
        for index, step in enumerate(ends)
        for number, stored in enumerate(
            first_per_task(informative_first([s for s in step if _is_episode(s)]), NUM_SAMPLES)
        )
    ]
    if not cards:
        return ""
    caption = (
        '<p class="caption">From the last and the first stored step; those with hints and errors '
        "come first.</p>"
    )
    return caption + (render_legend() if decode is not None else "") + "".join(cards)


def _is_episode(stored: StoredTrajectory) -> bool:
    """Whether it is rendered turn by turn: several turns, or hints."""
    return is_multi_turn(stored.trajectory) or bool(stored.hints)


def _render_answers(ends: Sequence[Sequence[StoredTrajectory]], decode: Decode | None) -> str:
    cards = [
        render_scored_answer(stored, decode)
        for step in ends
        for stored in first_per_task([s for s in step if not _is_episode(s)], NUM_SAMPLES)
    ]
    if not cards:
        return ""
    return (render_legend() if decode is not None else "") + "".join(cards)


def _render_alarms(alarms: Sequence[Mapping[str, Any]]) -> str:
    if not alarms:
        return ""
    items = "".join(
        f"<li>{escape(' · '.join(f'{key}: {value}' for key, value in alarm.items()))}</li>"
        for alarm in alarms
    )
    return f'<section class="alarms"><h2>Alarms</h2><ul>{items}</ul></section>'


def _render_recipe(recipe: Recipe) -> str:
    return f"<pre>{escape(toml.dumps(dump_recipe(recipe)))}</pre>"


def render_facts(values: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{escape(str(key).replace('_', ' '))}</th><td>{escape(str(value))}</td></tr>"
        for key, value in values.items()
        if value is not None
    )
    return f'<table class="facts"><tbody>{rows}</tbody></table>' if rows else ""


def _describe_progress(recipe: Recipe, metrics: Sequence[Row]) -> str:
    num_steps = metrics[-1]["step"] + 1 if metrics else 0
    end = BudgetMeter(recipe.train, metrics).end
    return f"{num_steps} of {recipe.train.steps} steps" + (f"; {end}" if end else "")


def render_problems(problems: Sequence[str]) -> str:
    if not problems:
        return ""
    items = "".join(f"<li>{escape(problem)}</li>" for problem in problems)
    return (
        '<section class="alarms" id="damaged-files"><h2>Damaged files</h2>'
        f"<p>This report was made without them:</p><ul>{items}</ul></section>"
    )


def _render_empty_steps(metrics: Sequence[Row]) -> str:
    """Which steps trained nothing; they are marked in the curves."""
    empty = find_empty_steps(metrics)
    if not empty:
        return ""
    text = (
        f"No token was trained in {len(empty)} of {len(metrics)} steps ({list_steps(empty)}); "
        "dotted lines mark them. The weights stayed as they were."
    )
    return f'<p class="warning">{render_mark("empty steps")}{escape(text)}</p>'


def _smoothing_note(metrics: Sequence[Any]) -> str:
    if len(metrics) < SMOOTH_FROM:
        return ""
    return '<p class="caption">Faint lines: every step. Strong lines: moving average.</p>'


def _render_grid(figures: Sequence[str]) -> str:
    if not figures:
        return '<p class="empty">No step has been recorded.</p>'
    return f'<div class="grid">{"".join(figures)}</div>'
