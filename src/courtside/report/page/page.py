"""`report.html`: a run on one page that needs nothing else: no network, no scripts.

Reads the run folder only. Every text that a model, a task or a recipe wrote is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from courtside.recipe import Recipe
from courtside.report.folder import toml
from courtside.report.folder.atomic_files import replace_file
from courtside.report.folder.folder import RunFolder
from courtside.report.folder.locking import recipe_tree
from courtside.report.folder.parquet import StoredTrajectory
from courtside.report.metrics import is_multi_turn
from courtside.report.page.curves import error_figure, evaluation_figure, is_student, metric_figures
from courtside.report.page.errors import Pair, error_rates
from courtside.report.page.hints import hints_section
from courtside.report.page.moved_tokens import moved_table, moved_tokens
from courtside.report.page.samples import before_after, choose, coloured, telling
from courtside.report.page.svg import SMOOTH_FROM, Interval, interval_plot
from courtside.report.page.tables import table
from courtside.report.page.token_gaps import Decode, legend
from courtside.report.page.transcript import episode
from courtside.report.summary import compact, duration, percent, points, summarize_recipe
from courtside.types import Evaluation, PhaseCost

NUM_SAMPLES = 4
"""Of each kind."""

Comparison = tuple[float, float, float, float]
"""Paired difference after − before: mean, low and high end of its 95% interval, p-value."""


def write_report(
    folder: RunFolder, *, comparison: Comparison | None = None, decode: Decode | None = None
) -> Path:
    """Write the page into the run folder.

    `comparison` is of the evaluations that `before_and_after` picks. Without `decode`, answers are
    shown without the teacher's colours: the stored text is per turn, not per token.
    """
    recipe, metrics = folder.recipe(), folder.metrics()
    evaluations = folder.evaluations()
    main, rest = metric_figures(metrics)
    held_out = [error_figure(evaluations), evaluation_figure(evaluations)]
    main = [figure for figure in held_out if figure is not None] + main
    stored, suites = _ends(folder), _suites(evaluations)
    sections = [
        _alarms(folder.alarms()),
        _headline(evaluations, comparison, suites),
        _section("Errors", error_rates(suites)),
        _section("Over the run", _grid(main) + _note(metrics)),
        _folded("More curves", _grid(rest)) if rest else "",
        _section("Hints", hints_section(folder, metrics, decode)),
        _section("Tokens that moved", _moved(stored, decode)),
        _section("Costs", _costs(folder.read_costs())),
        _section("The same tasks before and after", _pairs(evaluations)),
        _section("Episodes", _episodes(stored, decode)),
        _section("What the teacher made of the student's answers", _training(stored, decode)),
        _section("Environment", _table(folder.environment())),
        _folded("Recipe", _recipe(recipe)),
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


def before_and_after(
    evaluations: Sequence[Evaluation], policy: str = "student"
) -> tuple[Evaluation | None, Evaluation | None]:
    """The first and the last evaluation of the student on one split: the test one, if it has two.

    Validation scores choose between checkpoints, so they flatter; they speak only for want of test
    scores. After is None while there is only one.
    """
    students = [one for one in evaluations if one.policy == policy]
    for split in ("test", "validation", "train"):
        mine = sorted((one for one in students if one.split == split), key=lambda one: one.step)
        if mine and mine[-1].step > mine[0].step:
            return mine[0], mine[-1]
    return (students[0], None) if students else (None, None)


def _suites(evaluations: Sequence[Evaluation]) -> dict[str, Pair]:
    """The student's own tasks first, then whatever else was evaluated."""
    names = [
        "student",
        *dict.fromkeys(one.policy for one in evaluations if one.policy != "student"),
    ]
    pairs = {policy: before_and_after(evaluations, policy) for policy in names}
    return {
        policy: (before, after) for policy, (before, after) in pairs.items() if before is not None
    }


def _headline(
    evaluations: Sequence[Evaluation], comparison: Comparison | None, suites: Mapping[str, Pair]
) -> str:
    before, after = before_and_after(evaluations)
    if before is None:
        return _section("Result", '<p class="empty">No evaluation has been recorded.</p>')
    teacher = next((one for one in evaluations if one.policy == "teacher"), None)
    named = [("before", before), (f"after {after.step} steps" if after else "after", after)]
    named.append(("teacher, with its context", teacher))
    numbers = "".join(_number(name, one) for name, one in named if one is not None)
    if comparison is not None:
        numbers += _difference(comparison)
    intervals = [
        Interval(
            name=name.split(",")[0].split(" ")[0],
            value=one.mean_score,
            low=one.ci_low,
            high=one.ci_high,
        )
        for name, one in named
        if one is not None and one.mean_score == one.mean_score
    ]
    caption = (
        f"Mean score on {len(before.scores)} held-out tasks ({before.split}), with 95% intervals."
    )
    plot = interval_plot(intervals, title=caption) if intervals else ""
    body = f'<div class="numbers">{numbers}</div>{plot}<p class="caption">{caption}</p>'
    return _section("Result", body + _scores(suites))


def _scores(suites: Mapping[str, Pair]) -> str:
    """Of further tasks beside the recipe's own, where there are any."""
    mine = {policy: pair for policy, pair in suites.items() if is_student(policy)}
    rows = (
        f"<tr><th>{escape(policy)}</th><td>{len(before.scores)} {before.split}</td>"
        f"<td>{_rate(before)}</td><td>{_rate(after)}</td></tr>"
        for policy, (before, after) in mine.items()
    )
    heads = ["evaluated", "tasks", "score before", "score after"]
    return table(heads, rows) if len(mine) > 1 else ""


def _rate(evaluation: Evaluation | None) -> str:
    if evaluation is None:
        return "–"
    ends = f"{percent(evaluation.ci_low)} to {percent(evaluation.ci_high)}"
    return f"<b>{percent(evaluation.mean_score)}</b> <small>{ends}</small>"


def _number(name: str, evaluation: Evaluation) -> str:
    ends = f"{percent(evaluation.ci_low)} to {percent(evaluation.ci_high)}"
    return (
        f'<div class="number"><span>{escape(name)}</span><b>{percent(evaluation.mean_score)}</b>'
        f"<small>{ends}</small></div>"
    )


def _difference(comparison: Comparison) -> str:
    mean, low, high, p_value = comparison
    chance = f"p = {p_value:.2g}" if p_value >= 0.001 else "p < 0.001"
    return (
        f'<div class="number difference"><span>paired difference, in points</span>'
        f"<b>{points(mean)}</b>"
        f"<small>{points(low)} to {points(high)}, {escape(chance)}</small></div>"
    )


def _costs(costs: Mapping[str, PhaseCost]) -> str:
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
        f"<tr{kind}><th>{escape(name)}</th><td>{duration(cost.seconds)}</td>"
        f"<td>{_share(cost.seconds, seconds)}</td><td>{cost.input_tokens:,}</td>"
        f"<td>{cost.output_tokens:,}</td><td>{compact(cost.flops)}</td>"
        f"<td>{_share(cost.flops, flops)}</td></tr>"
        for name, cost, kind in rows
    )
    heads = ["phase", "time", "of the time", "tokens read", "tokens written", "FLOPs"]
    return table([*heads, "of the FLOPs"], lines)


def _share(part: float, whole: float) -> str:
    percent = 100 * part / whole if whole else 0.0
    bar = f'<span class="meter"><i style="width:{percent:.1f}%"></i></span>'
    return f'{bar}<span class="percent">{percent:.0f}%</span>'


def _pairs(evaluations: Sequence[Evaluation]) -> str:
    before, after = before_and_after(evaluations)
    return "" if before is None or after is None else "".join(
        before_after(before, after, NUM_SAMPLES)
    )  # fmt: skip


def _ends(folder: RunFolder) -> list[list[StoredTrajectory]]:
    """Of the last and the first stored step, or of the only one."""
    steps = folder.trajectory_steps()
    ends = dict.fromkeys((steps[-1], steps[0]) if steps else ())
    return [folder.trajectories(step) for step in ends]


def _moved(ends: Sequence[Sequence[StoredTrajectory]], decode: Decode | None) -> str:
    if decode is None:
        return ""
    found = [(step[0].step, moved_tokens(step, decode)) for step in reversed(ends) if step]
    tables = [f"<h3>Step {step}</h3>{moved_table(moved)}" for step, moved in found if moved]
    caption = (
        '<p class="caption">Of turns with a hint that trains: the tokens whose probability is most '
        "different with the hint above them. Point at a line to read its hint.</p>"
    )
    return caption + "".join(tables) if tables else ""


def _episodes(ends: Sequence[Sequence[StoredTrajectory]], decode: Decode | None) -> str:
    cards = [
        episode(stored, decode, unfolded=number == place == 0)
        for place, step in enumerate(ends)
        for number, stored in enumerate(
            choose(telling([one for one in step if _is_episode(one)]), NUM_SAMPLES)
        )
    ]
    if not cards:
        return ""
    caption = (
        '<p class="caption">From the last and the first stored step, those with hints and errors '
        "first.</p>"
    )
    return caption + (legend() if decode is not None else "") + "".join(cards)


def _is_episode(stored: StoredTrajectory) -> bool:
    """What is told turn by turn; single answers are not, unless there are hints."""
    return is_multi_turn(stored.trajectory) or bool(stored.hints)


def _training(ends: Sequence[Sequence[StoredTrajectory]], decode: Decode | None) -> str:
    cards = [
        coloured(stored, decode)
        for step in ends
        for stored in choose([one for one in step if not _is_episode(one)], NUM_SAMPLES)
    ]
    if not cards:
        return ""
    return (legend() if decode is not None else "") + "".join(cards)


def _alarms(alarms: Sequence[Mapping[str, Any]]) -> str:
    if not alarms:
        return ""
    items = "".join(
        f"<li>{escape(' · '.join(f'{key}: {value}' for key, value in alarm.items()))}</li>"
        for alarm in alarms
    )
    return f'<section class="alarms"><h2>Alarms</h2><ul>{items}</ul></section>'


def _recipe(recipe: Recipe) -> str:
    return f"<pre>{escape(toml.dumps(recipe_tree(recipe)))}</pre>"


def _table(values: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{escape(str(key).replace('_', ' '))}</th><td>{escape(str(value))}</td></tr>"
        for key, value in values.items()
        if value is not None
    )
    return f'<table class="facts"><tbody>{rows}</tbody></table>' if rows else ""


def _note(metrics: Sequence[Any]) -> str:
    if len(metrics) < SMOOTH_FROM:
        return ""
    return '<p class="caption">Faint: every step. Strong: a moving average.</p>'


def _grid(figures: Sequence[str]) -> str:
    if not figures:
        return '<p class="empty">No step has been recorded.</p>'
    return f'<div class="grid">{"".join(figures)}</div>'


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def _folded(title: str, body: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{body}</details>"
