"""[evaluate]: evaluations on held-out tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt

from courtside.recipe.base import Section, Setting


def _check_temperature(value: float) -> float:
    if value != 0 and value < 0.001:
        raise ValueError("must be 0 (greedy), or 0.001 or more: smaller ones overflow")
    return value


class EvaluateConfig(Section):
    num_tasks: PositiveInt = 64
    """Held-out tasks of each evaluation."""
    every: NonNegativeInt = 0
    """Steps between evaluations on validation tasks; 0: only before and after."""
    samples_per_task: PositiveInt = 1
    temperature: Annotated[float, AfterValidator(_check_temperature)] = 1.0
    """0: greedy."""
    max_new_tokens: PositiveInt | None = None
    """Unset: as in rollout."""
    teacher: bool = True
    """Before training, also evaluate the teacher with its context."""
    before: bool = True
    """Evaluate the student before the first step, too. A later stage of a pipeline may leave it
    out: its student is the one that was evaluated when the stage before ended."""
    suites: Mapping[str, Mapping[str, Setting | Mapping[str, Setting]]] = Field(
        default_factory=dict
    )
    """Further test tasks, evaluated before and after: a name and changes to [tasks], e.g.
    `held_out = { names = "held_out" }` or `larger = { settings = { high = 200 } }`. With a `kind`,
    a whole [tasks] section of its own: `retention = { kind = "arithmetic", digits = 1 }`."""
    collateral: bool = False
    """After training, also measure KL(before ‖ after) of the student over the whole vocabulary: on
    its turns of the evaluation before training, and on its answers to unrelated prompts."""
    forward_kl: bool = False
    """Also estimate KL(teacher ‖ student) on the teacher's answers."""
