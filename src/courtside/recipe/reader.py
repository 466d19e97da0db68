"""[reader] and [hints]: who finds the turns that went wrong, and where its words are put."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from courtside.recipe.base import Fraction, Section, Setting, import_path

Detect = Literal[
    "tool_not_found", "invalid_arguments", "unparsable_call", "tool_error", "no_call", "event",
    "repeated_call", "ignored_error", "answer_without_lookup", "over_length", "pattern",
]  # fmt: skip
EVENT_DETECTORS: tuple[Detect, ...] = (
    "tool_not_found", "invalid_arguments", "unparsable_call", "tool_error", "no_call",
)  # fmt: skip
"""Those that repeat what the environment said about a turn; an `Event.kind` each."""

EVENT_SLOTS = ("tool", "arguments", "message", "listed")
SLOTS: Mapping[str, tuple[str, ...]] = {
    **{kind: EVENT_SLOTS for kind in (*EVENT_DETECTORS, "event")},
    "repeated_call": ("message",),
    "ignored_error": ("message",),
    "answer_without_lookup": (),
    "over_length": ("tokens",),
    "pattern": ("match", "message"),
}
"""What a detector can tell a hint, beside {turn}. A word that is none of these is the name of a
privileged field of the task, of another detail of the event or of a group of the pattern."""
RESERVED = frozenset(slot for slots in SLOTS.values() for slot in slots)

HINTS: Mapping[str, str] = {
    "tool_not_found": "Reminder: the tools here are {tools}.",
    "invalid_arguments": "Careful with the arguments of {tool}: {message}",
    "unparsable_call": "Reminder: write the call exactly in the format that was described.",
    "tool_error": "Careful: calling {tool} like this fails: {message}",
    "no_call": "Reminder: this needs a tool. The tools here are {tools}.",
    "repeated_call": "Reminder: the same call was made before and did not help. Do something else.",
    "ignored_error": "Reminder: the last call failed. It said: {message} Deal with that first.",
    "answer_without_lookup": "Reminder: look it up with a tool before answering.",
    "over_length": "Reminder: keep this message short.",
}

ERROR_PATTERN = (
    r"^\W*(?:(?i:tool not found|unknown tool|no such tool|invalid arguments?)\b"
    r"|(?:[\w.]*[a-z](?:Error|Exception)|(?i:error|exception|failed|failure|traceback))\b"
    r"(?:\s+\d+)?[\"'\s]*(?:$|[\]!(.-]|(?:in|at|while|when|during|from|occurred)\b"
    r"|[:=](?!\s*(?:(?i:null|none|false|0)|\"\"|''|\[\s*\]|\{\s*\})\s*(?:[,}\]]|$))))"
)
"""Texts that begin like an error: `Error: …`, `Error 404`, `ValueError: …`, `{"error": "…"}`, but
not `{"error": null}`."""


def parse_slots(template: str) -> tuple[str, ...]:
    """The names between braces; a ValueError where there is anything but a name."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{error}; write a brace that is meant as one twice: {{{{ }}}}") from None
    names = [(name, spec, conversion) for _, name, spec, conversion in parts if name is not None]
    for name, spec, conversion in names:
        if not name.isidentifier() or spec or conversion:
            raise ValueError(
                f"a slot is a plain name such as {{tool}}, not {{{name}}} with an index, attribute "
                "or format; write a brace that is meant as one twice: {{ }}"
            )
    return tuple(dict.fromkeys(name for name, _, _ in names))


def _check_regex(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from None
    return pattern


Regex = Annotated[str, AfterValidator(_check_regex)]


# ── rules ────────────────────────────────────────────────────────────────────────────────────────


class Rule(Section):
    """Which turns it looks for, and what the hint above them says."""

    detect: Detect
    """The first six repeat what the environment reported; the others are read off the text."""
    hint: str | None = None
    """With slots: {turn}, {tool}, {message}, … of the detector, and the names of the task's
    privileged fields. Unset: the detector's own. A turn that lacks a slot gets no hint, and is
    counted."""
    event: str | None = None
    """Of event: the kind of the environment's own to look for, e.g. `wrong_tool`."""
    pattern: Regex | None = None
    """Of pattern: the regular expression to find; its named groups are slots. Of
    answer_without_lookup: matches the prompts that need a lookup."""
    within: Literal["turn", "reply"] | None = None
    """Of pattern: searched in the assistant's text, or in what the environment replied to it.
    Unset: turn."""
    lookup_field: str | None = None
    """Of answer_without_lookup: the privileged field whose presence says that a task needs one."""
    max_tokens: PositiveInt | None = None
    """Of over_length: longer turns count too. Unset: only those that ran into the limit."""

    @model_validator(mode="before")
    @classmethod
    def _own_hint(cls, data: Any) -> Any:
        # Filled in here, so that the resolved recipe holds the words that were used.
        if isinstance(data, dict) and data.get("hint") is None:
            detect = data.get("detect")
            if isinstance(detect, str) and detect in HINTS:
                return {**data, "hint": HINTS[detect]}
        return data

    @model_validator(mode="after")
    def _parameters_belong(self) -> Rule:
        name = self.detect
        if self.hint is None or not self.hint.strip():
            raise ValueError(f"detect = {name!r} needs the words of its `hint`; write them")
        if self.pattern is not None and name not in ("pattern", "answer_without_lookup"):
            raise ValueError(
                f"pattern does not belong to detect = {name!r}; use detect = 'pattern'"
            )
        if name == "pattern" and self.pattern is None:
            raise ValueError("detect = 'pattern' needs a `pattern` to look for; write one")
        if (self.event is not None) != (name == "event"):
            raise ValueError(
                "event names the kind that detect = 'event' looks for; set it there, and only there"
            )
        if self.within is not None and name != "pattern":
            raise ValueError("within belongs to detect = 'pattern'; remove it")
        if self.max_tokens is not None and name != "over_length":
            raise ValueError("max_tokens belongs to detect = 'over_length'; remove it")
        if self.lookup_field is not None and name != "answer_without_lookup":
            raise ValueError("lookup_field belongs to detect = 'answer_without_lookup'; remove it")
        if name == "answer_without_lookup" and (self.lookup_field is None) == (
            self.pattern is None
        ):
            raise ValueError(
                "detect = 'answer_without_lookup' must know which tasks need a lookup: name a "
                "privileged field in `lookup_field`, or give a `pattern` for the prompt, and not "
                "both"
            )
        has = ("turn", *SLOTS[name], *self._groups())
        for slot in parse_slots(self.hint):
            if slot in RESERVED and slot not in has:
                raise ValueError(
                    f"hint: detect = {name!r} does not know {{{slot}}}; it has "
                    f"{', '.join(f'{{{one}}}' for one in has)} and the task's privileged fields"
                )
        return self

    def _groups(self) -> tuple[str, ...]:
        return tuple(re.compile(self.pattern).groupindex) if self.pattern is not None else ()

    @property
    def template(self) -> str:
        assert self.hint is not None, "filled in or refused when the recipe was read"
        return self.hint

    @property
    def needs_finding(self) -> bool:
        """Whether the words depend on what was found, so that a clean turn cannot be given them."""
        found = {*RESERVED, *self._groups()}
        return any(slot in found for slot in parse_slots(self.template))

    def __str__(self) -> str:
        """As the reference shows a default."""
        return f'{{ detect = "{self.detect}" }}'


DEFAULT_DETECTORS: tuple[Detect, ...] = (*EVENT_DETECTORS, "repeated_call")
DEFAULT_RULES = tuple(Rule(detect=name) for name in DEFAULT_DETECTORS)


# ── readers ──────────────────────────────────────────────────────────────────────────────────────


class ReaderBase(Section):
    max_hints: PositiveInt = 8
    """Of one trajectory; the first ones are kept and the others counted."""
    control: Literal["none", "random_turn", "random_hint", "all_turns"] = "none"
    """For honest experiments. random_turn: each hint above another assistant turn of its
    trajectory, one that no hint was meant for. random_hint: each turn gets the words meant for
    another turn of the batch. all_turns: above every assistant turn of a trajectory that has a
    hint."""


class SingleReader(ReaderBase):
    max_chars: PositiveInt = 1000
    """Of one hint; longer ones are dropped and counted."""


class RuleReaderConfig(SingleReader):
    kind: Literal["rules"]
    rules: Annotated[tuple[Rule, ...], Field(min_length=1)] = DEFAULT_RULES
    """Where two of them find the same turn, the first one's hint is used."""
    error_pattern: Regex | None = None
    """A reply that matches is an error, even if the environment reported no event. Unset: replies
    that begin like one, such as `Error: …`, `ValueError: …` or `{"error": "…"}`."""
    false_positive_rate: Fraction = 0.0
    """A worse reader, for sweeps: the share of turns without a finding that get a rule's hint
    anyway."""

    @model_validator(mode="after")
    def _has_words_for_clean_turns(self) -> RuleReaderConfig:
        if self.false_positive_rate and all(rule.needs_finding for rule in self.rules):
            raise ValueError(
                "false_positive_rate: every rule's hint has a slot that only a finding can fill; "
                "add a "
                "rule whose hint uses {turn} and privileged fields alone, or set it to 0"
            )
        return self


Plain = str | int | float | bool


class EndpointConfig(Section):
    """A server that speaks OpenAI's chat completions: vLLM, llama.cpp, a provider."""

    base_url: str
    """Up to and with the version, e.g. `http://localhost:8000/v1`."""
    model: str
    """The server's name for it."""
    api_key_env: str | None = None
    """Name of the environment variable with the key, which itself is never written anywhere.
    Unset: no key is sent."""
    timeout: PositiveFloat = 120.0
    """Seconds to wait for one reply."""
    max_retries: NonNegativeInt = 5
    """After 429, 5xx and failed connections, waiting longer each time."""
    max_concurrency: PositiveInt = 8
    """Requests under way at once."""
    extra_body: Mapping[str, Plain | Mapping[str, Plain]] = Field(default_factory=dict)
    """Further fields of each request, e.g. `seed`, or `max_completion_tokens` for servers that
    refuse `max_tokens`."""

    @field_validator("base_url")
    @classmethod
    def _is_http(cls, value: str) -> str:
        parts = urlsplit(value)
        _ = parts.port  # raises where it is no port
        if parts.username is not None or parts.password is not None:
            raise ValueError(
                "holds a password, and recipes are stored with every run; remove it, and name an "
                "environment variable in api_key_env"
            )
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ValueError(
                "must be the address of a server, like http://localhost:8000/v1, without a query"
            )
        return value.rstrip("/")

    @field_validator("api_key_env")
    @classmethod
    def _is_a_name(cls, value: str | None) -> str | None:
        # The message does not repeat the value: it may be the key itself.
        if value is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
            raise ValueError(
                "must be the name of an environment variable, like READER_KEY, never the key itself"
            )
        return value

    @field_validator("extra_body")
    @classmethod
    def _leaves_ours(
        cls, value: Mapping[str, Plain | Mapping[str, Plain]]
    ) -> Mapping[str, Plain | Mapping[str, Plain]]:
        homes = {
            "model": "endpoint.model",
            "temperature": "the reader's temperature",
            "max_tokens": "the reader's max_new_tokens",
        }
        for name in value:
            if name in homes:
                raise ValueError(f"{name} has a field of its own; set {homes[name]}")
            if name in ("messages", "n", "stream"):
                raise ValueError(f"{name} is set by the reader; remove it")
        return value


class ModelReaderConfig(SingleReader):
    kind: Literal["model"]
    endpoint: EndpointConfig | None = None
    """Unset: the student reads its own trajectories, in process."""
    hints_per_window: PositiveInt = 3
    """How many the model may propose each time it is asked."""
    min_confidence: Fraction = 0.0
    """Hints that the model is less sure of are dropped and counted; with a value above 0, also
    those without a confidence."""
    extra_instructions: str | None = None
    """Added to the model's instructions: what to look for, what a good hint says."""
    show_outcome: bool = True
    """Show the model the grade and what the environment reported."""
    window_chars: Annotated[int, Field(ge=1000)] = 24000
    """Characters of the trajectory shown at once. A longer one is read in several windows."""
    overlap_chars: NonNegativeInt = 2000
    """Characters of a window that are shown again in the next."""
    max_message_chars: Annotated[int, Field(ge=100)] = 2000
    """Characters of one message; of a longer one the middle is left out, visibly."""
    max_new_tokens: PositiveInt = 512
    """Of a reply."""
    temperature: NonNegativeFloat = 0.0
    """0: greedy."""

    @model_validator(mode="after")
    def _windows_move_on(self) -> ModelReaderConfig:
        if self.overlap_chars * 2 > self.window_chars:
            raise ValueError(
                "overlap_chars must be at most half of window_chars, or reading hardly moves on"
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
    installed, or lies where the command runs."""
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
    """In order: where two have a hint for the same turn, the first one's is used."""

    @model_validator(mode="after")
    def _one_control(self) -> CombinedReaderConfig:
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


class HintsConfig(Section):
    """Where a hint is put, and when it is worth training on."""

    position: Literal["before_turn", "last_message", "system"] = "before_turn"
    """above: a message of its own right above the turn. inside: at the end of the message that the
    turn answers. system: in the system prompt."""
    role: Literal["user", "system", "tool"] | None = None
    """Of the hint's own message, with position = 'before_turn'. Unset: user."""
    min_shift: float | None = None
    """In nats: how much the log-probability of the turn, summed over its tokens, must fall under
    the hint. Hints below are dropped and counted. Unset: none is; shifts are measured all the same,
    and a live self-teacher reads hints in the update's own pass, which costs least."""
    resamples: NonNegativeInt = 0
    """Replies that are written under each hint and checked by the environment, before it trains.
    Costs decoding; tells how good the hints are."""
    min_pass_rate: Fraction = 0.0
    """Share of these that must pass, or the hint is dropped and counted."""
    cumulative: bool = False
    """Whether the hints of earlier turns stay in view of later ones."""

    @model_validator(mode="after")
    def _role_belongs(self) -> HintsConfig:
        if self.min_pass_rate and not self.resamples:
            raise ValueError("min_pass_rate is a share of the resamples; set resamples, too")
        if self.resamples and self.cumulative:
            raise ValueError("resamples are written under one hint alone; set cumulative = false")
        if self.role is not None and self.position != "before_turn":
            raise ValueError(
                "role is that of a message of the hint's own, and with position = "
                f"{self.position!r} it "
                "has none; remove role, or use position = 'before_turn'"
            )
        return self
