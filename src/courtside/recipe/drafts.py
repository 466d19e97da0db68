"""[[drafts]]: corrections of what the student sampled, before the teacher scores it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, model_validator

from courtside.recipe.base import Section


class ChooseConfig(Section):
    """The best and the worst of a prompt's samples become a preference pair."""

    kind: Literal["choose"]
    by: Literal["reward", "teacher_logp"] = "reward"
    """reward: the grade. teacher_logp: the log-probability under the teacher with its context."""
    reduce: Literal["mean", "sum"] = "mean"
    """With by = 'teacher_logp': over the tokens. A sum prefers short answers."""
    min_gap: NonNegativeFloat = 0.0
    """The two must differ by more than that; groups without such a pair are dropped and counted."""
    length_control: Annotated[float, Field(ge=1)] | None = None
    """Only pairs whose longer member has at most so many times the tokens of the shorter one, e.g.
    1.5. Of equally different pairs the one with the most similar lengths is used in any case."""

    @property
    def makes_pairs(self) -> bool:
        return True

    @property
    def asks_teacher(self) -> bool:
        """Whether the recipe's teacher scores or writes for it."""
        return self.by == "teacher_logp"

    @model_validator(mode="after")
    def _check_fields(self) -> ChooseConfig:
        if self.reduce != "mean" and self.by != "teacher_logp":
            raise ValueError("reduce belongs to by = 'teacher_logp'; set that, or remove it")
        return self


DraftConfig = ChooseConfig
