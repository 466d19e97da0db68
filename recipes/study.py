"""Run the arms of a study over learning rates and seeds, and write down what came out.

    python recipes/study.py recipes/distil-back [--jobs 4] [--out runs]

A study is a folder with a `study.toml`: its arms (recipes that differ in one thing), the learning
rates to try, the seeds, and optionally recipes that make the models the arms start from. Each arm's
learning rate is chosen on validation tasks with the first seed; the test tasks are looked at once
per final run. Writes `results.json` into the study's folder. Runs that are there already are not
run again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

# Two-sided 95% quantiles of Student's t, by degrees of freedom.
T95 = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def train(recipe: Path, run: Path, *overrides: str) -> Path:
    command = [
        sys.executable,
        "-m",
        "courtside",
        "train",
        str(recipe),
        *overrides,
        "--run",
        str(run),
    ]
    run.parent.mkdir(parents=True, exist_ok=True)
    with log_of(run).open("w") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        sys.exit(f"failed ({done.returncode}): {' '.join(command)}\nsee {log_of(run)}")
    print(f"{time.strftime('%H:%M:%S')} done {run.name}", flush=True)
    return run


def log_of(run: Path) -> Path:
    return run.with_name(f"{run.name}.log")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def outcome(run: Path) -> dict[str, Any]:
    """What one run measured: before and after on test, and validation along trained tokens."""
    evaluations = lines(run / "evaluations.jsonl")
    tokens, total = {0: 0}, 0
    for row in lines(run / "metrics.jsonl"):
        total += sum(value for key, value in row.items() if key.startswith("tokens/"))
        tokens[row["step"] + 1] = total
    own = [e for e in evaluations if e["who"] == "student"]
    test = [e for e in own if e["split"] == "test"]
    teacher = [e["rate"] for e in evaluations if e["who"] == "teacher"]
    return {
        "before": test[0]["rate"],
        "after": test[-1]["rate"],
        "metrics_before": test[0]["metrics"],
        "metrics_after": test[-1]["metrics"],
        "teacher": teacher[0] if teacher else None,
        "trained_tokens": total,
        "validation": [
            [e["step"], tokens[e["step"]], e["rate"], e["metrics"].get("kl_estimate")]
            for e in own
            if e["split"] == "validation"
        ],
        "seconds": {
            k: v["seconds"] for k, v in json.loads((run / "costs.json").read_text()).items()
        },
    }


def over_seeds(values: list[float]) -> dict[str, float]:
    mean = statistics.fmean(values)
    half = 0.0
    if len(values) > 1:
        half = T95[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return {"mean": mean, "low": mean - half, "high": mean + half, "seeds": len(values)}


def difference(one: list[float], other: list[float]) -> dict[str, float]:
    """Mean of `one` minus mean of `other`, by Welch; the degrees of freedom are rounded down."""
    mean = statistics.fmean(one) - statistics.fmean(other)
    parts = [statistics.variance(values) / len(values) for values in (one, other)]
    if sum(parts) == 0:
        return {"mean": mean, "low": mean, "high": mean}
    weights = zip(parts, (one, other), strict=True)
    freedom = sum(parts) ** 2 / sum(part**2 / (len(values) - 1) for part, values in weights)
    half = T95[min(int(freedom), max(T95))] * math.sqrt(sum(parts))
    return {"mean": mean, "low": mean - half, "high": mean + half}


RATE, KL = 2, 3
"""Columns of a run's `validation`, behind step and trained tokens."""


def at_tokens(run: dict[str, Any], budget: float, column: int = RATE) -> float:
    """A validation number at a number of trained tokens, between the evaluations around it."""
    curve = [(row[1], row[column]) for row in run["validation"]]
    for (t0, r0), (t1, r1) in pairwise(curve):
        if t0 <= budget <= t1:
            return float(r0 + (r1 - r0) * (budget - t0) / max(t1 - t0, 1))
    return float(curve[-1][1])


def tokens_until(run: dict[str, Any], rate: float) -> int | None:
    """Trained tokens at the first validation that reaches `rate`; None: none did."""
    return next((tokens for _, tokens, r, _ in run["validation"] if r >= rate), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", type=Path)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--with", dest="extra", nargs="*", default=[], help="for all runs")
    options = parser.parse_args()
    plan = tomllib.loads((options.study / "study.toml").read_text())
    options.extra += plan.get("with", [])
    runs = options.out / options.study.name
    began = time.time()
    for name, recipe in plan.get("prepare", {}).items():
        made = train(options.study / recipe, runs / f"prepare-{name}", *options.extra)
        if not (runs / name).exists():
            command = [sys.executable, "-m", "courtside", "export", str(made), str(runs / name)]
            subprocess.run(command, check=True)
    arms = {name: {**plan, **arm} for name, arm in plan["arms"].items()}

    def run(arm: str, rate: float, seed: int) -> tuple[str, float, int, dict[str, Any]]:
        name = f"{arm}-lr{rate:g}-seed{seed}"
        settings = [*options.extra, *plan["arms"][arm].get("with", [])]
        chosen = [f"train.learning_rate={rate}", f"seed={seed}", *settings]
        folder = train(options.study / arms[arm]["recipe"], runs / name, *chosen)
        return arm, rate, seed, outcome(folder)

    with ThreadPoolExecutor(options.jobs) as pool:
        first = [(a, r, arm["seeds"][0]) for a, arm in arms.items() for r in arm["learning_rates"]]
        sweep = list(pool.map(lambda job: run(*job), first))
        score = plan.get("choose_by", "rate")
        best: dict[str, float] = {}
        for arm in arms:
            tried = {rate: o["validation"][-1] for a, rate, _, o in sweep if a == arm}
            # The held-out KL where that is what the study is about, the pass rate elsewhere.
            merit = {r: -v[KL] if score == "kl" else v[RATE] for r, v in tried.items()}
            best[arm] = max(merit, key=lambda rate: merit[rate])
        jobs = [(a, best[a], seed) for a, arm in arms.items() for seed in arm["seeds"]]
        final = list(pool.map(lambda job: run(*job), jobs))
    results = summary(plan, list(arms), best, sweep, final)
    results["command"] = " ".join(["python", *sys.argv])
    results["minutes"] = round((time.time() - began) / 60, 1)
    arm, rate, seed = jobs[0]
    environment = runs / f"{arm}-lr{rate:g}-seed{seed}" / "environment.json"
    results["environment"] = json.loads(environment.read_text())
    (options.study / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    for arm in arms:
        row = results["arms"][arm]
        print(arm, f"lr {best[arm]:g}", row["before"], row["after"], row["at_equal_tokens"])


def summary(
    plan: dict[str, Any],
    arms: list[str],
    best: dict[str, float],
    sweep: list[Any],
    final: list[Any],
) -> dict[str, Any]:
    budget = min(o["trained_tokens"] for *_, o in final)
    table = {}
    for arm in arms:
        own = [o for a, _, _, o in final if a == arm]
        table[arm] = {
            "learning_rate": best[arm],
            "before": over_seeds([o["before"] for o in own]),
            "after": over_seeds([o["after"] for o in own]),
            **{
                f"{name}_{when}": over_seeds([o[f"metrics_{when}"][name] for o in own])
                for name in ("kl_estimate", "forward_kl_estimate")
                for when in ("before", "after")
                if all(name in o[f"metrics_{when}"] for o in own)
            },
            "at_equal_tokens": over_seeds([at_tokens(o, budget) for o in own]),
            **(
                {"kl_at_equal_tokens": over_seeds([at_tokens(o, budget, KL) for o in own])}
                if all(row[KL] is not None for o in own for row in o["validation"])
                else {}
            ),
            "trained_tokens": over_seeds([o["trained_tokens"] for o in own]),
            "tokens_until": {
                f"{goal:g}": [tokens_until(o, goal) for o in own] for goal in plan.get("goals", [])
            },
            "runs": own,
        }
    return {
        "date": time.strftime("%Y-%m-%d"),
        "chosen_on": plan.get("choose_by", "rate"),
        "equal_tokens": budget,
        "arms": table,
        "differences": differences(table),
        "sweep": [
            {"arm": a, "learning_rate": r, "validation": o["validation"][-1]}
            for a, r, _, o in sweep
        ],
    }


def differences(table: dict[str, Any]) -> dict[str, Any]:
    """Of every two arms, in each measure that both have."""
    found: dict[str, Any] = {}
    for a, b in combinations(table, 2):
        two = [table[a]["runs"], table[b]["runs"]]
        if min(map(len, two)) < 2:
            continue
        found[f"{a} minus {b}"] = {
            "after": difference(*[[o["after"] for o in own] for own in two]),
            **{
                name: difference(*[[o["metrics_after"][name] for o in own] for own in two])
                for name in ("kl_estimate", "forward_kl_estimate")
                if all(name in o["metrics_after"] for own in two for o in own)
            },
        }
    return found


if __name__ == "__main__":
    main()
