"""[[rewards]]: what the reward of `advantage = "reward"` is the sum of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from courtside.recipe.base import Section, Setting, import_path
from courtside.recipe.rules import Regex


class RewardBase(Section):
    name: str | None = None
    """Its name in the metrics. Unset: its kind."""
    weight: float = 1.0
    """Factor in the sum; a negative one makes a penalty of a reward."""

    @model_validator(mode="after")
    def _check_weight(self) -> RewardBase:
        if self.weight == 0:
            raise ValueError("weight = 0 leaves it out of the sum; remove the reward")
        return self


class GradeReward(RewardBase):
    """Correctness: the score of the task's grader or environment, from 0 to 1."""

    kind: Literal["grade"]


class FormatReward(RewardBase):
    """1 where the answer (the last assistant turn) matches a regular expression, else 0."""

    kind: Literal["format"]
    pattern: Regex
    """Of the whole answer. `(?s)` at its start lets `.` match line breaks."""
    anywhere: bool = False
    """Whether a match of a part of the answer is enough."""
    seconds: PositiveFloat = 10.0
    """Time for one answer. After it there is no reward, and the answer is not compared."""


class LengthReward(RewardBase):
    """A soft penalty of long answers: 0 up to `free_tokens`, falling linearly to −1 at
    `max_tokens`."""

    kind: Literal["length"]
    free_tokens: NonNegativeInt
    """Completion tokens of a trajectory without a penalty."""
    max_tokens: PositiveInt
    """Completion tokens from which on the penalty is −1."""

    @model_validator(mode="after")
    def _check_order(self) -> LengthReward:
        if self.free_tokens >= self.max_tokens:
            raise ValueError(
                f"the penalty rises from free_tokens = {self.free_tokens} to max_tokens = "
                f"{self.max_tokens}; set free_tokens below max_tokens"
            )
        return self


class ReferenceKLReward(RewardBase):
    """Each token's own −(log μ − log ref), added to its advantage: a pull to the student before
    training. Not compared within a prompt."""

    kind: Literal["reference_kl"]
    weight: PositiveFloat = 0.01
    """β, the strength of the pull."""


class CustomReward(RewardBase):
    """A function of your own: see docs/rewards.md."""

    kind: Literal["custom"]
    path: Annotated[str, import_path("my_rewards:reward")]
    """`module:name` of a function `reward(trajectory)` that returns a number, or of a reward
    function of TRL. The module is installed, or in the working directory."""
    settings: Mapping[str, Setting] = Field(default_factory=dict)
    """Further keyword arguments of the function."""
    seconds: PositiveFloat = 60.0
    """Time for one trajectory. After it there is no reward, and the trajectory is not compared."""


Reward = Annotated[
    GradeReward | FormatReward | LengthReward | ReferenceKLReward | CustomReward,
    Field(discriminator="kind"),
]
