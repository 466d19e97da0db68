"""Rules of [reader] kind `rules`: which turns a rule detects, and its hint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from string import Formatter
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, PositiveInt, model_validator

from courtside.recipe.base import Section

Detect = Literal[
    "tool_not_found", "invalid_arguments", "unparsable_call", "tool_error", "no_call", "event",
    "repeated_call", "ignored_error", "answer_without_lookup", "over_length", "pattern",
]  # fmt: skip
EVENT_DETECTORS: tuple[Detect, ...] = (
    "tool_not_found", "invalid_arguments", "unparsable_call", "tool_error", "no_call",
)  # fmt: skip
"""Detectors of the environment's events; each is an `Event.kind`."""

EVENT_SLOTS = ("tool", "arguments", "message", "listed")
SLOTS: Mapping[str, tuple[str, ...]] = {
    **{kind: EVENT_SLOTS for kind in (*EVENT_DETECTORS, "event")},
    "repeated_call": ("message",),
    "ignored_error": ("message",),
    "answer_without_lookup": (),
    "over_length": ("tokens",),
    "pattern": ("match", "message"),
}
"""Slots that a detector fills, in addition to {turn}. Any other slot is a privileged field of the
task, another detail of the event or a named group of the pattern."""
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
"""Texts that start like an error: `Error: …`, `Error 404`, `ValueError: …`, `{"error": "…"}`, but
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
    """A detector of turns, and the hint before them."""

    detect: Detect
    """The first six use the environment's events; the others the text."""
    hint: str | None = None
    """With slots: {turn}, {tool}, {message}, … of the detector, and the names of the task's
    privileged fields. Unset: the detector's default. A turn without a value for a slot gets no
    hint, and is counted."""
    event: str | None = None
    """Of event: the kind of event to detect, e.g. `wrong_tool`."""
    pattern: Regex | None = None
    """Of pattern: the regular expression; its named groups are slots. Of
    answer_without_lookup: matches the prompts that need a lookup."""
    within: Literal["turn", "reply"] | None = None
    """Of pattern: searched in the assistant's text, or in what the environment replied to it.
    Unset: turn."""
    lookup_field: str | None = None
    """Of answer_without_lookup: a privileged field that only tasks have which need one."""
    max_tokens: PositiveInt | None = None
    """Of over_length: longer turns count too. Unset: only truncated ones."""

    @model_validator(mode="before")
    @classmethod
    def _fill_default_hint(cls, data: Any) -> Any:
        # Filled in before validation, so that the stored recipe has the text that was used.
        if isinstance(data, dict) and data.get("hint") is None:
            detect = data.get("detect")
            if isinstance(detect, str) and detect in HINTS:
                return {**data, "hint": HINTS[detect]}
        return data

    @model_validator(mode="after")
    def _check_parameters(self) -> Rule:
        name = self.detect
        if self.hint is None or not self.hint.strip():
            raise ValueError(f"detect = {name!r} needs a `hint`; write one")
        if self.pattern is not None and name not in ("pattern", "answer_without_lookup"):
            raise ValueError(
                f"pattern does not belong to detect = {name!r}; use detect = 'pattern'"
            )
        if name == "pattern" and self.pattern is None:
            raise ValueError("detect = 'pattern' needs a `pattern`; write one")
        if (self.event is not None) != (name == "event"):
            raise ValueError(
                "event names the kind that detect = 'event' detects; set it there, and only there"
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
        slots = ("turn", *SLOTS[name], *self.groups)
        for slot in parse_slots(self.hint):
            if slot in RESERVED and slot not in slots:
                raise ValueError(
                    f"hint: detect = {name!r} has no {{{slot}}}; it has "
                    f"{', '.join(f'{{{name}}}' for name in slots)} and the task's privileged fields"
                )
        return self

    @property
    def groups(self) -> tuple[str, ...]:
        """Named groups of the pattern."""
        return tuple(re.compile(self.pattern).groupindex) if self.pattern is not None else ()

    @property
    def template(self) -> str:
        assert self.hint is not None, "filled in or refused when the recipe was read"
        return self.hint

    @property
    def needs_finding(self) -> bool:
        """Whether the hint has slots that only a detected turn can fill."""
        from_finding = {*RESERVED, *self.groups}
        return any(slot in from_finding for slot in parse_slots(self.template))

    def __str__(self) -> str:
        """The format of defaults in the reference."""
        return f'{{ detect = "{self.detect}" }}'


DEFAULT_DETECTORS: tuple[Detect, ...] = (*EVENT_DETECTORS, "repeated_call")
DEFAULT_RULES = tuple(Rule(detect=name) for name in DEFAULT_DETECTORS)
