"""What the finished runs of an experiment say, as its `results.json` has it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from courtside.experiment.arms import compare_variant
from courtside.experiment.config import EXPERIMENT
from courtside.experiment.contrasts import judge
from courtside.experiment.jobs import load_outcome
from courtside.experiment.outcomes import Outcome
from courtside.experiment.plan import ONLY, Plan
from courtside.experiment.results_json import format_json
from courtside.experiment.schedule import (
    best_rate,
    final_jobs,
    planned_jobs,
    select_arms,
    sweep_jobs,
)
from courtside.report.folder.files import replace_file


def load_outcomes(plan: Plan) -> dict[str, Outcome]:
    """By name: all outcomes that are there, failures too."""
    outcomes: dict[str, Outcome] = {}
    while True:  # finals are known once their sweep is
        jobs = [job for job in planned_jobs(plan, outcomes) if job.name not in outcomes]
        loaded = {job.name: measured for job in jobs if (measured := load_outcome(job)) is not None}
        if not loaded:
            return outcomes
        outcomes |= loaded


def summarize(plan: Plan, outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    """Of what is finished; arms without a chosen learning rate or a final run are left out."""
    rates = {
        name: rate
        for name, arm in plan.arms.items()
        if (rate := best_rate(plan, arm, outcomes)) is not None
    }
    through = {name: o for name, o in outcomes.items() if "failed" not in o}
    sections = {}
    for variant in plan.variants:
        runs = {
            name: [
                {**through[job.name], "seed": seed}
                for seed, job in zip(
                    plan.arms[name].seeds,
                    final_jobs(plan, plan.arms[name], rate, variant),
                    strict=True,
                )
                if job.name in through
            ]
            for name, rate in rates.items()
            if variant in plan.arms[name].variants
        }
        if measured := {name: rows for name, rows in runs.items() if rows}:
            sections[variant] = compare_variant(measured, plan.goals, plan.design)
            for name, row in sections[variant]["arms"].items():
                row["learning_rate"] = rates[name]
    contrasts = [row for section in sections.values() for row in section["contrasts"]]
    judge(contrasts, plan.design, plan.num_tests)
    environment = dict(next((o["environment"] for o in through.values()), {}))
    environment.pop("command", None)  # of a worker
    return {
        "date": time.strftime("%Y-%m-%d"),
        "chosen_on": plan.choose_by,
        **({"swept_on": plan.sweep_on} if plan.sweep_on else {}),
        **({"budget": dict(plan.budget)} if plan.budget else {}),
        "learning_rates": rates,
        "design": {
            "contrasts": [list(pair) for pair in plan.design.pairs],
            "outcomes": dict(plan.design.outcomes or {}),
            "margin": plan.design.margin,
            "unpaired": list(plan.design.unpaired),
            "num_tests": plan.num_tests,
        },
        **(sections.get(ONLY, {}) if ONLY in plan.variants else {"variants": sections}),
        "sweep": [
            {
                "arm": name,
                "learning_rate": rate,
                "validation": next(reversed(through[job.name]["validation"]), None),
            }
            for name, arm in plan.arms.items()
            if arm.rate_of == name
            for rate, job in sweep_jobs(plan, arm).items()
            if job.name in through
        ],
        "failed": {name: o["failed"] for name, o in outcomes.items() if "failed" in o},
        "worker_minutes": round(sum(o["wall_seconds"] for o in through.values()) / 60, 1),
        "environment": environment,
    }


def results_file(plan: Plan) -> Path:
    """`results.json` next to an experiment.toml, `mine-results.json` next to mine.toml."""
    name = "results.json" if plan.file.name == EXPERIMENT else f"{plan.file.stem}-results.json"
    return plan.file.with_name(name)


def write_results(plan: Plan, results: Mapping[str, Any]) -> Path:
    path = results_file(plan)
    replace_file(path, (format_json(results) + "\n").encode())
    return path


def write_arms(plan: Plan, outcomes: Mapping[str, Outcome]) -> None:
    """`arms.json` in the folder of the runs: by arm, or ARM-VARIANT, the names of its final runs;
    those of a sweep that was not chosen are in none."""
    arms: dict[str, list[str]] = {}
    for arm, variant in select_arms(plan):
        rate = best_rate(plan, arm, outcomes)
        jobs = [] if rate is None else final_jobs(plan, arm, rate, variant)
        names = [j.name for j in jobs if "failed" not in outcomes.get(j.name, {"failed": ""})]
        if names:
            arms[f"{arm.name}-{variant}" if variant else arm.name] = names
    replace_file(plan.folder / "arms.json", (json.dumps(arms, indent=1) + "\n").encode())
