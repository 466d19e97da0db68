"""The arms of a variant side by side, over their seeds, as results.json has them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from courtside.experiment.contrasts import ArmRuns, Design, compare_fixed, explore, measure_of
from courtside.experiment.outcomes import COLUMNS, Outcome, at_tokens, measures, tokens_until
from courtside.experiment.statistics import estimate_mean

STORED = (
    "seed", "validation", "shift", "teacher", "training_decisions", "training_masses",
    "wall_seconds",
)  # fmt: skip
"""What results.json has of each run; measures are in the rows of arms, a value for each seed."""


def over_seeds(values: Sequence[float]) -> dict[str, Any]:
    """Mean and 95% interval by Student's t, with the values; the interval of one seed has no width,
    which says nothing."""
    mean = statistics.fmean(values)
    low, high = (mean, mean) if len(values) < 2 else estimate_mean(values).interval()
    return {"mean": mean, "low": low, "high": high, "seeds": len(values), "values": [*values]}


def over_steps(series: Sequence[Sequence[float]]) -> list[dict[str, float]]:
    """The same at every step that all runs have, without the values: runs with a budget may end
    after different numbers of steps."""
    points = [over_seeds(values) for values in zip(*series, strict=False)]
    return [
        {"step": step, "mean": p["mean"], "low": p["low"], "high": p["high"]}
        for step, p in enumerate(points)
    ]


def compare_variant(
    arms: Mapping[str, Sequence[Outcome]], goals: Sequence[float], design: Design
) -> dict[str, Any]:
    """Arms of the same variant side by side; `arms`: each one's runs, a seed each. The contrasts
    have no verdicts yet: those need all variants."""
    budget = min(run["trained_tokens"] for runs in arms.values() for run in runs)
    by_seed = {
        name: runs_by_seed(runs, is_pairable=name not in design.unpaired)
        for name, runs in arms.items()
    }
    return {
        "equal_tokens": budget,
        "arms": {name: _arm(runs, budget, goals) for name, runs in arms.items()},
        "contrasts": compare_fixed(by_seed, design),
        "exploratory": explore(by_seed, design),
    }


def runs_by_seed(runs: Sequence[Outcome], *, is_pairable: bool) -> ArmRuns:
    return ArmRuns(
        measures={run["seed"]: measures(run) for run in runs},
        episodes={run["seed"]: run["episodes"] for run in runs if run.get("episodes")},
        is_pairable=is_pairable,
    )


def read_stored_arm(row: Mapping[str, Any], *, is_pairable: bool) -> ArmRuns:
    """The same from an arm's row of results.json, which has no counts of episodes."""
    seeds = [run["seed"] for run in row["runs"]]
    values = {name: m["values"] for name, m in row.items() if isinstance(m, dict) and "values" in m}
    return ArmRuns(
        measures={
            seed: {name: seed_values[place] for name, seed_values in values.items()}
            for place, seed in enumerate(seeds)
        },
        episodes={},
        is_pairable=is_pairable,
    )


def _arm(runs: Sequence[Outcome], budget: float, goals: Sequence[float]) -> dict[str, Any]:
    runs_measures = [measures(run) for run in runs]
    common = [name for name in runs_measures[0] if all(name in m for m in runs_measures)]
    events = {
        name for m in runs_measures for name in m if "events/" in name
    }  # in some runs only: 0 there
    row: dict[str, Any] = {
        name: over_seeds([m.get(name, 0.0) for m in runs_measures])
        for name in [*common, *sorted(events - set(common))]
    }
    for name, column in COLUMNS.items():
        curves = [[(r[0], r[column]) for r in run["validation"]] for run in runs]
        if not all(curves) or any(value is None for curve in curves for _, value in curve):
            continue
        prefix = "" if name == "rate" else f"{name}_"
        row[f"{prefix}at_equal_tokens"] = over_seeds([at_tokens(r, budget, column) for r in runs])
        by_step = [dict(curve) for curve in curves]
        steps = [step for step in by_step[0] if all(step in values for values in by_step)]
        row[f"{prefix}curve"] = [
            {"step": step, **over_seeds([values[step] for values in by_step])} for step in steps
        ]
        for point in row[f"{prefix}curve"]:
            del point["values"]  # they are in the runs' `validation`
    if errors := [run["training_errors"] for run in runs if run.get("training_errors")]:
        row["training_errors"] = over_steps(errors)
    if decisions := [run["training_decisions"] for run in runs if run.get("training_decisions")]:
        # A series is short where a step happened to have no such decision.
        sides = [
            name
            for name in decisions[0]
            if name.count("/") == 1
            and len({len(series.get(name, ())) for series in decisions}) == 1
        ]
        row["training_decisions"] = {
            side: over_steps([series[side] for series in decisions]) for side in sides
        }
    row["trained_tokens"] = over_seeds([run["trained_tokens"] for run in runs])
    row["seconds"] = over_seeds([sum(run.get("seconds", {}).values()) for run in runs])
    row["phases"] = mean_costs(runs)
    spent = [run["spent"] for run in runs if "spent" in run]
    if len(spent) == len(runs):  # older outcomes have none
        row["spent"] = {
            unit: over_seeds([values[unit] for values in spent])
            for unit in spent[0]
            if all(values[unit] is not None for values in spent)
        }
    row["tokens_until"] = {f"{goal:g}": [tokens_until(run, goal) for run in runs] for goal in goals}
    row["runs"] = [{key: run[key] for key in STORED if key in run} for run in runs]
    return row


def mean_costs(runs: Sequence[Outcome]) -> dict[str, dict[str, float]]:
    """By phase: seconds, tokens and FLOPs, mean over runs; a run without the phase has 0."""
    phases = dict.fromkeys(phase for run in runs for phase in run.get("seconds", {}))
    rows = {
        phase: [
            {"seconds": run["seconds"].get(phase, 0.0), **run.get("costs", {}).get(phase, {})}
            for run in runs
        ]
        for phase in phases
    }
    return {
        phase: {
            key: statistics.fmean(cost.get(key, 0.0) for cost in costs)
            for key in dict.fromkeys(key for cost in costs for key in cost)
        }
        for phase, costs in rows.items()
    }


# ── for people ───────────────────────────────────────────────────────────────────────────────────


def format_summary(results: Mapping[str, Any]) -> Iterable[str]:
    """A line for each arm, then one for each fixed contrast."""
    sections = results.get("variants", {"": results})
    outcomes = [measure_of(outcome) for outcome in results.get("design", {}).get("outcomes", ())]
    columns = dict.fromkeys(["after", "error_rate_after", "held_out/error_rate_after", *outcomes])
    for variant, section in sections.items():
        for arm, row in section["arms"].items():
            name = f"{variant} {arm}".strip()
            rate = f"lr {results['learning_rates'][arm]:g}"
            cells = [f"{name:<24} {rate:<9} {len(row['runs'])} seeds"]
            for measure in columns:
                if measure in row:
                    before = row.get(f"{measure.removesuffix('after')}before")
                    after = row[measure]
                    was = "" if before is None else f"{before['mean']:.4f} → "
                    ends = f"({after['low']:.4f} to {after['high']:.4f})"
                    label = measure.removesuffix("after").rstrip("_/") or "score"
                    cells.append(f"{label} {was}{after['mean']:.4f} {ends}")
            yield "   ".join(cells)
    for variant, section in sections.items():
        for row in section["contrasts"]:
            yield f"{variant} {row['contrast']}, {describe_contrast(row)}".strip()


def describe_contrast(row: Mapping[str, Any]) -> str:
    return (
        f"{row['outcome']}: {row['mean']:+.4f} ({row['low']:+.4f} to {row['high']:+.4f}; "
        f"{row['seeds']} seeds, {row['method']}, {row['variance']}; Holm {row['p_holm']:.3f}, "
        f"equivalence {row['p_equivalent_holm']:.3f}, detectable {row['detectable']:.4f}): "
        f"{row['verdict']}"
    )
