"""One step as one flat row of numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from courtside.report.folder.jsonl import Row
from courtside.types import HintOutcome, Scored, Trajectory, Update


def metrics_row(
    scored: Sequence[Scored],
    update: Update,
    seconds: Mapping[str, float],
    reader_counts: Mapping[str, int] | None = None,
) -> Row:
    """The update, the trajectories' lengths, grades, events and hints, and the phases' seconds."""
    trajectories = [one.trajectory for one in scored]
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
    if any(one.has_target for one in scored):
        row["without_teacher"] = sum(not one.has_target for one in scored)
    row |= event_columns(trajectories)
    hints = [hint_outcomes for one in scored for hint_outcomes in one.hints]
    if hints or reader_counts is not None:
        row |= hint_columns(hints)
        row |= {f"reader/{name}": count for name, count in (reader_counts or {}).items()}
    row |= {f"seconds/{phase}": spent for phase, spent in seconds.items()}
    if sum(seconds.values()) > 0:
        row["tokens_per_second"] = sum(lengths) / sum(seconds.values())
    clash = row.keys() & update.metrics.keys()
    assert not clash, f"metrics with the names of other columns: {clash}"
    return row | dict(update.metrics)


def event_columns(trajectories: Sequence[Trajectory]) -> Row:
    """Shares of assistant turns; nothing where no environment had a say.

    A turn with two events of a kind counts once for it, so every share is one of turns. Texts from
    a data set are left out: no environment looked at them.
    """
    played = [one for one in trajectories if one.source != "dataset"]
    turns = [turn for one in played for turn in one.turns if turn.role == "assistant"]
    seen = any(turn.events for turn in turns) or any(map(is_multi_turn, played))
    if not turns or not seen:
        return {}
    kinds = Counter(kind for turn in turns for kind in {event.kind for event in turn.events})
    return {
        "turns": len(turns) / len(played),
        "error_rate": sum(bool(turn.events) for turn in turns) / len(turns),
        **{f"events/{kind}": kinds[kind] / len(turns) for kind in sorted(kinds)},
    }


def is_multi_turn(trajectory: Trajectory) -> bool:
    """Whether the assistant spoke more than once, or something was said to it after it spoke."""
    said = sum(turn.role == "assistant" for turn in trajectory.turns)
    return said > 1 or any(turn.role == "environment" for turn in trajectory.turns)


def hint_columns(hints: Sequence[HintOutcome]) -> Row:
    """How many train, how many do not and why, how much those that train shift their turn, and how
    often replies under a hint pass, where that was tried."""
    kept = [hint_outcomes for hint_outcomes in hints if hint_outcomes.drop_reason is None]
    dropped = Counter(
        hint_outcomes.drop_reason
        for hint_outcomes in hints
        if hint_outcomes.drop_reason is not None
    )
    shifts = [hint_outcomes.shift for hint_outcomes in kept if hint_outcomes.shift is not None]
    row: Row = {"hints/trained": len(kept)}
    row |= {f"hints/dropped/{why}": dropped[why] for why in sorted(dropped)}
    if shifts:
        row["hints/shift"] = sum(shifts) / len(shifts)
    tried = [
        hint_outcomes.pass_rate for hint_outcomes in hints if hint_outcomes.pass_rate is not None
    ]
    if tried:
        row["hints/pass_rate"] = sum(tried) / len(tried)
    return row
