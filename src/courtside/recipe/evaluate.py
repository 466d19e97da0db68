"""[evaluate]: evaluations on held-out tasks."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from courtside.recipe.base import Section, Setting


class EvaluateConfig(Section):
    num_tasks: PositiveInt = 64
    """Held-out prompts of each evaluation."""
    every: NonNegativeInt = 0
    """Steps between evaluations on validation tasks; 0: only before and after."""
    samples_per_task: PositiveInt = 1
    temperature: NonNegativeFloat = 1.0
    """0: greedy."""
    max_new_tokens: PositiveInt | None = None
    """Unset: as in rollout."""
    teacher: bool = True
    """Before training, also measure the teacher with its context: the gate."""
    suites: Mapping[str, Mapping[str, Setting]] = Field(default_factory=dict)
    """Further test tasks, measured before and after: a name and what is different in [tasks], e.g.
    `held_out = { names = "held_out" }`."""
    forward_kl: bool = False
    """Also let the teacher answer each time, and measure KL(teacher ‖ student) on its text."""
