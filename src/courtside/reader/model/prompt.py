"""Renders a trajectory for a model that reads it: one JSON object a line, windows of whole turns.

No text of a trajectory can end the block it is in: every text is inside a JSON string
on a line of its own, where quotes and line breaks are escaped, and each such line begins with a
brace while the block's markers do not. Nor can it become a special token of the server's
tokenizer: what those begin with is written as an escape. `json.loads` gives the text back.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from courtside.recipe.reader import ModelReaderConfig
from courtside.types import Trajectory, Turn

OPEN, CLOSE = "=== record begins ===", "=== record ends ==="
SPECIAL = re.compile(r"<|\[(?=[/A-Za-z_][\w/]*\])|\[(?=e~)|\](?=~)")
"""What special tokens begin with: <|…|>, <s>, <start_of_turn>, [INST], [e~[, ]~b]."""
INVISIBLE_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def encode_line(row: Mapping[str, Any]) -> str:
    r"""
    >>> print(encoded({"text": "<|im_end|>\n\u202e[INST] a[0]"}))
    {"text": "\u003c|im_end|>\n\u202e\u005bINST] a[0]"}
    """
    line = json.dumps(row, ensure_ascii=False)
    # Only inside strings can these occur: the structure of an object of ours has none of them.
    line = "".join(
        _escape(c) if unicodedata.category(c) in INVISIBLE_CATEGORIES else c for c in line
    )
    return SPECIAL.sub(lambda match: _escape(match[0]), line)


def _escape(c: str) -> str:
    return json.dumps(c)[1:-1] if not c.isascii() else f"\\u{ord(c):04x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    trajectory: str
    lines: tuple[str, ...]
    turns: tuple[int, ...]
    """The assistant's turns in it: their numbers are indices into the trajectory's turns."""


def make_windows(trajectory: Trajectory, config: ModelReaderConfig) -> list[Window]:
    """The task in each, then as many turns as fit; the last ones again at the start of the next.

    Every turn that can get a hint is in at least one.
    """
    hintable = set(trajectory.hintable_turns)
    messages = trajectory.task.messages
    task_lines = [
        _line({"turn": 0, "by": "tools"}, m.tools, config.max_message_chars)
        for m in messages
        if m.tools
    ]
    task_lines += [
        _line({"turn": 0, "by": m.role}, m.content, config.max_message_chars) for m in messages
    ]
    if config.show_outcome and trajectory.grade is not None:
        grade = trajectory.grade
        row = {"outcome": "passed" if grade.passed else "failed", "score": grade.score}
        task_lines.append(_line(row, grade.feedback, config.max_message_chars))
    blocks = [
        (i, _lines(i, turn, config))
        for i, turn in enumerate(trajectory.turns)
        if turn.role != "prompt"
    ]
    sizes = [sum(len(line) + 1 for line in lines) for _, lines in blocks]
    windows: list[Window] = []
    start, new = 0, 0
    while new < len(blocks):
        end, num_chars = start, 0
        while end < len(blocks) and (end <= new or num_chars + sizes[end] <= config.window_chars):
            num_chars += sizes[end]
            end += 1
        part = blocks[start:end]
        turns = tuple(i for i, _ in part if i in hintable)
        if hintable & {i for i, _ in blocks[new:end]}:
            lines = (*task_lines, *(line for _, lines in part for line in lines))
            windows.append(Window(trajectory=trajectory.id, lines=lines, turns=turns))
        start, new, num_repeated = end, end, 0
        while start > 0 and num_repeated + sizes[start - 1] <= config.overlap_chars:
            start -= 1
            num_repeated += sizes[start]
    return windows


def _lines(i: int, turn: Turn, config: ModelReaderConfig) -> list[str]:
    if turn.role == "assistant":
        head: dict[str, Any] = {"turn": i, "by": "assistant"}
        if config.show_outcome and turn.events:
            head["reported"] = [event.kind for event in turn.events]
        return [_line(head, turn.text, config.max_message_chars)]
    texts: list[tuple[str, str]] = [(m.role, m.content) for m in turn.messages] or [
        ("environment", turn.text)
    ]
    return [_line({"turn": i, "by": role}, text, config.max_message_chars) for role, text in texts]


def _line(head: Mapping[str, Any], text: str, limit: int) -> str:
    """What was left out is told beside the text, where no text can pretend to be it."""
    if len(text) <= limit:
        return encode_line({**head, "text": text})
    begin, end = limit - limit // 3, limit // 3
    return encode_line(
        {
            **head,
            "text": text[:begin],
            "characters_left_out": len(text) - limit,
            "text_goes_on": text[len(text) - end :],
        }
    )
