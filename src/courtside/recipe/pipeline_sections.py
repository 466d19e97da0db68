"""The sections of a pipeline's file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PositiveInt, StringConstraints

from courtside.recipe.base import Fraction, Section
from courtside.recipe.recipe import Recipe

NAME_RULE = r"^[A-Za-z0-9](?:[A-Za-z0-9_-]|\{iteration\})*$"
StageName = Annotated[str, StringConstraints(pattern=NAME_RULE, max_length=60)]
SECTION_NAMES = tuple(Recipe.model_fields)


class GateConfig(Section):
    """At most so much may be lost on a suite, or the pipeline ends."""

    suite: str
    """A name in `evaluate.suites` of this stage and of the one that the student started in."""
    max_loss: Fraction
    """Of the mean score, compared with the student before the pipeline: the lower end of the paired
    difference's 95% interval must not be below minus this."""


class StageConfig(Section):
    """A recipe with a name."""

    name: StageName
    """Letters, digits, `-` and `_`: it names the stage's folder. Others refer to it as
    `stage:NAME`."""
    recipe: str | None = None
    """A recipe's file, relative to the pipeline's, or a built-in recipe. Unset: `base`."""
    remove: tuple[str, ...] = ()
    """Fields of that recipe to leave out, e.g. `teacher` or `student.lora`."""
    gate: GateConfig | None = None
    """Unset: later stages run whatever was lost."""
    changes: Mapping[str, Any] = Field(default_factory=dict)
    """The recipe's sections that the stage has itself, merged over its recipe key by key. A section
    of another `kind` and a list (`losses`) replace the old one."""


def split_stage(value: Any) -> Any:
    """The recipe's sections of a stage under `changes`, apart from what the stage itself has."""
    if not isinstance(value, Mapping) or "changes" in value:
        return value
    plain = {key: item for key, item in value.items() if key not in SECTION_NAMES}
    changes = {key: item for key, item in value.items() if key in SECTION_NAMES}
    if isinstance(plain.get("remove"), list):
        # What a validator hands on is Python's, whose lists are no tuples where types are strict.
        plain["remove"] = tuple(plain["remove"])
    return {**plain, "changes": changes} if changes else plain


SplitStage = Annotated[StageConfig, BeforeValidator(split_stage)]


class LoopConfig(Section):
    """Stages that are run in turn, several times."""

    repeat: PositiveInt
    """How often; `{iteration}` in a text of its stages is the number, from 1."""
    stages: Annotated[tuple[SplitStage, ...], Field(min_length=1)]
    """Names without `{iteration}` get it at their end."""


class PipelineConfig(Section):
    """All keys of the file."""

    base: str | Mapping[str, Any] | None = None
    """The recipe that stages change: a file or a built-in recipe, or its sections."""
    stages: Annotated[tuple[Mapping[str, Any], ...], Field(min_length=1)]
    """In the order in which they run: each a stage, or with `repeat` a repetition of stages."""
