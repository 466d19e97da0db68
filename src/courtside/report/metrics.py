"""The metrics of one step as a flat row of numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from courtside.report.costs import StepCost
from courtside.types import HintOutcome, Scored, TakeoverOutcome, Trajectory, Turn, Update

Row = dict[str, Any]
READER = "reader/"
DRAFTS = "drafts/"
TAKEOVER = "takeover/"
LIMITS = ("length", "turns", "time")
"""Stop reasons of what a limit ended."""


def compute_metrics(
    scored: Sequence[Scored],
    update: Update,
    seconds: Mapping[str, float],
    reader_counts: Mapping[str, int] | None = None,
    draft_counts: Mapping[str, int] = MappingProxyType({}),
    *,
    cost: StepCost | None = None,
) -> Row:
    """`docs/metrics.md` describes each key; `reader_counts` is None without a reader."""
    # Repairs and take-overs are the teacher's, and counted under names of their own.
    by_teacher = ("rewrite", "takeover")
    trajectories = [s.trajectory for s in scored if s.trajectory.correction not in by_teacher]
    lengths = [trajectory.num_completion_tokens for trajectory in trajectories]
    grades = [trajectory.grade for trajectory in trajectories if trajectory.grade is not None]
    row: Row = {"step": update.step, "loss": update.loss}
    row |= {f"loss/{name}": value for name, value in update.components.items()}
    row |= {f"tokens/{name}": count for name, count in update.num_tokens.items()}
    if grades:
        row["reward/mean"] = sum(grade.score for grade in grades) / len(grades)
        row["reward/pass_rate"] = sum(grade.passed for grade in grades) / len(grades)
        row["reward/grader_errors"] = sum(grade.error is not None for grade in grades)
    row |= reward_metrics(trajectories)
    ages = [update.step - t.policy_version for t in trajectories if t.policy_version is not None]
    if any(ages):
        row["sampler/staleness"] = sum(ages) / len(ages)
        row["sampler/staleness_max"] = max(ages)
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
    row |= {f"{DRAFTS}{name}": count for name, count in draft_counts.items()}
    mixed = [t for t in trajectories if t.num_replaced is not None]
    if mixed:
        num_tokens = sum(t.num_completion_tokens for t in mixed)
        row["mixed_sampling/replaced"] = sum(t.num_replaced or 0 for t in mixed) / num_tokens
    row |= takeover_metrics([s.takeover for s in scored if s.takeover is not None])
    row |= compute_costs(seconds, cost)
    if sum(seconds.values()) > 0:
        row["tokens_per_second"] = sum(lengths) / sum(seconds.values())
    clash = row.keys() & update.metrics.keys()
    assert not clash, f"metrics with the names of other columns: {clash}"
    return row | dict(update.metrics)


def reward_metrics(trajectories: Sequence[Trajectory]) -> Row:
    """Of each reward of the recipe, not weighted; empty where it has none."""
    row: Row = {}
    rewarded = [trajectory for trajectory in trajectories if trajectory.rewards]
    for name in rewarded[0].rewards if rewarded else ():
        groups: dict[str, set[float]] = {}
        values = []
        for trajectory in rewarded:
            if (value := trajectory.rewards[name]) is not None:
                values.append(value)
                groups.setdefault(trajectory.task.id, set()).add(value)
        if values:
            num_varied = sum(len(distinct) > 1 for distinct in groups.values())
            row[f"reward/{name}/mean"] = sum(values) / len(values)
            row[f"reward/{name}/varied"] = num_varied / len(groups)
        row[f"reward/{name}/errors"] = len(rewarded) - len(values)
    return row


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


def takeover_metrics(outcomes: Sequence[TakeoverOutcome]) -> Row:
    """Selected drafts, how many the teacher finished and how many train, drops by reason; empty
    where none was selected."""
    if not outcomes:
        return {}
    played = [outcome for outcome in outcomes if outcome.num_sampled_tokens]
    dropped = Counter(outcome.drop_reason for outcome in outcomes if outcome.drop_reason)
    row: Row = {
        "takeover/drafts": len(outcomes),
        "takeover/played": len(played),
        "takeover/trained": sum(outcome.drop_reason is None for outcome in outcomes),
        "takeover/limited": sum(outcome.stop in LIMITS for outcome in played),
        "takeover/sampled_tokens": sum(outcome.num_sampled_tokens for outcome in played),
    }
    if num_requests := sum(outcome.num_requests for outcome in outcomes):
        row["takeover/requests"] = num_requests
    row |= {f"takeover/dropped/{reason}": dropped[reason] for reason in sorted(dropped)}
    grades = [outcome.grade for outcome in played if outcome.grade is not None]
    if grades:
        row["takeover/pass_rate"] = sum(grade.passed for grade in grades) / len(grades)
    return row


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
