"""Detectors of mistakes in assistant turns, one function each.

A detector returns facts for the slots of a hint, or None. Events of the environment are trusted;
the other detectors are defined below.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from courtside.recipe.rules import Rule
from courtside.types import Event, Trajectory

FAILURES = frozenset({"tool_not_found", "invalid_arguments", "unparsable_call", "tool_error"})
"""Events that say the call came to nothing."""
CUT_OFF = frozenset({"turns", "time", "length", "fault"})
"""Ways to stop in which the last turn is not a final answer."""
CALL = re.compile(
    r"<\w*(?:tool|function)|\[TOOL|\"(?:name|tool|function|action|arguments|parameters)\"\s*:"
    r"|^\s*[\w.]+\(.*\)\s*;?$|^\s*(?:action|call|tool|function)\s*:",
    re.IGNORECASE | re.MULTILINE,
)
"""What calls look like: <tool_call>, {"name": …}, a line that is name(…), Action: …"""
ADMITS = re.compile(
    r"\b(?:errors?|exception|fail(?:ed|s|ure)?|unable|cannot|can['’]t|could(?: not|n['’]t)"
    r"|did(?: not|n['’]t)|not (?:found|available|possible)|sorry|unfortunately)\b",
    re.IGNORECASE,
)
"""Words of an answer that says that something did not work."""
SAYS_NO = frozenset({"", "0", "false", "no", "none"})


class TurnLog:
    """Queries on the assistant turns of one trajectory, by turn index."""

    def __init__(self, trajectory: Trajectory, error: re.Pattern[str]):
        self.trajectory = trajectory
        self.error = error

    @cached_property
    def assistant(self) -> tuple[int, ...]:
        return tuple(i for i, t in enumerate(self.trajectory.turns) if t.role == "assistant")

    @cached_property
    def _failed(self) -> frozenset[int]:
        return frozenset(
            i
            for i in self.assistant
            if any(event.kind in FAILURES for event in self.events(i))
            or any(self.error.search(text) for text in self._results(i))
        )

    @cached_property
    def _same(self) -> dict[str, list[int]]:
        """Assistant turns by normalized text."""
        turns_by_text: dict[str, list[int]] = {}
        for i in self.assistant:
            turns_by_text.setdefault(self.normalized_text(i), []).append(i)
        return turns_by_text

    def text(self, i: int) -> str:
        return self.trajectory.turns[i].text

    def normalized_text(self, i: int) -> str:
        """The text with whitespace collapsed."""
        return " ".join(self.text(i).split())

    def events(self, i: int) -> tuple[Event, ...]:
        return self.trajectory.turns[i].events

    def previous(self, i: int) -> int | None:
        """The assistant turn before this one."""
        return max((j for j in self.assistant if j < i), default=None)

    def earlier_identical(self, i: int) -> list[int]:
        """Earlier assistant turns with the same text; none for an empty turn."""
        return (
            [j for j in self._same[self.normalized_text(i)] if j < i]
            if self.normalized_text(i)
            else []
        )

    def replies(self, i: int) -> tuple[str, ...]:
        """The texts that the environment answered the turn with; none if it did not."""
        turns = self.trajectory.turns
        if i + 1 >= len(turns) or turns[i + 1].role != "environment":
            return ()
        return tuple(message.content for message in turns[i + 1].messages) or (turns[i + 1].text,)

    def _results(self, i: int) -> tuple[str, ...]:
        """Of the replies, those of tools; a user's next request may come along with them."""
        if not self.replies(i):
            return ()
        messages = self.trajectory.turns[i + 1].messages
        return tuple(m.content for m in messages if m.role == "tool") or self.replies(i)

    def reply(self, i: int) -> str:
        return "\n".join(self.replies(i))

    def failed(self, i: int) -> bool:
        """The environment reported a failure, or what it replied reads like an error."""
        return i in self._failed

    def succeeded(self, i: int) -> bool:
        """A call that was answered, and not with an error."""
        return (
            bool(self.replies(i))
            and not self.failed(i)
            and not any(event.kind == "no_call" for event in self.events(i))
        )

    def is_answer(self, i: int) -> bool:
        """Whether it is a final answer: the last turn, not truncated, and not a call."""
        is_last = i == len(self.trajectory.turns) - 1
        called = self.failed(i) or CALL.search(self.text(i)) is not None
        return is_last and not called and self.trajectory.stop not in CUT_OFF


# ── detectors ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    reason: str
    """For people."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """By slot."""
    bad_span: str | None = None


Detector = Callable[[Rule, TurnLog, int], Finding | None]


def detect_mistake(rule: Rule, log: TurnLog, i: int) -> Finding | None:
    """The finding of an event of the environment, or else of the rule's detector."""
    finding = detect_event(rule, log, i)
    detector = DETECTORS.get(rule.detect)
    return detector(rule, log, i) if finding is None and detector is not None else finding


def detect_event(rule: Rule, log: TurnLog, i: int) -> Finding | None:
    """The environment's first event of that kind."""
    kind = rule.event if rule.event is not None else rule.detect
    event = next((event for event in log.events(i) if event.kind == kind), None)
    if event is None:
        return None
    word = {"tool_not_found": "tool", "invalid_arguments": "arguments"}.get(rule.detect, "")
    return Finding(
        reason=event.detail("message") or kind.replace("_", " "),
        facts={**_reply_facts(log, i), **{name: event.detail(name) for name in event.details}},
        bad_span=find_span(log.text(i), event.detail(word)),
    )


def _reply_facts(log: TurnLog, i: int) -> dict[str, str]:
    return {"message": log.reply(i)} if log.replies(i) else {}


def repeated_call(_rule: Rule, log: TurnLog, i: int) -> Finding | None:
    """The same text as an earlier turn that failed, and it did not succeed this time either; or
    the same text as the previous turn, unless the two were answered differently (paging, polling).
    """
    for j in reversed(log.earlier_identical(i)):
        repeats_failure = log.failed(j) and not log.succeeded(i)
        differ = log.replies(i) and log.replies(j) and log.reply(i) != log.reply(j)
        if repeats_failure or (j == log.previous(i) and not differ):
            return Finding(reason=f"the same as turn {j}", facts=_reply_facts(log, j))
    return None


def ignored_error(_rule: Rule, log: TurnLog, i: int) -> Finding | None:
    """The previous turn failed, and this one says the same again without success, or fails with the
    same event about the same tool, or is answered with the same error, or is the final answer and
    admits nothing."""
    j = log.previous(i)
    if j is None or not log.failed(j):
        return None
    mistakes = {(e.kind, e.detail("tool")) for e in log.events(j)}
    if log.normalized_text(i) == log.normalized_text(j) and not log.succeeded(i):
        reason = f"repeats turn {j}, which had failed"
    elif any((e.kind, e.detail("tool")) in mistakes for e in log.events(i)):
        reason = f"makes the mistake of turn {j} again"
    elif log.failed(i) and log.replies(i) and log.reply(i) == log.reply(j):
        reason = f"gets the error of turn {j} again"
    elif log.is_answer(i) and not ADMITS.search(log.text(i)):
        reason = f"answers as if turn {j} had not failed"
    else:
        return None
    messages = (text for e in log.events(j) if (text := e.detail("message")))
    message = next(messages, log.reply(j))
    return Finding(reason=reason, facts={"message": message} if message else {})


def answer_without_lookup(rule: Rule, log: TurnLog, i: int) -> Finding | None:
    """The final answer to a task that needs a lookup, and no call before it succeeded."""
    task = log.trajectory.task
    if rule.lookup_field is not None:
        needed = task.privileged.get(rule.lookup_field, "").strip().lower() not in SAYS_NO
    else:
        assert rule.pattern is not None, "the rule was checked"
        user_text = "\n".join(m.content for m in task.messages if m.role == "user")
        needed = re.search(rule.pattern, user_text) is not None
    looked_up = any(log.succeeded(j) for j in log.assistant if j < i)
    if not needed or looked_up or not log.is_answer(i):
        return None
    return Finding(reason="answered without a successful call")


def over_length(rule: Rule, log: TurnLog, i: int) -> Finding | None:
    """The turn ran into the length limit, or has more than `max_tokens` tokens."""
    turns = log.trajectory.turns
    num_tokens = len(turns[i].token_ids)
    stopped = log.trajectory.stop == "length" and i == len(turns) - 1
    too_long = rule.max_tokens is not None and num_tokens > rule.max_tokens
    if not (stopped or too_long):
        return None
    return Finding(reason=f"{num_tokens} tokens long", facts={"tokens": str(num_tokens)})


def pattern(rule: Rule, log: TurnLog, i: int) -> Finding | None:
    """The regular expression occurs in the turn, or in one of the replies to it."""
    assert rule.pattern is not None, "the rule was checked"
    in_reply = rule.within == "reply"
    texts = log.replies(i) if in_reply else (log.text(i),)
    match = next((m for text in texts if (m := re.search(rule.pattern, text))), None)
    if match is None:
        return None
    facts = {"match": match[0], **_reply_facts(log, i)}
    facts |= {name: text for name, text in match.groupdict().items() if text is not None}
    return Finding(
        reason=f"{rule.within or 'turn'} matches {rule.pattern}",
        facts=facts,
        bad_span=None if in_reply else unique_span(log.text(i), *match.span()),
    )


DETECTORS: Mapping[str, Detector] = {
    "repeated_call": repeated_call,
    "ignored_error": ignored_error,
    "answer_without_lookup": answer_without_lookup,
    "over_length": over_length,
    "pattern": pattern,
}


# ── spans ────────────────────────────────────────────────────────────────────────────────────────


def find_span(text: str, word: str) -> str | None:
    """The word where it stands by itself, or else within others; None where it does not occur.

    >>> span_of("get_weather(); get()", "get")
    ' get'
    >>> span_of("nothing", "weather") is None
    True
    """
    whole = re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text)
    start = whole.start() if whole else text.find(word)
    return unique_span(text, start, start + len(word)) if start >= 0 else None


def unique_span(text: str, start: int, end: int) -> str | None:
    """These characters; begun earlier if a search for them would find another place first."""
    if not text[start:end].strip():
        return None
    while text.find(text[start:end]) != start:
        start -= 1
    return text[start:end]
