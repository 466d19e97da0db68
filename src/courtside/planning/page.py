"""A plan as one self-contained page, in the style of a run's report."""

from __future__ import annotations

from html import escape
from pathlib import Path

from courtside.planning.pipeline import PipelinePlan
from courtside.planning.plan import CostPlan
from courtside.planning.text import (
    Rows,
    change_rows,
    headline,
    memory_rows,
    phase_rows,
    pipeline_headline,
    pipeline_lines,
    stage_rows,
    summary_lines,
)
from courtside.report.folder.files import write_page
from courtside.report.page.layout import Section, render_page
from courtside.report.page.tables import render_table


def write_plan_page(plan: CostPlan | PipelinePlan, path: Path) -> None:
    if isinstance(plan, PipelinePlan):
        text, sections = pipeline_headline(plan), _list_all_sections(plan)
    else:
        text, sections = headline(plan), _list_sections(plan)
    summary, _, where = text.partition("\n")
    page = render_page(title="Plan", summary=summary, progress=where, alerts="", sections=sections)
    write_page(path, page)


def _list_all_sections(pipeline: PipelinePlan) -> list[Section]:
    """All stages, then each of them."""
    sections = [
        Section("In short", _render_lines(pipeline_lines(pipeline))),
        Section("Stages", _render_rows(stage_rows(pipeline))),
    ]
    for name, plan in pipeline.stages.items():
        parts = [f"<p>{escape(plan.recipe)}</p>"]
        parts += [f"<h3>{s.title}</h3>{s.body}" for s in _list_sections(plan) if s.body]
        sections.append(Section(f"Stage {name}", "".join(parts)))
    return sections


def _list_sections(plan: CostPlan) -> list[Section]:
    return [
        Section("In short", _render_lines(summary_lines(plan))),
        Section("Time and FLOPs", _render_rows(phase_rows(plan))),
        Section("Memory", _render_rows(memory_rows(plan))),
        Section("Changes", _render_rows(change_rows(plan)) if plan.changes else ""),
        Section("Assumptions", _render_lines(plan.assumptions)),
        Section("Notes", _render_lines(plan.notes)),
    ]


def _render_rows(rows: Rows) -> str:
    columns, cells = rows
    lines = [
        f"<tr><th>{escape(row[0])}</th>{''.join(f'<td>{escape(c)}</td>' for c in row[1:])}</tr>"
        for row in cells
    ]
    return render_table(columns, lines)


def _render_lines(lines: list[str] | tuple[str, ...]) -> str:
    if not lines:
        return ""
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"
