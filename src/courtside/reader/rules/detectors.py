"""What can be told to have gone wrong in an assistant turn by looking at it. One function each.

A detector returns what it found, as facts for the slots of a hint, or None. The environment's own
reports (events) are taken at their word; the others are definitions, written out below.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from courtside.reader.rules.turn_log import TurnLog
from courtside.reader.rules.wording import find_span, unique_span
from courtside.recipe.reader import Rule

ADMITS = re.compile(
    r"\b(?:errors?|exception|fail(?:ed|s|ure)?|unable|cannot|can['’]t|could(?: not|n['’]t)"
    r"|did(?: not|n['’]t)|not (?:found|available|possible)|sorry|unfortunately)\b",
    re.IGNORECASE,
)
"""Words of an answer that says that something did not work."""
SAYS_NO = frozenset({"", "0", "false", "no", "none"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    reason: str
    """For people."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """By slot."""
    bad_span: str | None = None


Detector = Callable[[Rule, TurnLog, int], Finding | None]


def detect_mistake(rule: Rule, episode: TurnLog, i: int) -> Finding | None:
    """What the environment reported, or else what its detector sees."""
    told = detect_event(rule, episode, i)
    detector = DETECTORS.get(rule.detect)
    return detector(rule, episode, i) if told is None and detector is not None else told


def detect_event(rule: Rule, episode: TurnLog, i: int) -> Finding | None:
    """The environment said so: the first event of that kind."""
    kind = rule.event if rule.event is not None else rule.detect
    event = next((one for one in episode.events(i) if one.kind == kind), None)
    if event is None:
        return None
    word = {"tool_not_found": "tool", "invalid_arguments": "arguments"}.get(rule.detect, "")
    return Finding(
        reason=event.details.get("message") or kind.replace("_", " "),
        facts={**_said_after(episode, i), **event.details},
        bad_span=find_span(episode.text(i), event.details.get(word, "")),
    )


def _said_after(episode: TurnLog, i: int) -> dict[str, str]:
    return {"message": episode.reply(i)} if episode.replies(i) else {}


def repeated_call(_rule: Rule, episode: TurnLog, i: int) -> Finding | None:
    """The same text as an earlier turn that failed, and it did not succeed this time either; or
    the same text as the previous turn, unless the two were answered differently (paging, polling).
    """
    for j in reversed(episode.earlier_identical(i)):
        again = episode.failed(j) and not episode.succeeded(i)
        differ = episode.replies(i) and episode.replies(j) and episode.reply(i) != episode.reply(j)
        if again or (j == episode.previous(i) and not differ):
            return Finding(reason=f"the same as turn {j}", facts=_said_after(episode, j))
    return None


def ignored_error(_rule: Rule, episode: TurnLog, i: int) -> Finding | None:
    """The previous turn failed, and this one says the same again without success, or fails with the
    same event about the same tool, or is answered with the same error, or is the final answer and
    admits nothing."""
    j = episode.previous(i)
    if j is None or not episode.failed(j):
        return None
    mistakes = {(e.kind, e.details.get("tool")) for e in episode.events(j)}
    if episode.said(i) == episode.said(j) and not episode.succeeded(i):
        reason = f"repeats turn {j}, which had failed"
    elif any((e.kind, e.details.get("tool")) in mistakes for e in episode.events(i)):
        reason = f"makes the mistake of turn {j} again"
    elif episode.failed(i) and episode.replies(i) and episode.reply(i) == episode.reply(j):
        reason = f"gets the error of turn {j} again"
    elif episode.is_answer(i) and not ADMITS.search(episode.text(i)):
        reason = f"answers as if turn {j} had not failed"
    else:
        return None
    told = (e.details["message"] for e in episode.events(j) if e.details.get("message"))
    message = next(told, episode.reply(j))
    return Finding(reason=reason, facts={"message": message} if message else {})


def answer_without_lookup(rule: Rule, episode: TurnLog, i: int) -> Finding | None:
    """The final answer to a task that needs a lookup, and no call before it succeeded."""
    task = episode.trajectory.task
    if rule.lookup_field is not None:
        needed = task.privileged.get(rule.lookup_field, "").strip().lower() not in SAYS_NO
    else:
        assert rule.pattern is not None, "the rule was checked"
        asked = "\n".join(m.content for m in task.messages if m.role == "user")
        needed = re.search(rule.pattern, asked) is not None
    looked_up = any(episode.succeeded(j) for j in episode.assistant if j < i)
    if not needed or looked_up or not episode.is_answer(i):
        return None
    return Finding(reason="answered without a successful call")


def over_length(rule: Rule, episode: TurnLog, i: int) -> Finding | None:
    """The turn ran into the length limit, or has more than `max_tokens` tokens."""
    turns = episode.trajectory.turns
    num_tokens = len(turns[i].token_ids)
    stopped = episode.trajectory.stop == "length" and i == len(turns) - 1
    too_long = rule.max_tokens is not None and num_tokens > rule.max_tokens
    if not (stopped or too_long):
        return None
    return Finding(reason=f"{num_tokens} tokens long", facts={"tokens": str(num_tokens)})


def pattern(rule: Rule, episode: TurnLog, i: int) -> Finding | None:
    """The regular expression occurs in the turn, or in one of the replies to it."""
    assert rule.pattern is not None, "the rule was checked"
    in_reply = rule.within == "reply"
    texts = episode.replies(i) if in_reply else (episode.text(i),)
    match = next((m for text in texts if (m := re.search(rule.pattern, text))), None)
    if match is None:
        return None
    facts = {"match": match[0], **_said_after(episode, i)}
    facts |= {name: text for name, text in match.groupdict().items() if text is not None}
    return Finding(
        reason=f"{rule.within or 'turn'} matches {rule.pattern}",
        facts=facts,
        bad_span=None if in_reply else unique_span(episode.text(i), *match.span()),
    )


DETECTORS: Mapping[str, Detector] = {
    "repeated_call": repeated_call,
    "ignored_error": ignored_error,
    "answer_without_lookup": answer_without_lookup,
    "over_length": over_length,
    "pattern": pattern,
}
