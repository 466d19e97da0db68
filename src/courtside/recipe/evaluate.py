"""[evaluate]: evaluations on held-out tasks."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from courtside.recipe.base import Section, Setting


class EvaluateConfig(Section):
    num_tasks: PositiveInt = 64
    """Held-out tasks of each evaluation."""
    every: NonNegativeInt = 0
    """Steps between evaluations on validation tasks; 0: only before and after."""
    samples_per_task: PositiveInt = 1
    temperature: NonNegativeFloat = 1.0
    """0: greedy."""
    max_new_tokens: PositiveInt | None = None
    """Unset: as in rollout."""
    teacher: bool = True
    """Before training, also evaluate the teacher with its context."""
    suites: Mapping[str, Mapping[str, Setting]] = Field(default_factory=dict)
    """Further test tasks, evaluated before and after: a name and changes to [tasks], e.g.
    `held_out = { names = "held_out" }`."""
    forward_kl: bool = False
    """Also estimate KL(teacher ‖ student) on the teacher's answers."""
