"""The fields of an `experiment.toml`, as it is written."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from courtside.errors import RecipeError, UserError
from courtside.files import BOM, read_regular_file
from courtside.recipe.base import Section
from courtside.recipe.builtin import recipes_folder
from courtside.recipe.error_messages import describe_problems

EXPERIMENT = "experiment.toml"

Seed = Annotated[int, Field(ge=0, lt=2**63)]
Name = Annotated[str, Field(pattern=r"^[\w.+-]+$")]
"""Of an arm, a variant or a prepared model: part of the names of files."""
Overrides = tuple[str, ...]
"""Changes to a recipe, each section.key=value, as on the command line."""


class VariantConfig(Section):
    overrides: Overrides = Field(default=(), alias="with")
    """Changes to the recipes of all arms in this variant."""


class ArmConfig(Section):
    recipe: str
    """A TOML file, relative to the experiment's."""
    overrides: Overrides = Field(default=(), alias="with")
    """Changes to the recipe."""
    overrides_in: Mapping[str, Overrides] = Field(default_factory=dict, alias="in")
    """Changes in one variant alone, over the variant's: `in.short = ["train.steps=8"]`."""
    learning_rates: tuple[PositiveFloat, ...] | None = None
    """Unset: those of the experiment."""
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)] | None = None
    """Unset: those of the experiment."""
    variants: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Names of the variants that the arm is run in. Unset: all."""
    rate_of: str | None = None
    """The arm whose learning rate is used, without a sweep. Unset: the arm has its own sweep."""


class BudgetConfig(Section):
    """What every run spends: one of these."""

    steps: PositiveInt | None = None
    """Optimizer steps (train.steps)."""
    student_tokens: PositiveInt | None = None
    """Tokens through the student (train.max_student_tokens)."""
    teacher_tokens: PositiveInt | None = None
    """Tokens through teachers and the reference (train.max_teacher_tokens)."""
    flops: PositiveFloat | None = None
    """Estimated FLOPs of training (train.max_flops)."""
    seconds: PositiveFloat | None = None
    """Seconds of training (train.max_seconds); runs that share a machine slow each other down."""

    @model_validator(mode="after")
    def _check_unit(self) -> BudgetConfig:
        if len(self.limits()) != 1:
            units = ", ".join(type(self).model_fields)
            raise ValueError(f"give one of {units}: runs cannot be equal in two of them")
        return self

    def limits(self) -> dict[str, float]:
        return {unit: value for unit, value in self if value is not None}


class ExperimentConfig(Section):
    """All settings of an experiment."""

    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)]
    """One final run for each, in every arm and variant. The first one is that of the sweep."""
    learning_rates: tuple[PositiveFloat, ...] = ()
    """Tried for every arm that has none of its own. One alone needs no sweep."""
    choose_by: Literal["rate", "kl", "error_rate"] = "rate"
    """What the chosen learning rate is best in on the last validation: the mean score, the KL to
    the teacher, or the share of turns with an error."""
    sweep_on: str | None = None
    """The variant that learning rates are chosen on. Unset: the first."""
    first: tuple[str, ...] = ()
    """Arms that are run before the others."""
    goals: tuple[float, ...] = ()
    """Trained tokens until validation reaches these scores are reported."""
    keep: bool = True
    """false: delete a run's checkpoints once it is measured."""
    overrides: Overrides = Field(default=(), alias="with")
    """Changes to the recipes of all runs."""
    budget: BudgetConfig | None = None
    """What every run of every arm spends, as `budget = { student_tokens = 1_000_000 }`: a run ends
    with the step that reaches it. train.steps must be large enough. Unset: train.steps of each
    recipe."""
    contrasts: tuple[tuple[str, str], ...] = ()
    """Fixed before the runs: pairs of arms, the first one against the second."""
    outcomes: Mapping[str, NonNegativeFloat] = Field(default_factory=dict)
    """Fixed, too: a measure → the standard deviation that is expected of a difference paired by
    seed. `score` is the mean score, `training/…` a mean over training steps, `last_step/…` that of
    the last one; the first decides."""
    margin: PositiveFloat = 0.03
    """Differences within it count as none in a test of equivalence."""
    unpaired: tuple[str, ...] = ()
    """Arms that have other test tasks than the other arms of a seed: compared by Welch's test."""
    prepare: Mapping[Name, str] = Field(default_factory=dict)
    """Models that are trained before anything else: a name → a recipe. The weights are exported to
    OUT/EXPERIMENT/NAME, which arms may name as student.model or teacher.model; its run stays in
    OUT/EXPERIMENT/prepare-NAME, for a tasks.path. Recipes further down may name both, too."""
    variants: Mapping[Name, VariantConfig] = Field(default_factory=dict)
    """Every arm is run in every variant."""
    arms: Annotated[Mapping[Name, ArmConfig], Field(min_length=1)]
    """The recipes that are compared, by name."""


def find_experiment(name: str | Path) -> Path:
    """The file meant by a path, by a folder with an experiment.toml, or by the folder of a built-in
    recipe."""
    path = Path(name)
    if path.is_file():
        return path
    if (path / EXPERIMENT).is_file():
        return path / EXPERIMENT
    if not path.exists() and len(path.parts) == 1:
        builtin = recipes_folder() / path / EXPERIMENT
        if builtin.is_file():
            return builtin
    if path.is_dir():
        raise UserError(f"{path}: has no {EXPERIMENT}. Give a folder with one, or a TOML file")
    raise UserError(f"{path}: no such experiment. Give a folder with an {EXPERIMENT}, or a file")


def experiment_name(file: Path) -> str:
    """`pruned` for `recipes/pruned/experiment.toml`, `mine` for `mine.toml`."""
    return file.resolve().parent.name if file.name == EXPERIMENT else file.stem


def load_config(file: Path) -> ExperimentConfig:
    """Refuses, with all problems of a file, each with its field."""
    try:
        text = read_regular_file(file).removeprefix(BOM).decode()
        tree: dict[str, Any] = tomllib.loads(text.replace("\r\n", "\n"))
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: not valid TOML: {error}") from None
    try:
        # From JSON, strict validation still accepts a list for a tuple.
        return ExperimentConfig.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        lines = describe_problems(problems, root=ExperimentConfig)
        raise RecipeError(f"{file}:\n" + "\n".join(f"  {line}" for line in lines)) from None
