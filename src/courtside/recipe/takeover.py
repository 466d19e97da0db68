"""[takeover]: the teacher plays on from a state that the student reached."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from courtside.recipe.base import Fraction, Section
from courtside.recipe.context import FieldContext, SystemContext
from courtside.recipe.endpoint import EndpointConfig

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
    endpoint: EndpointConfig | None = None
    """The server whose model takes over, in text alone. Unset: the recipe's teacher, over the
    student's token ids."""
    context: Annotated[SystemContext | FieldContext, Field(discriminator="kind")] | None = None
    """Of the endpoint's model, which sees it in the prompt."""
    max_new_tokens: PositiveInt | None = None
    """Of a reply of the endpoint, in tokens of its model, thoughts included; one that is cut off
    there is dropped and counted. Unset: `rollout.max_new_tokens`."""
    temperature: NonNegativeFloat | None = None
    """Of the endpoint's model. Unset: `rollout.temperature`."""
    keep_thoughts: bool = False
    """Imitate the thoughts of the endpoint's model, too (`reasoning_content`, or what is before
    `</think>`), as the student's chat template renders thoughts. false: they are cut off."""
    can_continue: bool = False
    """Whether the endpoint goes on with a last message of the assistant, by vLLM's
    `continue_final_message` and `echo`. Forks inside a single answer need it."""
    max_failure_fraction: Fraction = 0.5
    """Fraction of recent take-overs by the endpoint (of the batch, or the last 64) that may end
    without a valid reply before the run stops; at least 3 of them, or all. 1: never."""

    @model_validator(mode="after")
    def _check_endpoint_fields(self) -> TakeoverConfig:
        if self.endpoint is None:
            for name in ENDPOINT_FIELDS:
                if getattr(self, name) != TakeoverConfig.model_fields[name].default:
                    raise ValueError(f"{name} belongs to takeover.endpoint; set that, or remove it")
        return self


ENDPOINT_FIELDS = (
    "context", "max_new_tokens", "temperature", "keep_thoughts", "can_continue",
    "max_failure_fraction",
)  # fmt: skip
