"""[takeover]: the teacher plays on from a state that the student reached."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt

from courtside.recipe.base import Section

DraftFraction = Annotated[float, Field(gt=0, lt=1)]


class TakeoverConfig(Section):
    """The teacher finishes some of the student's drafts; what it samples trains the student."""

    select: Literal["failed", "errors", "all"] = "failed"
    """Drafts that are taken over. failed: those that do not pass their grade. errors: episodes with
    an event in any turn."""
    at: Literal["first_error", "reader", "random"] | NonNegativeInt | DraftFraction = "random"
    """Where the teacher takes over. random: at any turn of an episode, or any token of a single
    answer. first_error: at the first turn with an event. reader: at the first turn that has a hint
    of the [reader]. A number: after so many assistant turns of an episode, or tokens of an answer.
    A fraction: after that part of an answer's tokens."""
    require: Literal["passed", "better", "none"] = "passed"
    """What a take-over must achieve to train: to pass the task's own grade, or a better score than
    its draft. none: it must only have been played."""
    pair: bool = False
    """Also make a preference pair at the fork: the teacher's turn (the rest of a single answer)
    against the student's, after the same masked context. Needs a loss of kind = 'preference'."""
