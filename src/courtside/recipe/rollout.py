"""[rollout]: who writes, and how."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from courtside.recipe.base import Fraction, Section


class Ramp(Section):
    """A number that moves linearly from `start` to `end` over `steps` and then stays."""

    start: Fraction
    end: Fraction
    steps: PositiveInt

    def at(self, step: int) -> float:
        return self.start + (self.end - self.start) * min(step / self.steps, 1.0)


class LimitsConfig(Section):
    """Of one episode in an environment."""

    turns: PositiveInt | None = None
    """Messages of the student. Unset: until the environment is done."""
    tokens: PositiveInt | None = None
    """Of the whole episode. Unset: the model's context."""
    seconds: PositiveFloat | None = None
    """Of the whole episode, by the clock. Unset: no limit."""
    step_seconds: PositiveFloat = 60.0
    """For the environment to answer one message. An episode that hangs is ended."""
    observation_chars: PositiveInt = 8000
    """Of one message of the environment; what is cut off is told."""


class RolloutConfig(Section):
    samples_per_prompt: PositiveInt = 4
    """Per prompt."""
    max_new_tokens: PositiveInt = 128
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: NonNegativeInt = 0
    """0: off."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end an answer, beside the model's own end token."""
    student_fraction: Fraction | Ramp = 1.0
    """λ: the share of each batch that the student writes itself. 1: on-policy; 0: off-policy."""
    off_policy_source: Literal["dataset", "teacher"] = "dataset"
    """Who wrote the others: the tasks' `completion`, or the teacher, sampled now."""
    kv_cache_tokens: PositiveInt | Literal["auto"] = "auto"
    """Memory budget: key/value positions held at once while sampling or scoring. auto: on a GPU by
    its size, half of what models and the optimizer leave of it; 65,536 on a CPU."""

    limits: LimitsConfig = LimitsConfig()
    corrections: bool = False
    """In an environment: every turn that went wrong once more, with what the environment says would
    have been right, where it does; as data to imitate (`on = "dataset"`)."""

    def student_fraction_at(self, step: int) -> float:
        share = self.student_fraction
        return share.at(step) if isinstance(share, Ramp) else share
