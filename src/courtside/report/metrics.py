"""The metrics of one step as a flat row of numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from courtside.report.costs import StepCost
from courtside.types import HintOutcome, Scored, Trajectory, Turn, Update

Row = dict[str, Any]
READER = "reader/"


def compute_metrics(
    scored: Sequence[Scored],
    update: Update,
    seconds: Mapping[str, float],
    reader_counts: Mapping[str, int] | None = None,
    *,
    cost: StepCost | None = None,
) -> Row:
    """`docs/metrics.md` describes each key; `reader_counts` is None without a reader."""
    trajectories = [s.trajectory for s in scored]
    lengths = [trajectory.num_completion_tokens for trajectory in trajectories]
    grades = [trajectory.grade for trajectory in trajectories if trajectory.grade is not None]
    row: Row = {"step": update.step, "loss": update.loss}
    row |= {f"loss/{name}": value for name, value in update.components.items()}
    row |= {f"tokens/{name}": count for name, count in update.num_tokens.items()}
    if grades:
        row["reward/mean"] = sum(grade.score for grade in grades) / len(grades)
        row["reward/pass_rate"] = sum(grade.passed for grade in grades) / len(grades)
        row["reward/grader_errors"] = sum(grade.error is not None for grade in grades)
    if lengths:
        truncated = sum(trajectory.stop == "length" for trajectory in trajectories)
        row["length/mean"] = sum(lengths) / len(lengths)
        row["length/max"] = max(lengths)
        row["length/truncated"] = truncated / len(lengths)
    if any(s.has_target for s in scored):
        row["without_teacher"] = sum(not s.has_target for s in scored)
    row |= event_metrics(trajectories)
    num_faults = sum(trajectory.fault is not None for trajectory in trajectories)
    if num_faults or "error_rate" in row:
        row["environment_faults"] = num_faults
    hints = [outcome for s in scored for outcome in s.hints]
    if hints or reader_counts is not None:
        row |= hint_metrics(hints)
        row |= {f"{READER}{name}": count for name, count in (reader_counts or {}).items()}
    row |= compute_costs(seconds, cost)
    if sum(seconds.values()) > 0:
        row["tokens_per_second"] = sum(lengths) / sum(seconds.values())
    clash = row.keys() & update.metrics.keys()
    assert not clash, f"metrics with the names of other columns: {clash}"
    return row | dict(update.metrics)


def compute_costs(seconds: Mapping[str, float], cost: StepCost | None) -> Row:
    """What a step took: seconds by phase, and where they were counted tokens and FLOPs."""
    row: Row = {}
    row |= {f"seconds/{phase}": spent for phase, spent in seconds.items()}
    if cost is not None:
        row["cost/student_tokens"] = cost.student_tokens
        row["cost/teacher_tokens"] = cost.teacher_tokens
        row["cost/flops"] = cost.flops
    return row


def event_metrics(trajectories: Sequence[Trajectory]) -> Row:
    """Fractions of assistant turns with an event; empty where no environment reported any.

    A turn with two events of a kind counts once. Trajectories from a dataset are left out, as no
    environment ran on them, and those that a bug in the environment ended.
    """
    sampled = [t for t in trajectories if t.source != "dataset" and t.fault is None]
    turns = [t for trajectory in sampled for t in trajectory.turns if t.role == "assistant"]
    has_environment = any(turn.events for turn in turns) or any(map(is_multi_turn, sampled))
    if not turns or not has_environment:
        return {}
    kinds = Counter(kind for turn in turns for kind in {event.kind for event in turn.events})
    return {
        "turns": len(turns) / len(sampled),
        "error_rate": sum(bool(turn.events) for turn in turns) / len(turns),
        **{f"events/{kind}": kinds[kind] / len(turns) for kind in sorted(kinds)},
        **{f"decisions/{name}": rate for name, rate in error_by_decision(turns).items()},
    }


def error_by_decision(turns: Sequence[Turn]) -> dict[str, float]:
    """Of the turns that the environment told apart, the fraction with any event, by decision."""
    wrong: dict[str, list[bool]] = {}
    for turn in turns:
        if turn.decision is not None:
            wrong.setdefault(turn.decision, []).append(bool(turn.events))
    return {decision: sum(wrong[decision]) / len(wrong[decision]) for decision in sorted(wrong)}


def is_multi_turn(trajectory: Trajectory) -> bool:
    """Whether there are several assistant turns, or an environment's turn."""
    num_assistant = sum(turn.role == "assistant" for turn in trajectory.turns)
    return num_assistant > 1 or any(turn.role == "environment" for turn in trajectory.turns)


def hint_metrics(hints: Sequence[HintOutcome]) -> Row:
    """How many hints train, how many were dropped by reason, how many make their turn more likely,
    and the mean shift and pass rate of all that were measured."""
    trained = [outcome for outcome in hints if outcome.drop_reason is None]
    dropped = Counter(outcome.drop_reason for outcome in hints if outcome.drop_reason is not None)
    row: Row = {"hints/trained": len(trained)}
    row |= {f"hints/dropped/{reason}": dropped[reason] for reason in sorted(dropped)}
    shifts = [outcome.shift for outcome in hints if outcome.shift is not None]
    if shifts:
        row["hints/harmful"] = sum(outcome.is_harmful for outcome in hints)
        row["hints/shift"] = sum(shifts) / len(shifts)
    pass_rates = [outcome.pass_rate for outcome in hints if outcome.pass_rate is not None]
    if pass_rates:
        row["hints/pass_rate"] = sum(pass_rates) / len(pass_rates)
    return row
