"""A study's plan, `study.toml`, and which runs follow from it, in which order. Runs nothing.

learning_rates = [1e-5, 1e-4]   # of every arm that has none of its own
seeds = [0, 1, 2]
choose_by = "rate"              # or "kl" or "error_rate": what the best learning rate is best in
sweep_on = "short"              # the variant it is chosen on; unset: the first
first = ["one"]                 # arms that are run before the others
goals = [0.5]                   # trained tokens until validation reaches these are reported
keep = false                    # delete a run's checkpoints once it is measured
with = ["evaluate.every=5"]     # overrides for all runs, as on the command line
contrasts = [["one", "two"]]    # fixed before the runs: the first arm against the second
unpaired = ["three"]            # arms with other tasks in the same seed: compared by Welch
margin = 0.03                   # a difference within it counts as none in a test of equivalence

[outcomes]                      # fixed, too, the first decides: measure → SD that is expected of a
"error_rate" = 0.04             # difference paired by seed; `score` is the mean score, `training/…`
"training/error_rate" = 0.008   # the mean over training steps

[prepare]                       # OUT/STUDY/base is made by base.toml before anything else
base = "base.toml"

[variants.short]                # every arm is run in every variant
with = ["tasks.turns=4"]

[arms.one]
recipe = "recipe.toml"
with = ["losses.0.weight=2"]
learning_rates = [1e-5]         # `seeds` and `variants` (names) may be its own, too
in.short = ["train.prompts_per_step=8"]  # overrides of this arm in that variant,
over the variant's own

[arms.two]
recipe = "recipe.toml"
rate_of = "one"                 # no sweep: the learning rate that was chosen for that arm
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from study_contrasts import Design
from study_results import LESS_IS_BETTER, Outcome, merit
from study_statistics import detectable_effect
from study_workers import Job

ONLY = ""
"""The variant of a study that has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    name: str
    recipe: Path
    overrides: tuple[str, ...]
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    variants: tuple[str, ...]
    overrides_in: Mapping[str, tuple[str, ...]]
    """By variant: overrides of the arm in it alone."""
    rate_of: str
    """The arm whose learning rate it uses; its own name where it has a sweep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    folder: Path
    """Of the runs."""
    prepare: Mapping[str, Path]
    """Name of a model → the recipe that makes it."""
    variants: Mapping[str, tuple[str, ...]]
    """Name → its overrides."""
    arms: Mapping[str, Arm]
    first: tuple[str, ...]
    """The arms that are run before the others."""
    sweep_on: str
    choose_by: str
    goals: tuple[float, ...]
    keep: bool
    overrides: tuple[str, ...]
    """Of the plan, for all runs; an arm's and a variant's go over them."""
    extra: tuple[str, ...]
    """Of the command line; they go over everything."""
    design: Design

    @property
    def num_tests(self) -> int:
        """Contrasts × variants, over which Holm's correction goes, for each outcome by itself."""
        return self.design.num_tests({name: arm.variants for name, arm in self.arms.items()})


KEYS = {
    "learning_rates", "seeds", "goals", "choose_by", "sweep_on", "first", "keep", "with", "prepare",
    "variants", "arms", "contrasts", "outcomes", "margin",
    "unpaired",
}  # fmt: skip
ARM_KEYS = {"recipe", "with", "in", "learning_rates", "seeds", "variants", "rate_of"}


def read_plan(study: Path, out: Path, extra: Sequence[str]) -> Plan:
    tree = tomllib.loads((study / "study.toml").read_text())
    _refuse_unknown(tree, KEYS, "study.toml")
    variants = {n: tuple(v.get("with", ())) for n, v in tree.get("variants", {}).items()}
    for name, variant in tree.get("variants", {}).items():
        _refuse_unknown(variant, {"with"}, f"variants.{name}")
    variants = variants or {ONLY: ()}
    arms = {}
    for name, arm in tree["arms"].items():
        _refuse_unknown(arm, ARM_KEYS, f"arms.{name}")
        arms[name] = Arm(
            name=name,
            recipe=study / arm["recipe"],
            overrides=tuple(arm.get("with", ())),
            rates=tuple(arm.get("learning_rates", tree.get("learning_rates", ()))),
            seeds=tuple(arm.get("seeds", tree["seeds"])),
            variants=tuple(arm.get("variants", variants)),
            overrides_in={name: tuple(overrides) for name, overrides in arm.get("in", {}).items()},
            rate_of=arm.get("rate_of", name),
        )
    plan = Plan(
        folder=out / study.resolve().name,
        prepare={name: study / recipe for name, recipe in tree.get("prepare", {}).items()},
        variants=variants,
        arms=arms,
        first=tuple(tree.get("first", ())),
        sweep_on=tree.get("sweep_on", next(iter(variants))),
        choose_by=tree.get("choose_by", "rate"),
        goals=tuple(tree.get("goals", ())),
        keep=tree.get("keep", True),
        overrides=tuple(tree.get("with", ())),
        extra=tuple(extra),
        design=Design(
            pairs=tuple((first, other) for first, other in tree.get("contrasts", ())),
            outcomes=tree.get("outcomes", {}),
            margin=tree.get("margin", 0.03),
            unpaired=tuple(tree.get("unpaired", ())),
        ),
    )
    _check(plan)
    return plan


def _refuse_unknown(tree: Mapping[str, Any], allowed: set[str], where: str) -> None:
    if unknown := sorted(tree.keys() - allowed):
        sys.exit(
            f"{where}: {', '.join(unknown)} is not known; there are {', '.join(sorted(allowed))}"
        )


def _check(plan: Plan) -> None:
    if plan.choose_by not in ("rate", *LESS_IS_BETTER):
        sys.exit(f"choose_by = {plan.choose_by!r}: use rate, {' or '.join(LESS_IS_BETTER)}")
    references: dict[str, tuple[tuple[str, ...], Mapping[str, Any]]] = {
        "sweep_on": ((plan.sweep_on,), plan.variants),
        "first": (plan.first, plan.arms),
        "unpaired": (plan.design.unpaired, plan.arms),
        "contrasts": (tuple(name for pair in plan.design.pairs for name in pair), plan.arms),
    }
    if plan.design.pairs and not plan.design.outcomes:
        sys.exit("contrasts without outcomes decide nothing; name the measures under [outcomes]")
    for arm in plan.arms.values():
        references[f"arms.{arm.name}.variants"] = arm.variants, plan.variants
        references[f"arms.{arm.name}.in"] = tuple(arm.overrides_in), plan.variants
        references[f"arms.{arm.name}.rate_of"] = (arm.rate_of,), plan.arms
        if not arm.rates and arm.rate_of == arm.name:
            sys.exit(f"arms.{arm.name}: no learning_rates, here or in the plan; give some")
        if plan.arms.get(arm.rate_of, arm).rate_of != arm.rate_of:
            sys.exit(f"arms.{arm.name}.rate_of = {arm.rate_of!r}, which has no sweep of its own")
    for field, (names, allowed) in references.items():
        for name in names:
            if name not in allowed:
                sys.exit(f"{field}: there is no {name!r}, only {', '.join(allowed)}")


def describe_design(plan: Plan) -> Iterator[str]:
    """For each contrast and outcome: the effect that four of five such studies would find where
    differences vary as expected."""
    yield (
        f"{plan.num_tests} contrasts under Holm's correction for each outcome, of which the first "
        f"decides; margin {plan.design.margin:g}"
    )
    for first, other in plan.design.pairs:
        seeds = set(plan.arms[first].seeds) & set(plan.arms[other].seeds)
        for outcome, sd in (plan.design.outcomes or {}).items():
            strict, alone = (
                detectable_effect(sd, len(seeds), tests) for tests in (plan.num_tests, 1)
            )
            yield (
                f"{first} minus {other}, {outcome}: {len(seeds)} seeds, expected SD {sd:g}, "
                f"detectable {strict:.4f} (without correction {alone:.4f})"
            )


# ── what is to be run, in which order ────────────────────────────────────────────────────────────


def job(plan: Plan, arm: Arm, variant: str, rate: float, seed: int) -> Job:
    parts = [arm.name, *([variant] if variant else []), f"lr{rate:g}", f"seed{seed}"]
    chosen = (f"train.learning_rate={rate}", f"seed={seed}")
    return Job(
        name="-".join(parts),
        recipe=arm.recipe,
        overrides=(
            *plan.overrides,
            *plan.variants[variant],
            *arm.overrides,
            *arm.overrides_in.get(variant, ()),
            *chosen,
            *plan.extra,
        ),
        folder=plan.folder,
        keep=plan.keep,
    )


def sweep(plan: Plan, arm: Arm) -> dict[float, Job]:
    """By learning rate: the runs it is chosen by. One rate alone needs no choice."""
    if arm.rate_of != arm.name:
        return sweep(plan, plan.arms[arm.rate_of])
    return {rate: job(plan, arm, plan.sweep_on, rate, arm.seeds[0]) for rate in arm.rates}


def best_rate(plan: Plan, arm: Arm, outcomes: Mapping[str, Outcome]) -> float | None:
    """None: not known yet, or no run of the sweep went through. A rate that failed is no choice."""
    rate_jobs = sweep(plan, arm)
    if len(rate_jobs) == 1:
        return next(iter(rate_jobs))
    if any(job.name not in outcomes for job in rate_jobs.values()):
        return None
    merits = {
        rate: merit(outcomes[job.name], plan.choose_by)
        for rate, job in rate_jobs.items()
        if "failed" not in outcomes[job.name]
    }
    return max(merits, key=lambda rate: merits[rate]) if merits else None


def final(plan: Plan, arm: Arm, rate: float, variant: str) -> list[Job]:
    """A run for each seed."""
    return [job(plan, arm, variant, rate, seed) for seed in arm.seeds]


def planned_jobs(plan: Plan, outcomes: Mapping[str, Outcome], only: str = "") -> Iterator[Job]:
    """All runs that are known now, the most important first: of the first arms the sweeps, then
    seed by seed all variants; then the same of the others."""
    for is_first in (True, False):
        tier = [arm for arm in plan.arms.values() if (arm.name in plan.first) == is_first]
        selected = {
            (arm.name, variant)
            for arm in tier
            for variant in arm.variants
            if re.search(only, f"{arm.name}-{variant}" if variant else arm.name)
        }
        tier = [arm for arm in tier if any(arm.name == name for name, _ in selected)]
        for arm in tier:
            if len(rate_jobs := sweep(plan, arm)) > 1:
                yield from rate_jobs.values()
        rates = {arm.name: best_rate(plan, arm, outcomes) for arm in tier}
        for place in range(max((len(arm.seeds) for arm in tier), default=0)):
            for variant in plan.variants:
                for arm in tier:
                    rate = rates[arm.name]
                    if (arm.name, variant) in selected and rate is not None:
                        yield from final(plan, arm, rate, variant)[place : place + 1]


def prepare_jobs(plan: Plan) -> list[Job]:
    return [
        Job(
            name=f"prepare-{name}",
            recipe=recipe,
            overrides=(*plan.overrides, *plan.extra),
            folder=plan.folder,
            export=plan.folder / name,
        )
        for name, recipe in plan.prepare.items()
    ]
