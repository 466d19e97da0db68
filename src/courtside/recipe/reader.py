"""[reader]: what writes hints for the turns that went wrong."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from courtside.recipe.base import Fraction, Section, Setting, import_path
from courtside.recipe.endpoint import EndpointConfig
from courtside.recipe.rules import DEFAULT_RULES, Regex, Rule


class ReaderBase(Section):
    max_hints: PositiveInt = 8
    """Per trajectory; the first ones are used, the others dropped and counted."""
    control: Literal[
        "none", "random_turn", "random_hint", "all_turns", "other_kind", "mirror_turn"
    ] = "none"
    """Control experiments. random_turn: each hint before another assistant turn of its trajectory
    that has no hint. random_hint: each hint's text is that of another turn of the batch. all_turns:
    a hint before every assistant turn of a trajectory that has a hint. other_kind: each hint's text
    is one that another rule gave in the batch, for another kind of decision. mirror_turn: each hint
    before a turn without an error that made the same kind of decision on the other side."""


class SingleReader(ReaderBase):
    max_chars: PositiveInt = 1000
    """Characters of one hint; longer ones are dropped and counted."""


class RuleReaderConfig(SingleReader):
    kind: Literal["rules"]
    rules: Annotated[tuple[Rule, ...], Field(min_length=1)] = DEFAULT_RULES
    """If several detect the same turn, the first one's hint is used."""
    error_pattern: Regex | None = None
    """A reply that matches is an error, even if the environment reported no event. Unset: replies
    that start like one, such as `Error: …`, `ValueError: …` or `{"error": "…"}`."""
    false_positive_rate: Fraction = 0.0
    """For experiments with a worse reader: the fraction of turns without a finding that get a
    rule's hint."""

    @model_validator(mode="after")
    def _check_clean_rules(self) -> RuleReaderConfig:
        if self.false_positive_rate and all(rule.needs_finding for rule in self.rules):
            raise ValueError(
                "false_positive_rate: every rule's hint has a slot that only a finding can fill; "
                "add a "
                "rule whose hint uses {turn} and privileged fields alone, or set it to 0"
            )
        return self


class ModelReaderConfig(SingleReader):
    kind: Literal["model"]
    endpoint: EndpointConfig | None = None
    """Unset: the student reviews its own trajectories, in process."""
    hints_per_window: PositiveInt = 3
    """How many hints the model may propose per request."""
    min_confidence: Fraction = 0.0
    """Hints with a lower confidence are dropped and counted; with a value above 0, also those
    without a confidence."""
    extra_instructions: str | None = None
    """Added to the model's instructions."""
    show_outcome: bool = True
    """Include the grade and the environment's events in the prompt."""
    window_chars: Annotated[int, Field(ge=1000)] = 24000
    """Characters of the trajectory per request. A longer one takes several windows."""
    overlap_chars: NonNegativeInt = 2000
    """Characters of a window that the next one repeats."""
    max_message_chars: Annotated[int, Field(ge=100)] = 2000
    """Characters of one message; the middle of a longer one is omitted, visibly."""
    max_new_tokens: PositiveInt = 512
    """Tokens of a reply."""
    temperature: NonNegativeFloat = 0.0
    """0: greedy."""

    @model_validator(mode="after")
    def _check_overlap(self) -> ModelReaderConfig:
        if self.overlap_chars * 2 > self.window_chars:
            raise ValueError(
                "overlap_chars must be at most half of window_chars, or the windows hardly advance"
            )
        return self


class HumanReaderConfig(SingleReader):
    kind: Literal["human"]
    path: Path
    """A hints file: one JSON object a line with trajectory, turn, text and optionally reason."""


class CustomReaderConfig(SingleReader):
    """A reader of your own: docs/extending.md shows one."""

    kind: Literal["custom"]
    path: Annotated[str, import_path("my_readers:Reader")]
    """`module:Class`; an instance is called with trajectories and returns hints. The module is
    installed, or in the working directory."""
    settings: Mapping[str, Setting] = Field(default_factory=dict)
    """Keyword arguments of the class."""


class CombinedReaderConfig(ReaderBase):
    kind: Literal["combined"]
    readers: Annotated[
        tuple[
            Annotated[
                RuleReaderConfig | ModelReaderConfig | HumanReaderConfig | CustomReaderConfig,
                Field(discriminator="kind"),
            ],
            ...,
        ],
        Field(min_length=2),
    ]
    """In order: if several have a hint for the same turn, the first one's is used."""

    @model_validator(mode="after")
    def _check_control(self) -> CombinedReaderConfig:
        if any(reader.control != "none" for reader in self.readers):
            raise ValueError("a control belongs to the whole; set reader.control, not a member's")
        return self


ReaderConfig = Annotated[
    RuleReaderConfig
    | ModelReaderConfig
    | HumanReaderConfig
    | CustomReaderConfig
    | CombinedReaderConfig,
    Field(discriminator="kind"),
]
