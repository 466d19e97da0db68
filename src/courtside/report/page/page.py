"""`report.html`: a run on one self-contained page, without network access or scripts.

Made from the run folder alone. All text of models, tasks and recipes is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from courtside.recipe import Recipe
from courtside.report.costs import PhaseCost
from courtside.report.folder import toml
from courtside.report.folder.files import replace_file
from courtside.report.folder.folder import RunFolder
from courtside.report.folder.locking import dump_recipe
from courtside.report.folder.parquet import StoredTrajectory
from courtside.report.metrics import is_multi_turn
from courtside.report.page.curves import error_figure, evaluation_figure, is_student, metric_figures
from courtside.report.page.errors import Pair, render_error_rates
from courtside.report.page.hints import render_hints
from courtside.report.page.samples import (
    first_per_task,
    informative_first,
    render_pairs,
    render_scored_answer,
)
from courtside.report.page.shifted_tokens import find_shifted_tokens, render_shifted_tokens
from courtside.report.page.svg import SMOOTH_FROM, Interval, interval_plot
from courtside.report.page.tables import render_interval, render_number, render_table
from courtside.report.page.token_gaps import Decode, render_legend
from courtside.report.page.transcript import render_episode
from courtside.report.summary import (
    format_duration,
    format_number,
    format_points,
    summarize_recipe,
)
from courtside.types import Evaluation

NUM_SAMPLES = 4
"""Of each kind."""

Comparison = tuple[float, float, float, float]
"""Paired difference after − before: mean, low and high end of its 95% interval, p-value."""


def write_report(
    folder: RunFolder, *, comparison: Comparison | None = None, decode: Decode | None = None
) -> Path:
    """Write the page into the run folder.

    `comparison` is of the evaluations that `first_and_last_evaluation` returns. Without `decode`,
    answers are not colored: the stored text is per turn, not per token.
    """
    recipe, metrics = folder.recipe(), folder.metrics()
    evaluations = folder.evaluations()
    main, more = metric_figures(metrics)
    held_out = [error_figure(evaluations), evaluation_figure(evaluations)]
    main = [figure for figure in held_out if figure is not None] + main
    stored, suites = _read_first_and_last(folder), _pair_evaluations(evaluations)
    sections = [
        _render_alarms(folder.alarms()),
        _render_result(evaluations, comparison, suites),
        _render_section("Errors", render_error_rates(suites)),
        _render_section("Metrics", _render_grid(main) + _smoothing_note(metrics)),
        _render_folded("More metrics", _render_grid(more)) if more else "",
        _render_section("Hints", render_hints(folder, metrics, decode)),
        _render_section("Tokens with the largest shift", _render_shifted(stored, decode)),
        _render_section("Costs", _render_costs(folder.read_costs())),
        _render_section("Samples before and after training", _render_pairs(evaluations)),
        _render_section("Episodes", _render_episodes(stored, decode)),
        _render_section(
            "Training samples, colored by the teacher's scores", _render_answers(stored, decode)
        ),
        _render_section("Environment", _render_facts(folder.environment())),
        _render_folded("Recipe", _render_recipe(recipe)),
    ]
    done = metrics[-1]["step"] + 1 if metrics else 0
    page = PAGE.format(
        title=escape(folder.path.resolve().name),
        summary=escape(summarize_recipe(recipe)),
        progress=f"{done} of {recipe.train.steps} steps",
        style=resources.files("courtside.report.page").joinpath("report.css").read_text("utf-8"),
        body="\n".join(section for section in sections if section),
    )
    path = folder.path / "report.html"
    replace_file(path, page.encode("utf-8", "replace"))
    return path


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title} · courtside</title>
<style>
{style}</style>
</head>
<body>
<main>
<header class="top"><p class="brand">courtside</p><h1>{title}</h1>
<p class="summary">{summary}</p><p class="progress">{progress}</p></header>
{body}
</main>
</body>
</html>
"""


def first_and_last_evaluation(
    evaluations: Sequence[Evaluation], policy: str = "student"
) -> tuple[Evaluation | None, Evaluation | None]:
    """The first and the last evaluation of a policy on one split: test, if it was evaluated twice.

    Validation scores select checkpoints and are biased upwards, so they are used only without test
    scores. The last is None while there is only one.
    """
    students = [e for e in evaluations if e.policy == policy]
    for split in ("test", "validation", "train"):
        of_split = sorted((e for e in students if e.split == split), key=lambda e: e.step)
        if of_split and of_split[-1].step > of_split[0].step:
            return of_split[0], of_split[-1]
    return (students[0], None) if students else (None, None)


def _pair_evaluations(evaluations: Sequence[Evaluation]) -> dict[str, Pair]:
    """First and last evaluation by policy; the recipe's own tasks come first."""
    names = [
        "student",
        *dict.fromkeys(e.policy for e in evaluations if e.policy != "student"),
    ]
    pairs = {policy: first_and_last_evaluation(evaluations, policy) for policy in names}
    return {
        policy: (before, after) for policy, (before, after) in pairs.items() if before is not None
    }


def _render_result(
    evaluations: Sequence[Evaluation], comparison: Comparison | None, suites: Mapping[str, Pair]
) -> str:
    before, after = first_and_last_evaluation(evaluations)
    if before is None:
        return _render_section("Result", '<p class="empty">No evaluation has been recorded.</p>')
    teacher = next((e for e in evaluations if e.policy == "teacher"), None)
    labeled = [("before", before), (f"after {after.step} steps" if after else "after", after)]
    labeled.append(("teacher, with its context", teacher))
    numbers = "".join(render_number(name, *_score(e)) for name, e in labeled if e is not None)
    if comparison is not None:
        numbers += _render_difference(comparison)
    intervals = [
        Interval(
            name=name.split(",")[0].split(" ")[0],
            value=e.mean_score,
            low=e.ci_low,
            high=e.ci_high,
        )
        for name, e in labeled
        if e is not None and e.mean_score == e.mean_score
    ]
    caption = (
        f"Mean score on {len(before.scores)} held-out tasks ({before.split}), with 95% intervals."
    )
    plot = interval_plot(intervals, title=caption) if intervals else ""
    body = f'<div class="numbers">{numbers}</div>{plot}<p class="caption">{caption}</p>'
    return _render_section("Result", body + _render_scores(suites))


def _render_scores(suites: Mapping[str, Pair]) -> str:
    """Scores by suite, where the recipe has further suites."""
    suites_of_student = {policy: pair for policy, pair in suites.items() if is_student(policy)}
    rows = (
        f"<tr><th>{escape(policy)}</th><td>{len(before.scores)} {before.split}</td>"
        f"<td>{_render_score(before)}</td><td>{_render_score(after)}</td></tr>"
        for policy, (before, after) in suites_of_student.items()
    )
    heads = ["policy", "tasks", "score before", "score after"]
    return render_table(heads, rows) if len(suites_of_student) > 1 else ""


def _render_score(evaluation: Evaluation | None) -> str:
    return "–" if evaluation is None else render_interval(*_score(evaluation))


def _score(evaluation: Evaluation) -> tuple[float, float, float]:
    return evaluation.mean_score, evaluation.ci_low, evaluation.ci_high


def _render_difference(comparison: Comparison) -> str:
    mean, low, high, p_value = comparison
    chance = f"p = {p_value:.2g}" if p_value >= 0.001 else "p < 0.001"
    return (
        f'<div class="number difference"><span>paired difference, in points</span>'
        f"<b>{format_points(mean)}</b>"
        f"<small>{format_points(low)} to {format_points(high)}, {escape(chance)}</small></div>"
    )


def _render_costs(costs: Mapping[str, PhaseCost]) -> str:
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


def _render_pairs(evaluations: Sequence[Evaluation]) -> str:
    before, after = first_and_last_evaluation(evaluations)
    return "" if before is None or after is None else "".join(
        render_pairs(before, after, NUM_SAMPLES)
    )  # fmt: skip


def _read_first_and_last(folder: RunFolder) -> list[list[StoredTrajectory]]:
    """Trajectories of the last and the first stored step, or of the only one."""
    steps = folder.trajectory_steps()
    ends = dict.fromkeys((steps[-1], steps[0]) if steps else ())
    return [folder.trajectories(step) for step in ends]


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


def _render_facts(values: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{escape(str(key).replace('_', ' '))}</th><td>{escape(str(value))}</td></tr>"
        for key, value in values.items()
        if value is not None
    )
    return f'<table class="facts"><tbody>{rows}</tbody></table>' if rows else ""


def _smoothing_note(metrics: Sequence[Any]) -> str:
    if len(metrics) < SMOOTH_FROM:
        return ""
    return '<p class="caption">Faint lines: every step. Strong lines: moving average.</p>'


def _render_grid(figures: Sequence[str]) -> str:
    if not figures:
        return '<p class="empty">No step has been recorded.</p>'
    return f'<div class="grid">{"".join(figures)}</div>'


def _render_section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def _render_folded(title: str, body: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{body}</details>"
