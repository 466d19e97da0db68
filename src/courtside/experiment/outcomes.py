"""What one run of an experiment measured. Loads no torch."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from courtside.errors import UserError
from courtside.experiment.episode_counts import read_counts
from courtside.report.budget import sum_spent

Outcome = dict[str, Any]
"""What one run measured, as `measure_run` returns it and a JSON file stores it."""

RATE, KL, ERRORS = 2, 3, 4
"""Columns of a run's `validation`, after step and trained tokens."""
COLUMNS = {"rate": RATE, "kl": KL, "error_rate": ERRORS}
LESS_IS_BETTER = ("kl", "error_rate")

MEASURES = (
    "kl_estimate",
    "forward_kl_estimate",
    "error_rate",
    "logp_drop/clean_turns",
    "logp_drop/error_turns",
    "truncated",
)
"""What a table has of an evaluation's metrics, and all `events/…`."""
PREFIXES = ("decisions/", "collateral/")
"""Further ones, of which all are in it."""
MASSES = ("topk_mass/student", "topk_mass/teacher")
"""Of the metrics of steps: the probability that each gives to the support of a top-k loss."""
STEP_PREFIXES = ("drafts/", "hints/", "reader/", "takeover/")
"""Of the metrics of steps: what became of drafts, hints and take-overs."""


# ── one run ──────────────────────────────────────────────────────────────────────────────────────


def measure_run(run: Path) -> Outcome:
    """Before and after on test tasks and on each suite; validation along trained tokens; the share
    of turns with an error in each step's own episodes, which costs nothing."""
    evaluations = _lines(run / "evaluations.jsonl")
    tokens, total = {0: 0}, 0
    shifts: list[float] = []
    errors: list[float] = []
    decisions: dict[str, list[float]] = {}
    masses: dict[str, list[float]] = {}
    rows = _lines(run / "metrics.jsonl")
    for row in rows:
        total += sum(value for key, value in row.items() if key.startswith("tokens/"))
        tokens[row["step"] + 1] = total
        shifts += [row["hints/shift"]] if row.get("hints/shift") is not None else []
        errors += [row["error_rate"]] if "error_rate" in row else []
        rates = {name: rate for name, rate in row.items() if name.startswith("decisions/")}
        for name, rate in {**rates, **error_by_side(rates)}.items():
            decisions.setdefault(name, []).append(rate)
        for name in MASSES:
            if row.get(name) is not None:
                masses.setdefault(name, []).append(row[name])
    student_evaluations = [e for e in evaluations if e["policy"] == "student"]
    suites: dict[str, list[Any]] = {}
    for e in evaluations:
        if e["policy"].startswith("student:") and e["split"] == "test":
            suites.setdefault(e["policy"].partition(":")[2], []).append(e)
    teacher = [e["mean_score"] for e in evaluations if e["policy"] == "teacher"]
    costs = json.loads((run / "costs.json").read_text())
    test = [e for e in student_evaluations if e["split"] == "test"]
    return {
        **(_before_and_after(test) if test else {}),  # documents have suites alone
        "suites": {name: _before_and_after(rows) for name, rows in suites.items()},
        "teacher": teacher[0] if teacher else None,
        "trained_tokens": total,
        "spent": {"steps": len(rows), **sum_spent(rows)},
        "validation": [
            [
                e["step"],
                tokens[e["step"]],
                e["mean_score"],
                e["metrics"].get("kl_estimate"),
                e["metrics"].get("error_rate"),
            ]
            for e in student_evaluations
            if e["split"] == "validation"
        ],
        "shift": [shifts[0], shifts[-1]] if shifts else None,
        "training_errors": errors,
        "training_decisions": decisions,
        "training_masses": masses,
        "training_means": _mean_over_steps(rows),
        "seconds": {phase: cost["seconds"] for phase, cost in costs.items()},
        "costs": {
            phase: {key: value for key, value in cost.items() if key != "seconds"}
            for phase, cost in costs.items()
        },
        "episodes": read_counts(run),
        "environment": json.loads((run / "environment.json").read_text()),
    }


def _mean_over_steps(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of the metrics of `STEP_PREFIXES`. A count that a step has not is 0 there; anything else is
    averaged over the steps that have it."""
    series: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith(STEP_PREFIXES) and value is not None:
                series.setdefault(name, []).append(value)
    return {
        name: sum(values) / (len(rows) if all(isinstance(v, int) for v in values) else len(values))
        for name, values in sorted(series.items())
    }


def _before_and_after(evaluations: Sequence[Mapping[str, Any]]) -> Outcome:
    first, last = evaluations[0], evaluations[-1]
    return {
        "before": first["mean_score"],
        "after": last["mean_score"],
        "metrics_before": first["metrics"],
        "metrics_after": last["metrics"],
    }


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def measures(run: Outcome) -> dict[str, float]:
    """Every number of a run that is compared, by name: `after`, `error_rate_before`,
    `held_out/error_rate_after`, …"""
    result: dict[str, float] = {}
    for prefix, part in (
        ("", run),
        *((f"{name}/", suite) for name, suite in run.get("suites", {}).items()),
    ):
        if "after" not in part:
            continue
        before, after = (part[f"metrics_{when}"] for when in ("before", "after"))
        events = {key for key in (*before, *after) if key.startswith("events/")}
        told_apart = {key for key in (*before, *after) if key.startswith(PREFIXES)}
        for when, metrics in (("before", before), ("after", after)):
            result[f"{prefix}{when}"] = part[when]
            for name in (*MEASURES, *sorted(events), *sorted(told_apart)):
                if name in metrics:
                    result[f"{prefix}{name}_{when}"] = metrics[name]
                elif name in events:
                    result[f"{prefix}{name}_{when}"] = (
                        0.0  # events that did not occur are not stored
                    )
            result |= {
                f"{prefix}{side}_{when}": rate for side, rate in error_by_side(metrics).items()
            }
    if run.get("training_errors"):
        result["training/error_rate_after"] = statistics.fmean(run["training_errors"])
    for name, series in run.get("training_decisions", {}).items():
        result[f"training/{name}_after"] = statistics.fmean(series)
        if name.count("/") == 1:
            side = name.partition("/")[2]
            result[f"steps_to_half/{side}_after"] = float(steps_to_half(series))
    for name, mean in run.get("training_means", {}).items():
        result[f"training/{name}_after"] = mean
    for name, series in run.get("training_masses", {}).items():
        result[f"last_step/{name}_after"] = series[-1]
    return result


def steps_to_half(series: Sequence[float]) -> int:
    """Training steps before the first with at most half of the first step's error; all of them
    where there is none."""
    halves = (step for step, rate in enumerate(series) if rate <= series[0] / 2)
    return next(halves, len(series))


def error_by_side(metrics: Mapping[str, float]) -> dict[str, float]:
    """Of decisions called KIND/SIDE: the mean error over kinds, by side; and `both_sides`, the mean
    over the sides, by which a habit that is only turned over is no better."""
    rates: dict[str, list[float]] = {}
    for name, rate in metrics.items():
        if name.startswith("decisions/") and name.count("/") == 2:
            rates.setdefault(name.rpartition("/")[2], []).append(rate)
    by_side = {f"decisions/{side}": statistics.fmean(rates[side]) for side in sorted(rates)}
    if len(by_side) < 2:
        return by_side
    return {**by_side, "decisions/both_sides": statistics.fmean(by_side.values())}


def at_tokens(run: Outcome, budget: float, column: int = RATE) -> float:
    """A validation number at a number of trained tokens, between the evaluations around it."""
    curve = [(row[1], row[column]) for row in run["validation"]]
    for (t0, r0), (t1, r1) in pairwise(curve):
        if t0 <= budget <= t1:
            return float(r0 + (r1 - r0) * (budget - t0) / max(t1 - t0, 1))
    return float(curve[-1][1])


def tokens_until(run: Outcome, rate: float) -> int | None:
    """Trained tokens at the first validation that reaches `rate`; None: none did."""
    return next((row[1] for row in run["validation"] if row[RATE] >= rate), None)


def merit(run: Outcome, choose_by: str) -> float:
    """Of a learning rate, on the last validation: more is better."""
    value = run["validation"][-1][COLUMNS[choose_by]]
    if value is None:
        raise UserError(
            f"choose_by = {choose_by!r}: it is not measured on validation tasks. Choose by 'rate'"
        )
    return -float(value) if choose_by in LESS_IS_BETTER else float(value)
