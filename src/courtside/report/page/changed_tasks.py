"""The same held-out tasks before and after training: fixed and broken ones first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from courtside.report.evaluation_pairs import ChangedTasks, Pair, find_changed_tasks
from courtside.report.page.reading import FolderReader, GradedId
from courtside.report.page.samples import render_answer, render_prompt
from courtside.report.page.tables import render_table
from courtside.types import Evaluation, Trajectory

NUM_SHOWN = {"fixed": 3, "broken": 3, "same": 1}
"""Cards of each kind and suite. Of the same: one, where nothing or little changed."""
TITLES = {"fixed": "Fixed", "broken": "Broken", "same": "Unchanged"}


def render_changed_tasks(pairs: Mapping[str, Pair], reader: FolderReader) -> str:
    """A table of counts by suite, then cards; empty while nothing was evaluated twice."""
    twice = [(policy, before, after) for policy, (before, after) in pairs.items() if after]
    changes = [(policy, find_changed_tasks(before, after)) for policy, before, after in twice]
    if not changes:
        return ""
    caption = (
        '<p class="caption">Fixed: the score of the task rose. Broken: it fell. Shown are the '
        "largest changes of each.</p>"
    )
    cards = "".join(
        _render_suite(policy if len(twice) > 1 else "", (before, after), tasks, reader)
        for (policy, before, after), (_, tasks) in zip(twice, changes, strict=True)
    )
    return f"{caption}{_render_counts(changes)}{cards}"


def _render_counts(changes: Sequence[tuple[str, ChangedTasks]]) -> str:
    rows = (
        f"<tr><th>{escape(policy)}</th><td>{len(tasks.fixed)}</td><td>{len(tasks.broken)}</td>"
        f"<td>{len(tasks.same)}</td></tr>"
        for policy, tasks in changes
    )
    return render_table(["policy", "fixed", "broken", "unchanged"], rows)


def _render_suite(
    policy: str, pair: tuple[Evaluation, Evaluation], tasks: ChangedTasks, reader: FolderReader
) -> str:
    before, after = pair
    grades = [reader.grades_by_task(evaluation) for evaluation in pair]
    selected = _select_tasks(tasks, grades)
    first, last = (
        reader.answers(
            evaluation,
            {
                _pick_answer(by_task[task], kind, is_before=evaluation is before)
                for kind, group in selected.items()
                for task in group
            },
        )
        for evaluation, by_task in zip(pair, grades, strict=True)
    )
    parts: list[str] = []
    for kind, group in selected.items():
        cards = [
            _render_pair(first[task], last[task], before, after)
            for task in group
            if task in first and task in last
        ]
        if cards:
            suite = f", {escape(policy)}" if policy else ""
            count = f"{len(cards)} of {len(getattr(tasks, kind))}"
            parts += [f"<h3>{TITLES[kind]}{suite} <small>{count}</small></h3>", *cards]
    return "".join(parts)


def _select_tasks(
    tasks: ChangedTasks, grades: Sequence[Mapping[str, Sequence[GradedId]]]
) -> dict[str, list[str]]:
    """By kind of change, of those tasks with answers before and after."""
    selected = {
        kind: [id for id in ids if all(id in by_task for by_task in grades)][: NUM_SHOWN[kind]]
        for kind, ids in tasks._asdict().items()
    }
    if selected["fixed"] or selected["broken"]:
        selected["same"] = []
    return selected


def _pick_answer(answers: Sequence[GradedId], kind: str, *, is_before: bool) -> str:
    """Of several samples of a task the one that tells most about its change."""
    if kind == "same":
        return answers[0].id
    pick = max if (kind == "broken") == is_before else min
    return pick(answers, key=lambda answer: answer.score).id


def _render_pair(first: Trajectory, last: Trajectory, before: Evaluation, after: Evaluation) -> str:
    task = first.task.id
    scores = f"score {before.scores[task]:.3g} → {after.scores[task]:.3g}"
    return (
        f'<article class="sample"><header><span>{escape(scores)}</span></header>'
        f'{render_prompt(first)}<div class="pair">{render_answer("before", first)}'
        f"{render_answer(f'after {after.step} steps', last)}</div></article>"
    )
