"""First and last evaluation of each policy, and the tasks that changed between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from courtside.types import Evaluation

Pair = tuple[Evaluation, Evaluation | None]
"""The first and the last evaluation of the same tasks; None while there is only one."""


class Difference(NamedTuple):
    """Paired by task, after − before, with its 95% interval."""

    mean: float
    low: float
    high: float
    p_value: float


Differences = Mapping[tuple[str, Literal["score", "error_rate"]], Difference]
"""By policy and what was measured."""


class ChangedTasks(NamedTuple):
    """Ids of tasks by what became of their score."""

    fixed: tuple[str, ...]
    """The score rose; largest change first."""
    broken: tuple[str, ...]
    """The score fell; largest change first."""
    same: tuple[str, ...]


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


def pair_evaluations(evaluations: Sequence[Evaluation]) -> dict[str, Pair]:
    """First and last evaluation by policy; the recipe's own tasks come first."""
    names = dict.fromkeys(["student", *(e.policy for e in evaluations)])
    pairs = {policy: first_and_last_evaluation(evaluations, policy) for policy in names}
    return {
        policy: (before, after) for policy, (before, after) in pairs.items() if before is not None
    }


def find_changed_tasks(before: Evaluation, after: Evaluation) -> ChangedTasks:
    """Tasks of both evaluations; equal changes keep the order of the tasks."""
    gaps = {
        id: after.scores[id] - score for id, score in before.scores.items() if id in after.scores
    }
    return ChangedTasks(
        fixed=tuple(sorted((id for id in gaps if gaps[id] > 0), key=lambda id: -gaps[id])),
        broken=tuple(sorted((id for id in gaps if gaps[id] < 0), key=lambda id: gaps[id])),
        same=tuple(id for id in gaps if not gaps[id] > 0 and not gaps[id] < 0),
    )
