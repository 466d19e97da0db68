"""[tasks] kind `prefixes`: answers that another run's student began, to be continued."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from courtside.recipe.tasks_base import TasksBase


class PrefixTasks(TasksBase):
    """Prompts of a stored run, each with a student's answer up to a cut: what is sampled continues
    it, and the whole answer is graded as the run's task was. In a pipeline a teacher learns so to
    go on from states that the student reaches."""

    kind: Literal["prefixes"]
    path: Path
    """The run's folder; in a pipeline `stage:NAME`."""
    steps: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] | None = None
    """Which of its steps, counted from 0. Unset: all that are stored."""
    select: Literal["all", "failed"] = "all"
    """failed: answers that did not pass."""
    depths: tuple[Annotated[float, Field(ge=0, le=1)], Annotated[float, Field(ge=0, le=1)]] = (
        0.1,
        0.9,
    )
    """A cut lies between these fractions of the answer's text, at the end of a word."""
    cuts: PositiveInt = 1
    """Tasks made of each answer, at different depths where it has that many words."""

    @model_validator(mode="after")
    def _check_depths(self) -> PrefixTasks:
        low, high = self.depths
        if low >= high:
            raise ValueError(f"depths = [{low:g}, {high:g}]: the smaller one comes first")
        if self.system_prompt is not None:
            raise ValueError("system_prompt: the prompts of a stored run are fixed; remove it")
        return self
