"""`report.html` of a pipeline: its stages, their scores side by side, gates and costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from courtside.report.costs import PhaseCost
from courtside.report.evaluation_pairs import Difference
from courtside.report.folder.files import replace_file
from courtside.report.folder.pipeline_folder import PROMOTED, STAGES, GateDecision, PipelineFolder
from courtside.report.page.layout import Section, render_page
from courtside.report.page.page import render_costs, render_facts, render_problems
from courtside.report.page.tables import (
    render_difference,
    render_interval,
    render_mark,
    render_table,
)
from courtside.report.summary import format_duration
from courtside.types import Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSummary:
    name: str
    """Of its folder."""
    summary: str
    """Its recipe in a line; empty: it has not begun."""
    num_steps: int
    total_steps: int
    costs: Mapping[str, PhaseCost]
    gate: GateDecision | None
    has_report: bool

    @property
    def seconds(self) -> float:
        return sum(cost.seconds for cost in self.costs.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRow:
    """Scores of the same tasks by one student along the pipeline."""

    label: str
    num_tasks: int
    split: str
    before: Evaluation | None
    after: Mapping[str, Evaluation]
    """By folder name of the stage that ended with it."""
    difference: Difference | None
    """Of the last minus the first."""


def write_pipeline_page(
    folder: PipelineFolder,
    stages: Sequence[StageSummary],
    scores: Sequence[ScoreRow],
    problems: Sequence[str],
) -> Path:
    num_done = sum(stage.num_steps == stage.total_steps > 0 for stage in stages)
    sections = [
        Section("Stages", _render_stages(stages)),
        Section("Gates", _render_gates(folder, stages)),
        Section("Scores along the pipeline", _render_scores(scores)),
        Section("Costs of all stages", render_costs(sum_costs([s.costs for s in stages]))),
        Section("Environment", render_facts(folder.environment)),
    ]
    page = render_page(
        title=folder.path.resolve().name,
        summary=" → ".join(stage.name for stage in stages),
        progress=f"{num_done} of {len(stages)} stages",
        alerts=render_problems(problems),
        sections=sections,
    )
    path = folder.path / "report.html"
    replace_file(path, page)
    return path


def sum_costs(costs: Sequence[Mapping[str, PhaseCost]]) -> dict[str, PhaseCost]:
    """By phase, in the order of their first appearance."""
    total: dict[str, PhaseCost] = {}
    for stage in costs:
        for phase, cost in stage.items():
            so_far = total.get(phase, PhaseCost())
            total[phase] = PhaseCost(
                seconds=so_far.seconds + cost.seconds,
                input_tokens=so_far.input_tokens + cost.input_tokens,
                output_tokens=so_far.output_tokens + cost.output_tokens,
                flops=so_far.flops + cost.flops,
            )
    return total


def _render_stages(stages: Sequence[StageSummary]) -> str:
    rows = []
    for stage in stages:
        name = escape(stage.name)
        if stage.has_report:
            name = f'<a href="{STAGES}/{name}/report.html">{name}</a>'
        verdict = "–" if stage.gate is None else "passed" if stage.gate.passed else "failed"
        mark = render_mark("failed") if verdict == "failed" else escape(verdict)
        steps = f"{stage.num_steps} of {stage.total_steps}" if stage.summary else "not begun"
        rows.append(
            f"<tr><th>{name}</th><td>{escape(stage.summary)}</td><td>{steps}</td>"
            f"<td>{format_duration(stage.seconds) if stage.costs else '–'}</td><td>{mark}</td></tr>"
        )
    return render_table(["stage", "recipe", "steps", "time", "gate"], rows)


def _render_gates(folder: PipelineFolder, stages: Sequence[StageSummary]) -> str:
    lines = []
    for stage in stages:
        if stage.gate is not None:
            result = f"It is not promoted; the pipeline ended after {stage.name}."
            if stage.gate.passed:
                result = f"It was promoted: {PROMOTED} → {STAGES}/{stage.name}/export."
            lines.append(f"<li>{escape(f'{stage.name}: {stage.gate}. {result}')}</li>")
    return f"<ul>{''.join(lines)}</ul>" if lines else ""


def _render_scores(scores: Sequence[ScoreRow]) -> str:
    if not scores:
        return ""
    names = list(dict.fromkeys(name for row in scores for name in row.after))
    rows = (
        f"<tr><th>{escape(row.label)}</th><td>{row.num_tasks} {escape(row.split)}</td>"
        + "".join(f"<td>{_render_score(e)}</td>" for e in (row.before, *map(row.after.get, names)))
        + f"<td>{render_difference(row.difference)}</td></tr>"
        for row in scores
    )
    heads = ["suite", "tasks", "before", *(f"after {name}" for name in names)]
    caption = (
        '<p class="caption">Mean scores of the same tasks, with 95% intervals. The difference is '
        "paired: the last minus the first, in percentage points.</p>"
    )
    return render_table([*heads, "difference, points"], rows) + caption


def _render_score(evaluation: Evaluation | None) -> str:
    if evaluation is None:
        return "–"
    return render_interval(evaluation.mean_score, evaluation.ci_low, evaluation.ci_high)
