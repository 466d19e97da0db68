"""The metrics of one step as a flat row of numbers, and alarms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from courtside.types import HintOutcome, Scored, Trajectory, Turn, Update

Row = dict[str, Any]
READER = "reader/"
SLOWDOWN_FACTOR = 3
"""How much slower than the run's median a step must be to count as slow."""
SLOWDOWN_STEPS = 2
"""Slow steps in a row: one may just have had long prompts."""


def compute_metrics(
    scored: Sequence[Scored],
    update: Update,
    seconds: Mapping[str, float],
    reader_counts: Mapping[str, int] | None = None,
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
    row |= {f"seconds/{phase}": spent for phase, spent in seconds.items()}
    if sum(seconds.values()) > 0:
        row["tokens_per_second"] = sum(lengths) / sum(seconds.values())
    clash = row.keys() & update.metrics.keys()
    assert not clash, f"metrics with the names of other columns: {clash}"
    return row | dict(update.metrics)


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


def check_harmful_hints(hints: Sequence[HintOutcome]) -> str | None:
    """The alarm of a step in which at least half of the measured hints make their turn more likely;
    None: fewer do."""
    measured = [outcome.shift for outcome in hints if outcome.shift is not None]
    harmful = [outcome for outcome in hints if outcome.is_harmful]
    if not harmful or 2 * len(harmful) < len(measured):
        return None
    num_trained = sum(outcome.drop_reason is None for outcome in harmful)
    consequence = (
        f"{num_trained} of these trained, as hints.harmful = 'train' says: they teach the mistake"
        if num_trained
        else "they would teach the mistake, and did not train"
    )
    mean = sum(measured) / len(measured)
    return (
        f"{len(harmful)} of {len(measured)} hints make their turn more likely (mean shift "
        f"{mean:+.2f} nats); {consequence}. Say what is right instead of quoting what went wrong, "
        "check that each hint is for the turn it names, and see the hints in the report"
    )


def check_nothing_trained(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """The alarm of a run in which no step trained a token; None: some did."""
    if any(row[key] for row in rows for key in row if key.startswith("tokens/")):
        return None
    result = f"none of the {len(rows)} steps trained a single token: the weights did not change"
    if not any("hints/trained" in row for row in rows):
        return f"{result}. No loss applies to any token; see `on` of the losses."
    counts: Counter[str] = Counter()
    for row in rows:
        names = (key for key in row if key.startswith((READER, "hints/dropped/")))
        counts.update({name.removeprefix(READER): row[name] for name in names if row[name]})
    if counts:
        text = ", ".join(f"{name} {n}" for name, n in sorted(counts.items()))
        return f"{result}. The reader counted over all steps: {text}."
    kinds = sorted({key.removeprefix("events/") for row in rows for key in row
                    if key.startswith("events/")})  # fmt: skip
    events = (
        f"the environment reported events of kind {', '.join(kinds)}, and no rule detects one of "
        "them; add a rule for it to reader.rules"
        if kinds
        else "no event was reported and no text matched; look at some turns with `courtside view`"
    )
    return f"{result}. The reader proposed no hint in any step: {events}."


def check_missing_metrics(rows: Sequence[Mapping[str, Any]], num_steps: int) -> str | None:
    """The alarm of a run whose metrics.jsonl lost steps that were trained; None: all are there."""
    missing = sorted(set(range(num_steps)) - {row["step"] for row in rows})
    if not missing:
        return None
    return (
        f"metrics.jsonl has no row of {len(missing)} of {num_steps} steps (from {missing[0]} to "
        f"{missing[-1]}): the file was deleted or changed under the run. The weights are complete; "
        "the curves of the report have a hole"
    )


def check_slowdown(rates: Sequence[float], num_threads: int) -> str | None:
    """The note on a run whose tokens per second collapsed in the last two steps; None: no.

    `rates` are those of all steps of this process. It is compared with the run's own median, and
    noted once: when the second slow step in a row follows one that was not slow.
    """
    if len(rates) < SLOWDOWN_STEPS + 3:
        return None
    usual = median(rates[:-SLOWDOWN_STEPS])
    slow = [rate < usual / SLOWDOWN_FACTOR for rate in rates[-SLOWDOWN_STEPS - 1 :]]
    if slow[0] or not all(slow[1:]):
        return None
    note = (
        f"{rates[-1]:.3g} tokens/s, where this run's median is {usual:.3g}: are other processes on "
        "its cores?"
    )
    if num_threads > 1:
        note += " Stop it (Ctrl-C saves) and go on with OMP_NUM_THREADS=1, which often helps then"
    return note
