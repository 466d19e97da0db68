"""Which runs follow from a plan and from what is measured already, in which order. Runs nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from courtside.errors import RecipeError, UserError
from courtside.experiment.jobs import Job
from courtside.experiment.outcomes import Outcome, merit
from courtside.experiment.plan import Arm, Plan
from courtside.recipe import Recipe
from courtside.recipe.load import load_recipe

BUDGET_FIELDS = {
    "steps": "steps",
    "student_tokens": "max_student_tokens",
    "teacher_tokens": "max_teacher_tokens",
    "flops": "max_flops",
    "seconds": "max_seconds",
}
"""Of an experiment's budget → of [train]."""


def make_job(plan: Plan, arm: Arm, variant: str, rate: float, seed: int) -> Job:
    parts = [arm.name, *([variant] if variant else []), f"lr{rate:g}", f"seed{seed}"]
    chosen = (
        f"train.learning_rate={rate}",
        f"seed={seed}",
        *(f"train.{BUDGET_FIELDS[unit]}={limit}" for unit, limit in plan.budget.items()),
    )
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
        budget=plan.budget,
    )


def sweep_jobs(plan: Plan, arm: Arm) -> dict[float, Job]:
    """By learning rate: the runs it is chosen by. One rate alone needs no choice."""
    if arm.rate_of != arm.name:
        return sweep_jobs(plan, plan.arms[arm.rate_of])
    return {rate: make_job(plan, arm, plan.sweep_on, rate, arm.seeds[0]) for rate in arm.rates}


def best_rate(plan: Plan, arm: Arm, outcomes: Mapping[str, Outcome]) -> float | None:
    """None: not known yet, or no run of the sweep went through. A rate that failed is no choice."""
    rate_jobs = sweep_jobs(plan, arm)
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


def final_jobs(plan: Plan, arm: Arm, rate: float, variant: str) -> list[Job]:
    """A run for each seed."""
    return [make_job(plan, arm, variant, rate, seed) for seed in arm.seeds]


def planned_jobs(plan: Plan, outcomes: Mapping[str, Outcome], only: str = "") -> Iterator[Job]:
    """All runs that are known now, the most important first: of the first arms the sweeps, then
    seed by seed all variants; then the same of the others."""
    selected = {(arm.name, variant) for arm, variant in select_arms(plan, only)}
    names = {name for name, _ in selected}
    for is_first in (True, False):
        tier = [
            arm
            for arm in plan.arms.values()
            if arm.name in names and (arm.name in plan.first) == is_first
        ]
        for arm in tier:
            if len(rate_jobs := sweep_jobs(plan, arm)) > 1:
                yield from rate_jobs.values()
        rates = {arm.name: best_rate(plan, arm, outcomes) for arm in tier}
        for place in range(max((len(arm.seeds) for arm in tier), default=0)):
            for variant in plan.variants:
                for arm in tier:
                    rate = rates[arm.name]
                    if (arm.name, variant) in selected and rate is not None:
                        yield from final_jobs(plan, arm, rate, variant)[place : place + 1]


def select_arms(plan: Plan, only: str = "") -> list[tuple[Arm, str]]:
    """Arms with each of their variants whose ARM or ARM-VARIANT has a match of `only`."""
    return [
        (arm, variant)
        for arm in plan.arms.values()
        for variant in arm.variants
        if re.search(only, f"{arm.name}-{variant}" if variant else arm.name)
    ]


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


def order_prepared(plan: Plan) -> dict[str, frozenset[str]]:
    """Jobs of `prepare_jobs` by name, each with those that must be done before it: its recipe names
    the model that they export, or their run folder. Refuses one that names a later one."""
    earlier: list[Job] = []
    result: dict[str, frozenset[str]] = {}
    jobs = prepare_jobs(plan)
    for job, name in zip(jobs, plan.prepare, strict=True):
        paths = _named_paths(_load_named(job, f"prepare.{name}").model_dump(mode="json"))
        needed = [other for other in jobs if {other.export, other.run} & paths]
        for other in needed:
            if other not in earlier:
                raise RecipeError(
                    f"prepare.{name}: its recipe names {other.export}, or the run of it, which is "
                    "not there yet. Models are prepared in the order of the file: name an earlier "
                    "one, or move this one down"
                )
        result[job.name] = frozenset(other.name for other in needed)
        earlier.append(job)
    return result


def _named_paths(tree: Any) -> set[Path | None]:
    """All texts in a recipe, as paths."""
    if isinstance(tree, str):
        return {Path(tree)}
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return {path for part in parts for path in _named_paths(part)}


def count_runs(plan: Plan, only: str = "") -> int:
    """All runs of the plan without preparation, also those whose learning rate is not chosen."""
    names = set()
    for arm, variant in select_arms(plan, only):
        sweep = sweep_jobs(plan, arm)
        is_swept = len(sweep) > 1
        names |= {job.name for job in sweep.values() if is_swept}
        for seed in arm.seeds:
            in_sweep = arm.rate_of == arm.name and (variant, seed) == (plan.sweep_on, arm.seeds[0])
            if not (is_swept and in_sweep):
                names.add(f"{arm.name} {variant} {seed}")
    return len(names)


def list_recipes(plan: Plan) -> Iterator[Recipe]:
    """Of every arm and variant, and of every model that is prepared; refuses those that cannot work
    before anything runs."""
    for arm in plan.arms.values():
        is_swept = len(sweep_jobs(plan, arm)) > 1 and arm.rate_of == arm.name
        for variant in arm.variants:
            recipe = load_arm_recipe(plan, arm, variant)
            if is_swept and variant == plan.sweep_on:
                _check_validation(recipe, plan.choose_by, f"arms.{arm.name}")
            yield recipe
    order_prepared(plan)
    for job, name in zip(prepare_jobs(plan), plan.prepare, strict=True):
        yield _load_named(job, f"prepare.{name}")


def load_arm_recipe(plan: Plan, arm: Arm, variant: str) -> Recipe:
    """With the first learning rate and seed; an error names the arm."""
    rate = next(iter(sweep_jobs(plan, arm)))
    where = f"arms.{arm.name}" + (f" in the variant {variant}" if variant else "")
    return _load_named(make_job(plan, arm, variant, rate, arm.seeds[0]), where)


def _load_named(job: Job, where: str) -> Recipe:
    try:
        return load_recipe(job.recipe, job.overrides)
    except UserError as error:
        raise RecipeError(f"{where}: {error}") from None


def _check_validation(recipe: Recipe, choose_by: str, where: str) -> None:
    if recipe.tasks.kind == "documents":
        raise RecipeError(
            f"{where}: learning rates are chosen on validation tasks, which documents lack. Give "
            "one learning rate, or an arm for each"
        )
    if not recipe.evaluate.every or recipe.evaluate.every > recipe.train.steps:
        raise RecipeError(
            f"{where}: learning rates are chosen on validation tasks, and evaluate.every = "
            f"{recipe.evaluate.every} measures none after the first step. Set evaluate.every, or "
            "give one learning rate"
        )
    if choose_by == "kl" and recipe.teacher is None:
        raise RecipeError(
            f"{where}: choose_by = 'kl' needs a teacher, and the recipe has none. Use 'rate'"
        )
