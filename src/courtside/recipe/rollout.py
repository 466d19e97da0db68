"""[rollout]: sampling, and the mix of on-policy and off-policy trajectories."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from courtside.recipe.base import Fraction, Section
from courtside.recipe.server import RolloutServerConfig

MAX_SECONDS = 1e6
"""Timers of operating systems end not far above."""


class Ramp(Section):
    """Linear from `start` to `end` over `steps`, then constant."""

    start: Fraction
    end: Fraction
    steps: PositiveInt

    def at(self, step: int) -> float:
        return self.start + (self.end - self.start) * min(step / self.steps, 1.0)


class TurnRamp(Section):
    """A curriculum of depth: linear from `start` to `end` turns over `steps`, then constant."""

    start: PositiveInt
    end: PositiveInt
    steps: PositiveInt

    def at(self, step: int) -> int:
        return round(self.start + (self.end - self.start) * min(step / self.steps, 1.0))


class LimitsConfig(Section):
    """Limits of one episode in an environment."""

    turns: PositiveInt | TurnRamp | None = None
    """Assistant turns; a number, or a ramp { start, end, steps } over training steps. Evaluations
    have the ramp's `end`. Unset: until the environment is done."""
    tokens: PositiveInt | None = None
    """Of the whole episode. Unset: the model's context."""
    seconds: PositiveFloat | None = None
    """Of the whole episode, by the clock. Unset: no limit."""
    step_seconds: Annotated[float, Field(gt=0, le=MAX_SECONDS)] = 60.0
    """Time for one call of the environment: `start`, `step` or `grade`. The episode ends after it,
    as a fault of the environment. A `task` that takes longer is refused."""
    load_seconds: Annotated[float, Field(gt=0, le=MAX_SECONDS)] = 600.0
    """Time for importing the environment's module and making its class."""
    max_fault_fraction: Fraction = 0.2
    """Fraction of recent episodes (the batch, or the last 64) that bugs in the environment may end
    before the run stops; at least 3 of them, or all. 1: never."""
    observation_chars: PositiveInt = 8000
    """Characters of one message of the environment; a longer one is truncated, visibly."""

    def turns_at(self, step: int) -> int | None:
        """Of the episodes of a training step."""
        return self.turns.at(step) if isinstance(self.turns, TurnRamp) else self.turns

    @property
    def final_turns(self) -> int | None:
        """Of evaluations, and of training after a ramp."""
        return self.turns.end if isinstance(self.turns, TurnRamp) else self.turns


class MixedSamplingConfig(Section):
    """Student and teacher decode together; the teacher replaces tokens it finds too unlikely."""

    top_k: PositiveInt = 20
    """A token that the student proposes is replaced if it is not among so many likeliest tokens of
    the teacher, by a draw from the teacher's distribution on these."""
    fraction: Fraction | Ramp = 1.0
    """Of the student's prompts in a batch: how many are answered so."""

    def fraction_at(self, step: int) -> float:
        return self.fraction.at(step) if isinstance(self.fraction, Ramp) else self.fraction


class RolloutConfig(Section):
    samples_per_prompt: PositiveInt = 4
    """Per prompt."""
    max_new_tokens: PositiveInt = 128
    temperature: Annotated[float, Field(ge=0.001, le=100)] = 1.0
    """Student and teacher are compared at it, so 0 (greedy) has no gradient: 0.001 or more."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: NonNegativeInt = 0
    """0: off."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end an answer, in addition to the model's end token."""
    student_fraction: Fraction | Ramp = 1.0
    """λ: the fraction of each batch that the student samples. 1: on-policy; 0: off-policy."""
    off_policy_source: Literal["dataset", "teacher"] = "dataset"
    """Source of the others: the tasks' `completion`, or samples of the teacher."""
    mixed_sampling: MixedSamplingConfig | None = None
    """Replace the student's tokens that are outside the teacher's top-k while sampling."""
    kv_cache_tokens: PositiveInt | Literal["auto"] = "auto"
    """Memory budget: key/value positions held at once while sampling or scoring. auto: on a GPU by
    its size, half of what models and the optimizer leave of it; 65,536 on a CPU."""

    server: RolloutServerConfig | None = None
    """vLLM servers that sample for the student. Unset: the training process samples."""
    limits: LimitsConfig = LimitsConfig()
    corrections: bool = False
    """In an environment: add each turn with an error again with the environment's correction, if
    it has one, as data to imitate (`on = "dataset"`)."""

    def student_fraction_at(self, step: int) -> float:
        fraction = self.student_fraction
        return fraction.at(step) if isinstance(fraction, Ramp) else fraction

    @property
    def student_fraction_range(self) -> tuple[float, float]:
        """The lowest and the highest of the run."""
        fraction = self.student_fraction
        ends = (fraction.start, fraction.end) if isinstance(fraction, Ramp) else (fraction,)
        return min(ends), max(ends)

    @property
    def off_policy(self) -> Literal["dataset", "teacher"] | None:
        """Source of off-policy trajectories; None: all are the student's."""
        return self.off_policy_source if self.student_fraction_range[0] < 1 else None
