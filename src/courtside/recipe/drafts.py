"""[[drafts]]: corrections of what the student sampled, before the teacher scores it."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt, field_validator, model_validator

from courtside.recipe.base import Fraction, Section
from courtside.recipe.endpoint import EndpointConfig

SLOTS = ("task", "draft", "notes")


class ModelQuestion(Section):
    """A stage that asks a model about drafts."""

    endpoint: EndpointConfig | None = None
    """The server that is asked. Unset: the recipe's teacher, in this process, with its context."""
    prompt: str | None = None
    """In place of the built-in one, with the slots {task}, {draft} and {notes} (feedback and
    reference, where there are any). It must ask for the same form of answer."""
    max_new_tokens: PositiveInt = 512
    """Tokens of a reply; one that is cut off there is dropped and counted."""
    temperature: NonNegativeFloat = 0.0
    """0: greedy."""
    max_failure_fraction: Fraction = 0.5
    """Fraction of recent questions (the batch, or the last 64) that may have no valid answer before
    the run stops; at least 3 of them, or all. 1: never."""

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, value: str | None) -> str | None:
        if value is not None and "{draft}" not in value:
            raise ValueError("needs the slot {draft}, where the student's text goes")
        for slot in re.findall(r"\{([a-z_]+)\}", value or ""):
            if slot not in SLOTS:
                options = ", ".join(f"{{{name}}}" for name in SLOTS)
                raise ValueError(f"nothing fills {{{slot}}}; it has {options}")
        return value


class ChooseConfig(ModelQuestion):
    """The best and the worst of a prompt's samples become a preference pair."""

    kind: Literal["choose"]
    by: Literal["reward", "teacher_logp", "judge"] = "reward"
    """reward: the grade. teacher_logp: the log-probability under the teacher with its context.
    judge: a score from 0 to 10 by a model, the teacher or `endpoint`, which sees one sample at a
    time."""
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
        return self.by == "teacher_logp" or self.writes_with_teacher

    @property
    def writes_with_teacher(self) -> bool:
        """Whether the recipe's teacher samples for it."""
        return self.by == "judge" and self.endpoint is None

    @model_validator(mode="after")
    def _check_fields(self) -> ChooseConfig:
        if self.reduce != "mean" and self.by != "teacher_logp":
            raise ValueError("reduce belongs to by = 'teacher_logp'; set that, or remove it")
        if self.by != "judge":
            for name, field in ModelQuestion.model_fields.items():
                if getattr(self, name) != field.default:
                    raise ValueError(f"{name} belongs to by = 'judge'; set that, or remove it")
        return self


class NotedQuestion(ModelQuestion):
    feedback: bool = True
    """Show what the grader or the environment said about the draft, and a critique that an earlier
    stage wrote."""
    reference: str | None = None
    """Show a privileged field of the tasks, e.g. `solution`, or their `answer`."""
    reply: Literal["tagged", "whole"] = "tagged"
    """tagged: what counts is between <answer> and </answer>, or <critique> and </critique>. whole:
    the whole reply counts, for small models that follow no such instruction; with a `prompt` that
    asks for the text alone."""

    @model_validator(mode="after")
    def _check_reply(self) -> NotedQuestion:
        if self.reply == "whole" and self.prompt is None:
            raise ValueError(
                "reply = 'whole': the built-in prompt asks for tags, which would be part of the "
                "text; set a prompt that asks for the text alone"
            )
        return self

    @property
    def asks_teacher(self) -> bool:
        return self.endpoint is None

    @property
    def writes_with_teacher(self) -> bool:
        return self.endpoint is None


class RewriteConfig(NotedQuestion):
    """A model repairs drafts; repairs are trajectories of source `teacher` after the student's
    prompt."""

    kind: Literal["rewrite"]
    require_better: bool = True
    """Drop repairs that are graded no better than their draft, or in which the environment reports
    an error, and do not repair drafts that pass. Where nothing grades, all are used."""
    pairs: bool = False
    """Make a preference pair of each draft and its repair."""
    turn: Literal["first_event", "last"] = "first_event"
    """In an environment: the turn that is repaired, the first with an error or the last."""
    max_per_prompt: PositiveInt | None = None
    """Drafts of a prompt that are repaired, the lowest graded first. Unset: all."""

    @property
    def makes_pairs(self) -> bool:
        return self.pairs


class CriticizeConfig(NotedQuestion):
    """A model writes about drafts, for teacher.context.kind = 'critique' or a later rewrite."""

    kind: Literal["criticize"]
    skip_passed: bool = True
    """Do not criticize drafts that pass."""
    max_chars: PositiveInt = 2000
    """Characters of a critique; longer ones are dropped and counted."""

    @property
    def makes_pairs(self) -> bool:
        return False


DraftConfig = Annotated[ChooseConfig | RewriteConfig | CriticizeConfig, Field(discriminator="kind")]
