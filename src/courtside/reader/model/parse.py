"""Parses a model's reply into hints. Never raises; whatever is not as requested is counted."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from courtside.reader.model.prompt import Window
from courtside.recipe.reader import ModelReaderConfig
from courtside.sanitize import to_one_line, truncate
from courtside.types import Hint, Trajectory

MAX_TRIES = 200
"""Brackets at which no JSON begins, before a reply is given up."""
REASON_CHARS = 300
ANSWER_START = re.compile(r'\[\s*\{\s*"turn"|\{\s*"hints"')
DECODER = json.JSONDecoder()


def parse_reply(
    text: str,
    window: Window,
    trajectory: Trajectory,
    config: ModelReaderConfig,
    counts: Counter[str],
) -> list[Hint]:
    entries = parse_entries(text)
    if entries is None:
        counts["model/invalid_json"] += 1
        return []
    hints: list[Hint] = []
    counts["model/proposed"] += len(entries)
    for number, entry in enumerate(entries):
        if number >= config.hints_per_window:
            counts["dropped/too_many"] += 1
            continue
        hint = _make_hint(entry, window, trajectory, config)
        if isinstance(hint, str):
            counts[f"dropped/{hint}"] += 1
        else:
            hints.append(hint)
    return hints


def parse_entries(text: str) -> list[Any] | None:
    """The list of the one answer in a reply, with a code fence or words around it or not.

    None where there is no answer, only the beginning of one, or more than one: a reply that quotes
    another list (from the trajectory, say) does not tell which of them it means.

    >>> entries_in('Sure: [{"turn": 3, "hint": "Read the list."}]')
    [{'turn': 3, 'hint': 'Read the list.'}]
    >>> entries_in("I found nothing: []")
    []
    >>> entries_in('[{"turn": 1}] or [{"turn": 3}]') is None
    True
    """
    values = list(_json_values(text.rpartition("</think>")[2]))
    if None in values:
        return None
    answers = [entries for value in values if (entries := _entries(value))]
    if len(answers) == 1:
        return answers[0]
    empty = [value for value in values if value == [] or value == {"hints": []}]
    return [] if not answers and len(empty) == 1 else None


def _entries(value: Any) -> list[Any]:
    """The entries if it looks like an answer; none if it is some other JSON."""
    if isinstance(value, dict) and isinstance(value.get("hints"), list):
        value = value["hints"]
    elif isinstance(value, dict):
        value = [value]
    if not isinstance(value, list) or not any(isinstance(e, dict) and "turn" in e for e in value):
        return []
    return value


def _json_values(text: str) -> Iterator[Any]:
    """Every JSON list and object that is not inside another; None for an answer that is cut off."""
    at, tries = 0, 0
    while tries < MAX_TRIES:
        starts = [
            position for position in (text.find("[", at), text.find("{", at)) if position >= 0
        ]
        if not starts:
            return
        try:
            value, at = DECODER.raw_decode(text, min(starts))
        except (ValueError, RecursionError):
            if ANSWER_START.match(text, min(starts)):
                yield None
            at, tries = min(starts) + 1, tries + 1
        else:
            yield value


def _make_hint(
    entry: Any, window: Window, trajectory: Trajectory, config: ModelReaderConfig
) -> Hint | str:
    """The hint, or why there is none."""
    if not isinstance(entry, dict):
        return "malformed"
    turn, hint_text = entry.get("turn"), entry.get("hint")
    reason, confidence = entry.get("reason") or "", entry.get("confidence")
    if not isinstance(turn, int) or isinstance(turn, bool) or not isinstance(hint_text, str):
        return "malformed"
    if not isinstance(reason, str):
        return "malformed"
    if problem := _turn_problem(turn, window.turns, trajectory):
        return problem
    hint_text = to_one_line(hint_text)
    if not hint_text:
        return "empty_hint"
    if len(hint_text) > config.max_chars:
        return "long_hint"
    if confidence is None:
        if config.min_confidence > 0:
            return "no_confidence"
    elif isinstance(confidence, bool) or not isinstance(confidence, int | float):
        return "malformed"
    elif not (math.isfinite(confidence) and 0 <= confidence <= 1):
        return "confidence_out_of_range"
    elif confidence < config.min_confidence:
        return "low_confidence"
    return Hint(
        trajectory=trajectory.id,
        turn=turn,
        text=hint_text,
        source="model",
        reason=truncate(to_one_line(reason), REASON_CHARS),
        confidence=None if confidence is None else float(confidence),
    )


def _turn_problem(turn: int, window_turns: Sequence[int], trajectory: Trajectory) -> str | None:
    if turn in window_turns:
        return None
    if not 0 <= turn < len(trajectory.turns):
        return "no_such_turn"
    return "not_assistant" if trajectory.turns[turn].role != "assistant" else "not_shown"
