"""An experiment's plan, from its `experiment.toml`. Runs nothing and loads no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from courtside.errors import RecipeError
from courtside.experiment.config import (
    ArmConfig,
    ExperimentConfig,
    experiment_name,
    load_config,
)
from courtside.experiment.contrasts import Design
from courtside.experiment.statistics import detectable_effect

ONLY = ""
"""The variant of an experiment that has none."""


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
    file: Path
    """The experiment's."""
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
    budget: Mapping[str, float]
    """What every run spends: a unit and its limit. Empty: as many steps as each recipe has."""

    @property
    def num_tests(self) -> int:
        """Contrasts × variants, over which Holm's correction goes, for each outcome by itself."""
        return self.design.num_tests({name: arm.variants for name, arm in self.arms.items()})


def read_plan(file: Path, out: Path, overrides: Sequence[str] = ()) -> Plan:
    """The plan of an experiment file. `out`: runs are in a folder of it with the experiment's name;
    `overrides` go over all others."""
    config = load_config(file)
    variants = {name: variant.overrides for name, variant in config.variants.items()}
    variants = variants or {ONLY: ()}
    plan = Plan(
        file=file,
        folder=out / experiment_name(file),
        prepare={name: file.parent / recipe for name, recipe in config.prepare.items()},
        variants=variants,
        arms={
            name: _make_arm(name, arm, config, variants, file.parent)
            for name, arm in config.arms.items()
        },
        first=config.first,
        sweep_on=next(iter(variants)) if config.sweep_on is None else config.sweep_on,
        choose_by=config.choose_by,
        goals=config.goals,
        keep=config.keep,
        overrides=config.overrides,
        extra=tuple(overrides),
        design=Design(
            pairs=config.contrasts,
            outcomes=config.outcomes,
            margin=config.margin,
            unpaired=config.unpaired,
        ),
        budget={} if config.budget is None else config.budget.limits(),
    )
    if problems := list(_find_problems(plan)):
        raise RecipeError(f"{file}:\n" + "\n".join(f"  {line}" for line in problems))
    return plan


def _make_arm(
    name: str, arm: ArmConfig, config: ExperimentConfig, variants: Iterable[str], folder: Path
) -> Arm:
    return Arm(
        name=name,
        recipe=folder / arm.recipe,
        overrides=arm.overrides,
        rates=config.learning_rates if arm.learning_rates is None else arm.learning_rates,
        seeds=arm.seeds or config.seeds,
        variants=arm.variants or tuple(variants),
        overrides_in=arm.overrides_in,
        rate_of=arm.rate_of or name,
    )


def _find_problems(plan: Plan) -> Iterator[str]:
    """What names something that is not there, each with its field and the names there are."""
    references: dict[str, tuple[Iterable[str], Mapping[str, Any]]] = {
        "sweep_on": ((plan.sweep_on,), plan.variants),
        "first": (plan.first, plan.arms),
        "unpaired": (plan.design.unpaired, plan.arms),
        "contrasts": (tuple(name for pair in plan.design.pairs for name in pair), plan.arms),
    }
    if plan.design.pairs and not plan.design.outcomes:
        yield "contrasts: without outcomes they decide nothing; name the measures under [outcomes]"
    for arm in plan.arms.values():
        references[f"arms.{arm.name}.variants"] = arm.variants, plan.variants
        references[f"arms.{arm.name}.in"] = arm.overrides_in, plan.variants
        references[f"arms.{arm.name}.rate_of"] = (arm.rate_of,), plan.arms
        if not arm.rates and arm.rate_of == arm.name:
            yield (
                f"arms.{arm.name}.learning_rates: there are none, here or for the whole "
                "experiment; give some, or rate_of another arm"
            )
        if plan.arms.get(arm.rate_of, arm).rate_of != arm.rate_of:
            yield (
                f"arms.{arm.name}.rate_of: {arm.rate_of!r} has no sweep of its own; name an arm "
                "that has"
            )
        if len(set(arm.seeds)) < len(arm.seeds):
            yield f"arms.{arm.name}.seeds: {list(arm.seeds)} has a seed twice; give each once"
    for field, (names, allowed) in references.items():
        for name in names:
            if name not in allowed:
                yield f"{field}: there is no {name!r}; use {', '.join(filter(None, allowed))}"


def describe_design(plan: Plan) -> Iterator[str]:
    """For each contrast and outcome: the effect that four of five such experiments would find where
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
