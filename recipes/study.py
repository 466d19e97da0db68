"""Run the arms of a study over learning rates and seeds, and write down what came out.

    python recipes/study.py recipes/distil-back [--jobs 4] [--out runs]

A study is a folder with a `study.toml`: its arms (recipes that differ in one thing), the learning
rates to try, the seeds, optionally variants of all arms (lengths, sizes) and recipes that make the
models the arms start from. Each arm's learning rate is chosen on validation tasks with the first
seed, on one variant; the test tasks are looked at once per final run. Writes `results.json` into
the study's folder.

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

from study_plan import ONLY, Plan, best_rate, final, prepare_jobs, read_plan, sweep, wanted
from study_results import Outcome, compared, readable, told
from study_workers import Job, run_all, write_failure


def finished(one: Job) -> Outcome | None:
    """What it measured, if it has; refuses what was measured with another recipe."""
    if not one.outcome.is_file() or (one.export is not None and not one.export.exists()):
        return None
    found: Outcome = json.loads(one.outcome.read_text())
    if found["recipe"] != one.identity():
        if "failed" in found:
            return None  # and is mended now, perhaps
        sys.exit(
            f"{one.outcome}: measured with other settings than the study's now. Delete it to run "
            "that again, or give another --out"
        )
    return found


def known(plan: Plan) -> dict[str, Outcome]:
    """By name: all outcomes that are there, failures too."""
    outcomes: dict[str, Outcome] = {}
    while True:  # finals are known once their sweep is
        jobs = [one for one in wanted(plan, outcomes) if one.name not in outcomes]
        found = {one.name: measured for one in jobs if (measured := finished(one)) is not None}
        if not found:
            return outcomes
        outcomes |= found


def run_study(plan: Plan, *, num_workers: int, only: str, minutes: float | None) -> bool:
    """Whether all went well. Without time left no further run is begun."""
    began = time.monotonic()
    failures: list[str] = []

    def done(one: Job, reason: str | None) -> None:
        clock = time.strftime("%H:%M:%S")
        if reason is None:
            print(f"{clock} done {one.name}", flush=True)
            outcomes[one.name] = json.loads(one.outcome.read_text())
            return
        print(f"{clock} FAILED {one.name}: {reason}\n  see {one.log}", flush=True)
        failures.append(one.name)
        outcomes[one.name] = {"failed": reason}
        write_failure(one, reason)

    def jobs() -> Iterator[Job]:
        yield from prepare
        if all("failed" not in outcomes.get(one.name, {"failed": "not yet"}) for one in prepare):
            yield from wanted(plan, outcomes, only)

    def next_job(under_way: set[str]) -> Job | None:
        if minutes is not None and time.monotonic() - began > 60 * minutes:
            return None
        return next((one for one in jobs() if one.name not in {*outcomes, *under_way}), None)

    prepare = prepare_jobs(plan)
    outcomes = {one.name: found for one in prepare if (found := finished(one))}
    outcomes |= {n: o for n, o in known(plan).items() if "failed" not in o}  # those are tried again
    run_all(next_job, num_workers=num_workers, done=done)
    left = {one.name for one in wanted(plan, outcomes, only)} - outcomes.keys()
    if left:
        print(f"{len(left)} runs are left; the same command goes on with them")
    return not failures


def summary(plan: Plan, outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    """Of what is finished; arms without a chosen learning rate or a final run are left out."""
    rates = {
        name: rate
        for name, arm in plan.arms.items()
        if (rate := best_rate(plan, arm, outcomes)) is not None
    }
    through = {name: one for name, one in outcomes.items() if "failed" not in one}
    sections = {}
    for variant in plan.variants:
        runs = {
            name: [
                {**through[one.name], "seed": seed}
                for seed, one in zip(
                    plan.arms[name].seeds, final(plan, plan.arms[name], rate, variant), strict=True
                )
                if one.name in through
            ]
            for name, rate in rates.items()
            if variant in plan.arms[name].variants
        }
        if found := {name: own for name, own in runs.items() if own}:
            sections[variant] = compared(found, plan.goals)
            for name, row in sections[variant]["arms"].items():
                row["learning_rate"] = rates[name]
    environment = dict(next((one["environment"] for one in through.values()), {}))
    environment.pop("command", None)  # of a worker
    return {
        "date": time.strftime("%Y-%m-%d"),
        "chosen_on": plan.choose_by,
        **({"swept_on": plan.sweep_on} if plan.sweep_on else {}),
        "learning_rates": rates,
        **(sections.get(ONLY, {}) if ONLY in plan.variants else {"variants": sections}),
        "sweep": [
            {"arm": name, "learning_rate": rate, "validation": through[one.name]["validation"][-1]}
            for name, arm in plan.arms.items()
            if arm.rate_of == name
            for rate, one in sweep(plan, arm).items()
            if one.name in through
        ],
        "failed": {name: one["failed"] for name, one in outcomes.items() if "failed" in one},
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
    options = parser.parse_args()
    plan = read_plan(options.study, options.out, options.extra)
    well = True
    if not options.summarise:
        try:
            well = run_study(
                plan, num_workers=options.jobs, only=options.only, minutes=options.minutes
            )
        except KeyboardInterrupt:
            sys.exit("stopped; the same command goes on, --summarise tells what is finished")
    outcomes = known(plan)
    if all("failed" in one for one in outcomes.values()):
        sys.exit("no run is finished, so there is nothing to write down")
    results = summary(plan, outcomes)
    results["command"] = " ".join(["python", *sys.argv])
    (options.study / "results.json").write_text(readable(results) + "\n")
    print(*told(results), sep="\n")
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
