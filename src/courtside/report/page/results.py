"""Held-out scores before and after training, by suite, with paired differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from courtside.report.evaluation_pairs import (
    Difference,
    Differences,
    Pair,
    first_and_last_evaluation,
)
from courtside.report.page.curves import is_student
from courtside.report.page.svg import Interval, interval_plot
from courtside.report.page.tables import (
    render_difference,
    render_interval,
    render_number,
    render_table,
)
from courtside.report.summary import format_number, format_points
from courtside.types import Evaluation


def render_result(
    evaluations: Sequence[Evaluation], differences: Differences, suites: Mapping[str, Pair]
) -> str:
    before, after = first_and_last_evaluation(evaluations)
    if before is None and any(is_student(policy) for policy in suites):
        return _render_scores(suites, differences)  # nothing answers the student in its own tasks
    if before is None:
        return '<p class="empty">No evaluation has been recorded.</p>'
    teacher = next((e for e in evaluations if e.policy == "teacher"), None)
    labeled = [(_label(e), e) for e in (before, after) if e is not None]
    labeled += [("teacher, with its context", teacher)] if teacher is not None else []
    numbers = "".join(render_number(name, *_score(e)) for name, e in labeled)
    if ("student", "score") in differences:
        numbers += _render_difference_card(differences["student", "score"])
    intervals = [
        Interval(
            name=name.split(",")[0].split(" ")[0],
            value=e.mean_score,
            low=e.ci_low,
            high=e.ci_high,
        )
        for name, e in labeled
        if e.mean_score == e.mean_score
    ]
    caption = (
        f"Mean score on {len(before.scores)} held-out tasks ({before.split}), with 95% intervals. "
        "The difference is paired: of the same tasks, after minus before, in percentage points."
    )
    plot = interval_plot(intervals, title=caption) if intervals else ""
    body = f'<div class="numbers">{numbers}</div>{plot}<p class="caption">{caption}</p>'
    return body + _render_scores(suites, differences) + render_memorization(evaluations)


def render_memorization(evaluations: Sequence[Evaluation]) -> str:
    """The prompts that train beside held-out ones, where the recipe has few (`tasks.limit`)."""
    students = [e for e in evaluations if e.policy == "student" and e.split in ("train", "test")]
    if all(e.split == "test" for e in students):
        return ""
    rows = (
        f"<tr><th>{'trained prompts' if e.split == 'train' else 'held-out prompts'}</th>"
        f"<td>{e.step}</td><td>{len(e.scores)}</td><td>{_render_score(e)}</td>"
        f"<td>{format_number(e.metrics.get('completion_logp'))}</td></tr>"
        for e in sorted(students, key=lambda e: (e.split != "train", e.step))
    )
    heads = ["memorization", "step", "tasks", "score", "log-prob of the completions, per token"]
    return render_table(heads, rows)


def render_further_evaluations(evaluations: Sequence[Evaluation]) -> str:
    """Those that `courtside evaluate` added; empty without any."""
    rows = [
        f"<tr><th>{escape(e.policy)}</th><td>{e.step}</td><td>{len(e.scores)} {e.split}</td>"
        f"<td>{_render_score(e)}</td></tr>"
        for e in evaluations
    ]
    return render_table(["policy", "step", "tasks", "score"], rows) if rows else ""


def _render_scores(suites: Mapping[str, Pair], differences: Differences) -> str:
    """Scores by suite, where the recipe has further suites."""
    suites_of_student = {policy: pair for policy, pair in suites.items() if is_student(policy)}
    rows = (
        f"<tr><th>{escape(policy)}</th><td>{_count_tasks(before or after)}</td>"
        f"<td>{_render_score(before)}</td><td>{_render_score(after)}</td>"
        f"<td>{render_difference(differences.get((policy, 'score')))}</td></tr>"
        for policy, (before, after) in map(_order, suites_of_student.items())
    )
    heads = ["policy", "tasks", "score before", "score after", "difference, points"]
    is_repeated = [*suites_of_student] == ["student"]  # it is above
    return "" if is_repeated else render_table(heads, rows)


def _label(evaluation: Evaluation) -> str:
    return "before" if evaluation.step == 0 else f"after {evaluation.step} steps"


def _order(item: tuple[str, Pair]) -> tuple[str, tuple[Evaluation | None, Evaluation | None]]:
    """The only evaluation of a recipe without one before training is that after it."""
    policy, (first, last) = item
    return (policy, (None, first)) if last is None and first.step > 0 else item


def _count_tasks(evaluation: Evaluation | None) -> str:
    return "–" if evaluation is None else f"{len(evaluation.scores)} {evaluation.split}"


def _render_score(evaluation: Evaluation | None) -> str:
    return "–" if evaluation is None else render_interval(*_score(evaluation))


def _score(evaluation: Evaluation) -> tuple[float, float, float]:
    return evaluation.mean_score, evaluation.ci_low, evaluation.ci_high


def _render_difference_card(difference: Difference) -> str:
    mean, low, high, p_value = difference
    chance = f"p = {p_value:.2g}" if p_value >= 0.001 else "p < 0.001"
    return (
        f'<div class="number difference"><span>paired difference, in points</span>'
        f"<b>{format_points(mean)}</b>"
        f"<small>{format_points(low)} to {format_points(high)}, {escape(chance)}</small></div>"
    )
