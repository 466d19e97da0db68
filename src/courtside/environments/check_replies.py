"""Replies that `courtside check-env` plays: what students write, and what breaks parsers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from courtside.environments.tool_calls import format_call
from courtside.hashing import SeededRandom
from courtside.types import Message, Task

NUM_RANDOM = 3
ALPHABET = "abz 019.,:;!?\"'`{}[]()<>/\\|_-+=*&^%$#@~\n\tüß中🦜\u200b\u202e\0"
FIXED = {
    "empty replies": ("",),
    "white space": (" \n\t",),
    "prose": ("I do not know.", "Let me think about it.", "The answer is 42."),
    "very long replies": ("word " * 20_000,),
    "unicode": ("¿Qué? 🦜 \u202e\u200b\ufeff 中文 \0", "ﷺ" * 50),
    "cut-off JSON": ('<tool_call>{"name": "', '{"a": [1, 2', "```json\n{"),
    "unknown tools": (
        format_call("no_such_tool", {"x": 1}, "json"),
        format_call("no_such_tool", {"x": 1}, "plain"),
    ),
    "odd arguments": (
        format_call("no_such_tool", {"x": {"y": [None, 1e300, -0.5]}}, "json"),
        '<tool_call>{"name": "a", "arguments": []}</tool_call>',
        '<tool_call>{"name": null}</tool_call>',
    ),
    "numbers": ("0", "-1", "1e999", "9" * 400),
}  # fmt: skip


def make_scripts(
    task: Task,
    *,
    demonstrate: Callable[[Task], Sequence[Message]] | None = None,
    example_replies: Callable[[Task], Sequence[str]] | None = None,
) -> dict[str, tuple[str, ...]]:
    """By name: replies of an episode, to be repeated while it lasts. The optional methods of an
    environment give replies that it should understand."""
    scripts: dict[str, tuple[str, ...]] = {}
    if demonstrate is not None:
        messages = demonstrate(task)
        scripts["its own demonstration"] = tuple(
            message.content for message in messages if message.role == "assistant"
        )
    if example_replies is not None:
        scripts["its own example replies"] = tuple(example_replies(task))
    scripts |= FIXED
    text = " ".join(message.content for message in task.messages)
    scripts["words of the prompt"] = tuple(dict.fromkeys(re.findall(r"\w+", text)[-30:]))
    tools = [name.strip() for name in task.privileged.get("tools", "").split(",")]
    for call_format in ("json", "plain"):
        scripts[f"calls of its tools, {call_format}"] = tuple(
            format_call(name, arguments, call_format)
            for arguments in ({}, {"text": "x"}, {"unknown": None})
            for name in tools
            if name
        )
    for number in range(NUM_RANDOM):
        scripts[f"random replies {number + 1}"] = _random_replies(task, number)
    return {name: replies for name, replies in scripts.items() if replies}


def _random_replies(task: Task, number: int) -> tuple[str, ...]:
    """Words of the prompt and characters of all kinds, the same in every process."""
    rng = SeededRandom(f"check/{task.id}/{number}")
    prompt_words = " ".join(message.content for message in task.messages).split() or ["x"]
    replies = []
    for _ in range(8):
        parts = [
            rng.choice(prompt_words)
            if rng.bernoulli(0.7)
            else "".join(rng.choice(ALPHABET) for _ in range(rng.randint(1, 20)))
            for _ in range(rng.randint(1, 12))
        ]
        replies.append(" ".join(parts))
    return tuple(replies)
