"""What the runs of a study measured, and the comparison of its arms. Loads no torch."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

Outcome = dict[str, Any]
"""What one run measured, as `outcome` returns it and a JSON file stores it."""

# Two-sided 95% quantiles of Student's t, by degrees of freedom.
T95 = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}

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
)
"""What a table has of an evaluation's metrics, and all `events/…`."""
PREFIXES = ("decisions/", "collateral/")
"""Further ones, of which all are in it."""


# ── one run ──────────────────────────────────────────────────────────────────────────────────────


def outcome(run: Path) -> Outcome:
    """Before and after on test tasks and on each suite; validation along trained tokens; the share
    of turns with an error in each step's own episodes, which costs nothing."""
    evaluations = _lines(run / "evaluations.jsonl")
    tokens, total = {0: 0}, 0
    shifts: list[float] = []
    errors: list[float] = []
    decisions: dict[str, list[float]] = {}
    for row in _lines(run / "metrics.jsonl"):
        total += sum(value for key, value in row.items() if key.startswith("tokens/"))
        tokens[row["step"] + 1] = total
        shifts += [row["hints/shift"]] if row.get("hints/shift") is not None else []
        errors += [row["error_rate"]] if "error_rate" in row else []
        rates = {name: rate for name, rate in row.items() if name.startswith("decisions/")}
        for name, rate in {**rates, **error_by_side(rates)}.items():
            decisions.setdefault(name, []).append(rate)
    student_evaluations = [e for e in evaluations if e["policy"] == "student"]
    suites: dict[str, list[Any]] = {}
    for e in evaluations:
        if e["policy"].startswith("student:") and e["split"] == "test":
            suites.setdefault(e["policy"].partition(":")[2], []).append(e)
    teacher = [e["mean_score"] for e in evaluations if e["policy"] == "teacher"]
    costs = json.loads((run / "costs.json").read_text())
    return {
        **_before_and_after([e for e in student_evaluations if e["split"] == "test"]),
        "suites": {name: _before_and_after(rows) for name, rows in suites.items()},
        "teacher": teacher[0] if teacher else None,
        "trained_tokens": total,
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
        "seconds": {phase: cost["seconds"] for phase, cost in costs.items()},
        "costs": {
            phase: {key: value for key, value in cost.items() if key != "seconds"}
            for phase, cost in costs.items()
        },
        "environment": json.loads((run / "environment.json").read_text()),
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
        *((f"{name}/", suite) for name, suite in run["suites"].items()),
    ):
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
    for name, series in run.get("training_decisions", {}).items():
        result[f"training/{name}_after"] = statistics.fmean(series)
    return result


def error_by_side(metrics: Mapping[str, float]) -> dict[str, float]:
    """Of decisions called KIND/SIDE: the mean error over kinds, by side."""
    rates: dict[str, list[float]] = {}
    for name, rate in metrics.items():
        if name.startswith("decisions/") and name.count("/") == 2:
            rates.setdefault(name.rpartition("/")[2], []).append(rate)
    return {f"decisions/{side}": statistics.fmean(rates[side]) for side in sorted(rates)}


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
    value = float(run["validation"][-1][COLUMNS[choose_by]])
    return -value if choose_by in LESS_IS_BETTER else value


# ── over seeds ───────────────────────────────────────────────────────────────────────────────────


def over_seeds(values: Sequence[float]) -> dict[str, float]:
    """Mean and 95% interval; that of one seed has no width, which says nothing."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return {"mean": mean, "low": mean, "high": mean, "seeds": len(values)}
    half = _t95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return {"mean": mean, "low": mean - half, "high": mean + half, "seeds": len(values)}


def difference(first: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """Mean of `one` minus mean of `other`, by Welch; the degrees of freedom are rounded down."""
    mean = statistics.fmean(first) - statistics.fmean(other)
    parts = [statistics.variance(values) / len(values) for values in (first, other)]
    if sum(parts) == 0:
        return {"mean": mean, "low": mean, "high": mean}
    weights = zip(parts, (first, other), strict=True)
    freedom = sum(parts) ** 2 / sum(part**2 / (len(values) - 1) for part, values in weights)
    half = _t95(freedom) * math.sqrt(sum(parts))
    return {"mean": mean, "low": mean - half, "high": mean + half}


def _t95(freedom: float) -> float:
    # Rounded down, but 1.9999999 is a 2 that was computed.
    return T95[min(max(int(freedom + 1e-9), 1), max(T95))]


def _common(runs: Sequence[Mapping[str, float]]) -> list[str]:
    """The measures that all of them have."""
    return [name for name in runs[0] if all(name in run for run in runs)]


# ── arms ─────────────────────────────────────────────────────────────────────────────────────────


def compared(arms: Mapping[str, Sequence[Outcome]], goals: Sequence[float]) -> dict[str, Any]:
    """Arms of the same variant side by side; `arms`: each one's runs, a seed each."""
    budget = min(run["trained_tokens"] for runs in arms.values() for run in runs)
    return {
        "equal_tokens": budget,
        "arms": {name: _arm(runs, budget, goals) for name, runs in arms.items()},
        "differences": _differences(arms),
    }


def _arm(runs: Sequence[Outcome], budget: float, goals: Sequence[float]) -> dict[str, Any]:
    runs_measures = [measures(run) for run in runs]
    events = {
        name for m in runs_measures for name in m if "events/" in name
    }  # in some runs only: 0 there
    names = [*_common(runs_measures), *sorted(events - set(_common(runs_measures)))]
    row: dict[str, Any] = {
        name: over_seeds([m.get(name, 0.0) for m in runs_measures]) for name in names
    }
    for name, column in COLUMNS.items():
        curves = [[(r[0], r[column]) for r in run["validation"]] for run in runs]
        if not all(curves) or any(value is None for curve in curves for _, value in curve):
            continue
        prefix = "" if name == "rate" else f"{name}_"
        row[f"{prefix}at_equal_tokens"] = over_seeds([at_tokens(r, budget, column) for r in runs])
        row[f"{prefix}curve"] = [
            {"step": points[0][0], **over_seeds([value for _, value in points])}
            for points in zip(*curves, strict=True)
        ]
    if errors := [run["training_errors"] for run in runs if run["training_errors"]]:
        row["training_errors"] = [
            {"step": step, **over_seeds(points)}
            for step, points in enumerate(zip(*errors, strict=True))
        ]
    row["trained_tokens"] = over_seeds([run["trained_tokens"] for run in runs])
    row["seconds"] = over_seeds([sum(run["seconds"].values()) for run in runs])
    row["tokens_until"] = {f"{goal:g}": [tokens_until(run, goal) for run in runs] for goal in goals}
    row["runs"] = [
        {key: value for key, value in run.items() if key not in ("environment", "recipe")}
        for run in runs
    ]
    return row


def _differences(arms: Mapping[str, Sequence[Outcome]]) -> dict[str, Any]:
    """Of every two arms, in each measure after training that both have; events are in the rows.
    `paired`: seed by seed, where both have the same seeds; runs of a seed share their tasks."""
    result: dict[str, Any] = {}
    for a, b in combinations(arms, 2):
        two = [[measures(run) for run in arms[name]] for name in (a, b)]
        if min(map(len, two)) < 2:
            continue
        seeds = [[run.get("seed") for run in arms[name]] for name in (a, b)]
        result[f"{a} minus {b}"] = row = {}
        for name in _common([m for seeds in two for m in seeds]):
            if name.endswith("after") and "events/" not in name:
                first, other = ([m[name] for m in seeds] for seeds in two)
                row[name.removesuffix("_after")] = gap = difference(first, other)
                if seeds[0] == seeds[1] and None not in seeds[0]:
                    gap["paired"] = over_seeds([x - y for x, y in zip(first, other, strict=True)])
    return result


def summarize(results: Mapping[str, Any]) -> Iterable[str]:
    """A few lines for people."""
    sections = results.get("variants") or {"": results}
    for variant, section in sections.items():
        for arm, row in section["arms"].items():
            name = f"{variant} {arm}".strip()
            rate = f"lr {results['learning_rates'][arm]:g}"
            cells = [f"{name:<24} {rate:<9} {row['after']['seeds']} seeds"]
            for measure in ("", "error_rate_", "held_out/error_rate_", "logp_drop/clean_turns_"):
                if f"{measure}after" in row:
                    before, after = row.get(f"{measure}before"), row[f"{measure}after"]
                    was = "" if before is None else f"{before['mean']:.4f} → "
                    ends = f"({after['low']:.4f} to {after['high']:.4f})"
                    label = measure.rstrip("_") or "rate"
                    cells.append(f"{label} {was}{after['mean']:.4f} {ends}")
            yield "   ".join(cells)


def readable(tree: Any, indent: str = "") -> str:
    """JSON with five digits, in which what fits into a line is one."""
    line = json.dumps(_rounded(tree), ensure_ascii=False)
    if len(indent + line) <= 140 or not isinstance(tree, dict | list):
        return line
    deeper = indent + " "
    if isinstance(tree, dict):
        items = [f"{json.dumps(key)}: {readable(value, deeper)}" for key, value in tree.items()]
    else:
        items = [readable(value, deeper) for value in tree]
    first, last = "{}" if isinstance(tree, dict) else "[]"
    body = f",\n{deeper}".join(items)
    return f"{first}\n{deeper}{body}\n{indent}{last}"


def _rounded(tree: Any) -> Any:
    if isinstance(tree, float):
        return float(f"{tree:.5g}")
    if isinstance(tree, dict):
        return {key: _rounded(value) for key, value in tree.items()}
    return [_rounded(value) for value in tree] if isinstance(tree, list) else tree
