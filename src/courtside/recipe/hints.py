"""[hints]: where a hint is inserted, and which hints train."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from courtside.recipe.base import Fraction, Section


class HintsConfig(Section):
    """Where a hint is put, and when it is worth training on."""

    position: Literal["before_turn", "last_message", "system"] = "before_turn"
    """before_turn: a message of its own right before the turn. last_message: at the end of the
    message that the turn answers. system: in the system prompt."""
    role: Literal["user", "system", "tool"] | None = None
    """Of the hint's own message, with position = 'before_turn'. Unset: user."""
    min_shift: float | None = None
    """In nats: how much the hint must lower the log-probability of the turn, summed over its
    tokens. Hints below are dropped and counted. Unset: none is; shifts are measured all the same,
    and a live self-teacher scores hints in the update's forward pass, which is the cheapest."""
    harmful: Literal["drop", "train"] = "drop"
    """Hints under which their turn becomes *more* likely (a shift below 0), which would teach the
    mistake. drop: they train nothing and are counted; losses still average over their tokens, so
    that other hints weigh what they weighed. train: they train like all others, for experiments."""
    resamples: Annotated[int, Field(ge=0, le=1000)] = 0
    """Replies to sample with each hint, checked by the environment, before it trains. Costs
    decoding; measures how good the hints are."""
    min_pass_rate: Fraction = 0.0
    """Fraction of these that must pass, or the hint is dropped and counted."""
    contrast: Literal["random_hint", "other_kind"] | None = None
    """Score each hinted turn with a wrong hint as well, for losses that contrast both (advantage =
    'hint_contrast', or `contrast` of a divergence). random_hint: the text of another hint of the
    batch. other_kind: of one that another rule gave. A hint for which the batch has no such text is
    dropped and counted."""
    cumulative: bool = False
    """Whether the hints of earlier turns stay in the context of later ones."""

    @model_validator(mode="after")
    def _check_fields(self) -> HintsConfig:
        if self.min_shift is not None and self.min_shift < 0 and self.harmful == "drop":
            raise ValueError(
                f"min_shift = {self.min_shift:g} admits hints that make their turn more likely, "
                "and harmful = 'drop' does not train on them; set harmful = 'train', or min_shift "
                "to 0 or more"
            )
        if self.min_pass_rate and not self.resamples:
            raise ValueError("min_pass_rate is a share of the resamples; set resamples, too")
        if self.contrast is not None and self.cumulative:
            raise ValueError(
                "contrast scores each turn under one hint alone; set cumulative = false"
            )
        if self.resamples and self.cumulative:
            raise ValueError("resamples are written under one hint alone; set cumulative = false")
        if self.role is not None and self.position != "before_turn":
            raise ValueError(
                "role is that of a message of the hint's own, and with position = "
                f"{self.position!r} it "
                "has none; remove role, or use position = 'before_turn'"
            )
        return self
