"""Paired differences between the first and the last evaluations of a run, from its folder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from courtside.errors import UserError
from courtside.evaluate.intervals import paired_difference
from courtside.report.evaluation_pairs import Difference, Differences, Pair, pair_evaluations
from courtside.report.folder.folder import RunFolder
from courtside.report.folder.outlines import Outline


def compare_evaluations(folder: RunFolder) -> Differences:
    """Of scores for every policy that was evaluated twice, and of error rates in an environment.

    What cannot be read has no difference; the report names the file.
    """
    try:
        pairs = pair_evaluations(folder.evaluations())
    except UserError:
        return {}
    scores = {policy: _compare_score_pair(pair) for policy, pair in pairs.items()}
    error_rates = {policy: _compare_error_rates(folder, pair) for policy, pair in pairs.items()}
    return {
        **{(policy, "score"): d for policy, d in scores.items() if d is not None},
        **{(policy, "error_rate"): d for policy, d in error_rates.items() if d is not None},
    }


def error_rates_by_task(episodes: Sequence[Outline]) -> dict[str, float]:
    """Fraction of an episode's assistant turns with any event, mean over the samples of a task."""
    rates: dict[str, list[float]] = {}
    for episode in episodes:
        turns = [turn for turn in episode.trajectory.turns if turn.role == "assistant"]
        if turns and episode.trajectory.stop != "fault":  # a bug says nothing about the student
            rate = sum(bool(turn.events) for turn in turns) / len(turns)
            rates.setdefault(episode.trajectory.task.id, []).append(rate)
    return {task: sum(values) / len(values) for task, values in rates.items()}


def _compare_score_pair(pair: Pair) -> Difference | None:
    before, after = pair
    return None if after is None else compare_scores(before.scores, after.scores)


def _compare_error_rates(folder: RunFolder, pair: Pair) -> Difference | None:
    before, after = pair
    if after is None or any("error_rate" not in e.metrics for e in (before, after)):
        return None
    try:
        outlines = [folder.evaluation_outlines(evaluation) for evaluation in (before, after)]
    except UserError:
        return None
    return compare_scores(*map(error_rates_by_task, outlines))


def compare_scores(before: Mapping[str, float], after: Mapping[str, float]) -> Difference | None:
    """Of the tasks that both have a number for; None: there are none."""
    ids = [
        id
        for id, score in before.items()
        if id in after and math.isfinite(score) and math.isfinite(after[id])
    ]
    if not ids:
        return None
    pairs = ({id: scores[id] for id in ids} for scores in (before, after))
    return Difference(*paired_difference(*pairs))
