"""A comparison as one self-contained HTML page: a table beside every curve, no scripts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from courtside.comparison.budgets import EqualBudget
from courtside.comparison.comparison import ArmSummary, Comparison
from courtside.comparison.differences import Interval
from courtside.comparison.formats import (
    NOT_MEASURED,
    UNIT_NAMES,
    UNIT_TITLES,
    describe_tasks,
    format_p,
    format_spent,
)
from courtside.comparison.runs import STEPS, UNITS
from courtside.report.folder import files
from courtside.report.page.layout import Section, render_page
from courtside.report.page.svg import NUM_COLORS, Series, interval_plot, line_chart
from courtside.report.page.svg import Interval as PlotInterval
from courtside.report.page.tables import render_table
from courtside.report.summary import format_percent, format_points


def write_page(comparison: Comparison, path: Path) -> Path:
    names = [arm.name for arm in comparison.arms]
    num_runs = sum(len(arm.seeds) for arm in comparison.arms)
    page = render_page(
        title=" · ".join(names) if len(names) <= 4 else f"{len(names)} arms",
        summary=f"Comparison on {describe_tasks(comparison.tasks)}",
        progress=f"{len(names)} arms, {num_runs} runs",
        alerts=_render_notes(comparison.notes),
        sections=[
            Section("Scores", _render_scores(comparison)),
            Section("Differences", _render_differences(comparison)),
            Section("Costs", _render_costs(comparison)),
            Section("Score against what was spent", _render_curves(comparison)),
            Section("Scores at equal budgets", _render_budgets(comparison)),
            Section("What differs in the recipes", _render_settings(comparison.arms)),
            Section("Runs", _render_runs(comparison.arms), is_folded=True),
        ],
    )
    files.write_page(path, page)
    return path


def _render_notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<section class="notes"><h2>To know</h2><ul>{items}</ul></section>'


def _render_scores(comparison: Comparison) -> str:
    intervals = [
        PlotInterval(
            name=arm.name,
            value=arm.after.mean,
            low=arm.after.low,
            high=arm.after.high,
        )
        for arm in comparison.arms
    ]
    rows = (
        f"<tr><th>{escape(arm.name)}</th><td>{len(arm.seeds)}</td><td>{_render_score(arm.before)}"
        f"</td><td>{_render_score(arm.after)}</td><td>{_render_points(arm.gain)}</td></tr>"
        for arm in comparison.arms
    )
    heads = ["arm", "seeds", "score before", "score after", "gain, points"]
    caption = (
        f"Mean score on {describe_tasks(comparison.tasks)}, with 95% intervals: Student's t over "
        "seeds, or over tasks where there is one seed."
    )
    return (
        interval_plot(intervals, title=caption)
        + f'<p class="caption">{escape(caption)}</p>'
        + render_table(heads, rows)
    )


def _render_differences(comparison: Comparison) -> str:
    if not comparison.differences:
        return ""
    rows = (
        f"<tr><th>{escape(d.first)} minus {escape(d.other)}</th>"
        f"<td>{_render_points(d.interval)}</td><td>{escape(format_p(d.p_value))}</td><td>{PAIRINGS[d.pairing]}</td><td>{d.interval.num_seeds}</td>"
        f"<td>{escape(d.interval.method)}</td></tr>"
        for d in comparison.differences
    )
    heads = ["difference", "points", "p", "paired by", "seeds", "interval covers"]
    caption = (
        "Scores after training, of the same tasks. p-values are not corrected for the number of "
        "pairs: a contrast that was not fixed before the runs suggests, and decides nothing."
    )
    return render_table(heads, rows) + f'<p class="caption">{caption}</p>'


PAIRINGS = {"seeds": "seed", "tasks": "task", "none": "not paired (Welch)"}


def _render_costs(comparison: Comparison) -> str:
    units = _used_units(comparison)
    total_rows = (_cost_row(arm.name, arm.spent, units) for arm in comparison.arms)
    point_rows = (_point_row(arm, units) for arm in comparison.arms)
    heads = ["arm", *(UNIT_NAMES[unit] for unit in units)]
    money = (
        ""
        if comparison.price_per_hour is None
        else f" Money: {comparison.price_per_hour:g} for an hour of the machine."
    )
    caption = (
        "Mean over runs, of training alone: evaluations and checkpoints are not part of it. FLOPs "
        "are estimated from parameters and tokens. Seconds are wall-clock time of the runs as they "
        f"were made: runs that shared a machine slowed each other down.{money}"
    )
    return (
        render_table(heads, total_rows)
        + f'<p class="caption">{escape(caption)}</p><h3>For each percentage point gained</h3>'
        + render_table(heads, point_rows)
        + '<p class="caption">What was spent over the gain in points; no gain: the score '
        "after training is not above that before.</p>"
    )


def _cost_row(name: str, values: dict[str, float | None], units: Sequence[str]) -> str:
    cells = "".join(f"<td>{format_spent(unit, values[unit])}</td>" for unit in units)
    return f"<tr><th>{escape(name)}</th>{cells}</tr>"


def _point_row(arm: ArmSummary, units: Sequence[str]) -> str:
    if arm.gain is not None and arm.gain.mean <= 0:
        return f"<tr><th>{escape(arm.name)}</th>{'<td>no gain</td>' * len(units)}</tr>"
    return _cost_row(arm.name, arm.per_point, units)


def _used_units(comparison: Comparison) -> list[str]:
    """Money only with a price; all else is a column also where it is not measured."""
    return [unit for unit in UNITS if unit != "money" or comparison.price_per_hour is not None]


# ── curves ───────────────────────────────────────────────────────────────────────────────────────


def _render_curves(comparison: Comparison) -> str:
    if comparison.curve_tasks is None:
        return ""
    caption = (
        f'<p class="caption">Mean score on {escape(describe_tasks(comparison.curve_tasks))}; bars '
        "are 95% intervals over seeds, or over tasks where there is one seed.</p>"
    )
    blocks = [_render_curve(comparison, unit) for unit in _used_units(comparison)]
    return caption + "".join(blocks)


def _render_curve(comparison: Comparison, unit: str) -> str:
    arms = [arm.name for arm in comparison.arms]
    points = {name: [p for p in comparison.curves if p.arm == name] for name in arms}
    # Nothing is spent before the first step, also where nothing is measured.
    missing = [name for name in arms if any(p.spent[unit] is None for p in points[name])]
    note = ""
    if missing:
        names = escape(", ".join(missing))
        note = f'<p class="caption">{UNIT_NAMES[unit]}: not measured in {names}.</p>'
    measured = [name for name in arms if name not in missing]
    blocks = []
    for start in range(0, len(measured), NUM_COLORS):
        series = [
            Series(
                name=name,
                points=tuple((p.spent[unit] or 0.0, p.score.mean) for p in points[name]),
                bars=tuple((p.score.low, p.score.high) for p in points[name]),
            )
            for name in measured[start : start + NUM_COLORS]
        ]
        title = f"Score against {UNIT_TITLES[unit]}"
        chart = line_chart(
            series,
            title=title,
            x_label=UNIT_NAMES[unit],
            y_label="mean score",
            as_percent=True,
            format_x=None if unit == STEPS else lambda value: format_spent(unit, value),
        )
        rows = (
            f"<tr><th>{escape(name)}</th><td>{p.step}</td>"
            + (f"<td>{format_spent(unit, p.spent[unit])}</td>" if unit != STEPS else "")
            + f"<td>{_render_score(p.score)}</td></tr>"
            for name in measured[start : start + NUM_COLORS]
            for p in points[name]
        )
        heads = ["arm", "step", *([UNIT_NAMES[unit]] if unit != STEPS else []), "score"]
        table = render_table(heads, rows)
        blocks.append(
            f'<div class="curve">{chart}<div class="values" tabindex="0" role="region" '
            f'aria-label="{escape(title)}, as a table">{table}</div></div>'
        )
    return "".join(blocks) + note


def _render_budgets(comparison: Comparison) -> str:
    if not comparison.budgets:
        return ""
    arms = [arm.name for arm in comparison.arms]
    units = list(dict.fromkeys(budget.unit for budget in comparison.budgets))
    blocks = []
    for unit in units:
        of_unit = [budget for budget in comparison.budgets if budget.unit == unit]
        heads = [UNIT_NAMES[unit], *arms]
        blocks.append(
            f"<h3>{escape(UNIT_NAMES[unit])}</h3>"
            + render_table(heads, (_budget_row(b, arms) for b in of_unit))
            + _render_budget_differences(of_unit[-1])
        )
    skipped = [UNIT_NAMES[unit] for unit in _used_units(comparison) if unit not in units]
    note = ""
    if skipped:
        note = (
            f'<p class="caption">No common budget of {escape(", ".join(skipped))}: not measured in '
            "all runs, or an arm spends none.</p>"
        )
    caption = (
        '<p class="caption">What each arm scores once it has spent the same: between the two '
        "evaluations around that budget, by linear interpolation in each run, and only inside the "
        "range that every run has measured. The last row of a table is the largest budget that all "
        "runs have spent.</p>"
    )
    return caption + "".join(blocks) + note


def _budget_row(budget: EqualBudget, arms: Sequence[str]) -> str:
    cells = "".join(f"<td>{_render_score(budget.scores[arm])}</td>" for arm in arms)
    return f"<tr><th>{format_spent(budget.unit, budget.budget)}</th>{cells}</tr>"


def _render_budget_differences(budget: EqualBudget) -> str:
    measured = [
        f"{escape(name)} <b>{format_points(interval.mean)}</b> points "
        f"({format_points(interval.low)} to {format_points(interval.high)})"
        for name, interval in budget.differences.items()
        if interval is not None
    ]
    if not measured:
        return ""
    where = format_spent(budget.unit, budget.budget)
    return (
        f'<p class="caption">At {where}, paired by seed, interval over seeds: '
        f"{'; '.join(measured)}.</p>"
    )


# ── recipes and runs ─────────────────────────────────────────────────────────────────────────────


def _render_settings(arms: Sequence[ArmSummary]) -> str:
    if len(arms) < 2:
        return ""
    rows: Iterable[str] = (
        f'<tr><th>{escape(arm.name)}</th><td class="settings">'
        f"{'<br>'.join(map(escape, arm.settings)) or 'nothing'}</td></tr>"
        for arm in arms[1:]
    )
    return render_table(["arm", f"against {arms[0].name}"], rows)


def _render_runs(arms: Sequence[ArmSummary]) -> str:
    rows = (
        f"<tr><th>{escape(arm.name)}</th><td>{seed}</td><td>{escape(run)}</td></tr>"
        for arm in arms
        for seed, run in zip(arm.seeds, arm.runs, strict=True)
    )
    return render_table(["arm", "seed", "folder"], rows)


def _render_score(interval: Interval | None) -> str:
    if interval is None:
        return NOT_MEASURED
    if not interval.method:
        return f"<b>{format_percent(interval.mean)}</b>"
    ends = f"{format_percent(interval.low)} to {format_percent(interval.high)}"
    return f"<b>{format_percent(interval.mean)}</b> <small>{ends}</small>"


def _render_points(interval: Interval | None) -> str:
    if interval is None:
        return NOT_MEASURED
    if not interval.method:
        return f"<b>{format_points(interval.mean)}</b>"
    ends = f"{format_points(interval.low)} to {format_points(interval.high)}"
    return f"<b>{format_points(interval.mean)}</b> <small>{ends}</small>"
