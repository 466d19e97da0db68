"""`context`: a text that a teacher sees and the student does not."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from courtside.recipe.base import Section


class SystemContext(Section):
    kind: Literal["system"]
    text: str
    """A system prompt for the teacher only."""


class FieldContext(Section):
    kind: Literal["field"]
    field: str
    """Name of the tasks' privileged field, e.g. `rule` or `solution`."""
    position: Literal["system", "user"] = "system"
    """In the system prompt, or at the end of the last user message."""
    template: str = "{text}"

    @field_validator("template")
    @classmethod
    def _has_slot(cls, value: str) -> str:
        if "{text}" not in value:
            raise ValueError("needs the slot {text}, where the privileged text goes")
        return value


class FeedbackContext(Section):
    kind: Literal["feedback"]
    position: Literal["system", "user"] = "user"
    template: str = "A first attempt was checked. The checker said: {text}"
    """Trajectories without feedback are not scored, and counted."""


class SiblingContext(Section):
    kind: Literal["sibling"]
    position: Literal["system", "user"] = "user"
    template: str = "A correct answer to this, for reference:\n{text}"
    """A passing sample of the same prompt; groups without one are not scored, and counted."""


class RepairContext(Section):
    kind: Literal["repair"]
    position: Literal["system", "user"] = "user"
    template: str = "A corrected answer to this, for reference:\n{text}"
    """The repair of the draft that is scored, by a draft stage of kind `rewrite`. Drafts without
    one are not scored, and counted."""


class CritiqueContext(Section):
    kind: Literal["critique"]
    position: Literal["system", "user"] = "user"
    template: str = "A first attempt was criticized:\n{text}"
    """What a draft stage of kind `criticize` wrote about the draft that is scored. Drafts without a
    critique are not scored, and counted."""


Context = Annotated[
    SystemContext
    | FieldContext
    | FeedbackContext
    | SiblingContext
    | RepairContext
    | CritiqueContext,
    Field(discriminator="kind"),
]
