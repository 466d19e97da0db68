"""Run the arms of a study over learning rates and seeds, and write down what came out.

    python recipes/study.py recipes/distil-back [--jobs 4] [--out runs]

A study is a folder with a `study.toml`: its arms (recipes that differ in one thing), the learning
rates to try, the seeds, optionally variants of all arms (lengths, sizes) and recipes that make the
models the arms start from. Each arm's learning rate is chosen on validation tasks with the first
seed, on one variant; the test tasks are looked at once per final run. Writes `results.json` into
the study's folder. Contrasts and outcomes that the plan fixes get verdicts, all else is labelled
exploratory; `--plan` prints what differences the seeds can show.

It can be cut off at any time and started again: runs that are finished are not run again, and
`--summarise` writes the results of those alone. What a run measured is in OUT/STUDY/outcomes/, and
nothing else is needed to go on elsewhere.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from study_arms import compared, summarize
from study_contrasts import judge
from study_plan import (
    ONLY,
    Plan,
    best_rate,
    describe_design,
    final,
    planned_jobs,
    prepare_jobs,
    read_plan,
    sweep,
)
from study_results import Outcome, readable
from study_workers import Job, run_all, write_failure


def finished(job: Job) -> Outcome | None:
    """What it measured, if it has; refuses what was measured with another recipe."""
    if not job.outcome.is_file() or (job.export is not None and not job.export.exists()):
        return None
    outcome: Outcome = json.loads(job.outcome.read_text())
    if outcome["recipe"] != job.identity():
        if "failed" in outcome:
            return None  # and is mended now, perhaps
        sys.exit(
            f"{job.outcome}: measured with other settings than the study's now. Delete it to run "
            "that again, or give another --out"
        )
    return outcome


def load_outcomes(plan: Plan) -> dict[str, Outcome]:
    """By name: all outcomes that are there, failures too."""
    outcomes: dict[str, Outcome] = {}
    while True:  # finals are known once their sweep is
        jobs = [job for job in planned_jobs(plan, outcomes) if job.name not in outcomes]
        loaded = {job.name: measured for job in jobs if (measured := finished(job)) is not None}
        if not loaded:
            return outcomes
        outcomes |= loaded


def run_study(plan: Plan, *, num_workers: int, only: str, minutes: float | None) -> bool:
    """Whether all went well. Without time left no further run is begun."""
    began = time.monotonic()
    failures: list[str] = []

    def done(job: Job, reason: str | None) -> None:
        clock = time.strftime("%H:%M:%S")
        if reason is None:
            print(f"{clock} done {job.name}", flush=True)
            outcomes[job.name] = json.loads(job.outcome.read_text())
            return
        print(f"{clock} FAILED {job.name}: {reason}\n  see {job.log}", flush=True)
        failures.append(job.name)
        outcomes[job.name] = {"failed": reason}
        write_failure(job, reason)

    def jobs() -> Iterator[Job]:
        yield from prepare
        if all("failed" not in outcomes.get(job.name, {"failed": "not yet"}) for job in prepare):
            yield from planned_jobs(plan, outcomes, only)

    def next_job(under_way: set[str]) -> Job | None:
        if minutes is not None and time.monotonic() - began > 60 * minutes:
            return None
        return next((job for job in jobs() if job.name not in {*outcomes, *under_way}), None)

    prepare = prepare_jobs(plan)
    outcomes = {job.name: outcome for job in prepare if (outcome := finished(job))}
    # Failed jobs run again.
    outcomes |= {n: o for n, o in load_outcomes(plan).items() if "failed" not in o}
    run_all(next_job, num_workers=num_workers, done=done)
    missing = {job.name for job in planned_jobs(plan, outcomes, only)} - outcomes.keys()
    if missing:
        print(f"{len(missing)} runs are left; the same command goes on with them")
    return not failures


def summary(plan: Plan, outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
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
                    plan.arms[name].seeds, final(plan, plan.arms[name], rate, variant), strict=True
                )
                if job.name in through
            ]
            for name, rate in rates.items()
            if variant in plan.arms[name].variants
        }
        if measured := {name: rows for name, rows in runs.items() if rows}:
            sections[variant] = compared(measured, plan.goals, plan.design)
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
            {"arm": name, "learning_rate": rate, "validation": through[job.name]["validation"][-1]}
            for name, arm in plan.arms.items()
            if arm.rate_of == name
            for rate, job in sweep(plan, arm).items()
            if job.name in through
        ],
        "failed": {name: o["failed"] for name, o in outcomes.items() if "failed" in o},
        "worker_minutes": round(sum(o["wall_seconds"] for o in through.values()) / 60, 1),
        "environment": environment,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", type=Path)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--with", dest="extra", nargs="*", default=[], help="for all runs")
    parser.add_argument("--only", default="", metavar="REGEX", help="of ARM or ARM-VARIANT")
    parser.add_argument("--minutes", type=float, help="begin no further run after so many")
    parser.add_argument("--summarise", action="store_true", help="run nothing")
    parser.add_argument(
        "--plan", action="store_true", help="run nothing: print contrasts and what they can detect"
    )
    options = parser.parse_args()
    plan = read_plan(options.study, options.out, options.extra)
    if options.plan:
        print(*describe_design(plan), sep="\n")
        return
    well = True
    if not options.summarise:
        try:
            well = run_study(
                plan, num_workers=options.jobs, only=options.only, minutes=options.minutes
            )
        except KeyboardInterrupt:
            sys.exit("stopped; the same command goes on, --summarise tells what is finished")
    outcomes = load_outcomes(plan)
    if all("failed" in o for o in outcomes.values()):
        sys.exit("no run is finished, so there is nothing to write down")
    results = summary(plan, outcomes)
    results["command"] = " ".join(["python", *sys.argv])
    (options.study / "results.json").write_text(readable(results) + "\n")
    print(*summarize(results), sep="\n")
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
