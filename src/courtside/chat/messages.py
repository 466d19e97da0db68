"""Messages and the records made of them: contexts inserted, texts for display, trajectories."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from courtside.errors import TaskError
from courtside.types import Grade, Message, Sample, Source, Task, Trajectory, Turn

NONCHARACTERS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
"""Unicode reserves them for internal use, such as marking where tokens must be split."""


def unused_noncharacters(messages: Sequence[Message], num: int = 1) -> list[str]:
    """Noncharacters that do not occur in `messages`."""
    characters = {c for m in messages for text in (m.content, m.extra, m.tools) for c in text}
    free = [mark for mark in NONCHARACTERS if mark not in characters]
    if len(free) < num:
        raise TaskError(
            f"a message holds {len(NONCHARACTERS) - len(free)} of Unicode's noncharacters U+FDD0 "
            "to U+FDEF, which texts cannot and of which rendering needs a few. Remove them from it"
        )
    return free[:num]


def split_response_prefix(messages: Sequence[Message]) -> tuple[Sequence[Message], str]:
    """The request, and the start of the answer; empty: none is given."""
    *request, last = messages
    return (request, last.content) if request and last.role == "assistant" else (messages, "")


def split_thoughts(message: Message) -> tuple[Message, str]:
    """The message without thoughts that are apart from its content, and these; empty: none."""
    if "reasoning_content" not in message.extra:
        return message, ""
    extra = json.loads(message.extra)
    thoughts = extra.pop("reasoning_content", "")
    return replace(message, extra=json.dumps(extra, ensure_ascii=False) if extra else ""), thoughts


def join_thoughts(text: str, thoughts: str) -> Message:
    """An answer of the assistant."""
    extra = json.dumps({"reasoning_content": thoughts}, ensure_ascii=False) if thoughts else ""
    return Message(role="assistant", content=text, extra=extra)


def message_tree(message: Message) -> dict[str, Any]:
    """The message in the format of chat APIs."""
    extra = json.loads(message.extra) if message.extra else {}
    return {"role": message.role, "content": message.content, **extra}


def insert_context(
    messages: Sequence[Message], text: str, place: Literal["system", "user"]
) -> tuple[Message, ...]:
    """The prompt with `text` in its system message, or at the end of its last user message.

    >>> insert_context([Message(role="user", content="Hi")], "Be brief.", "system")[0].content
    'Be brief.'
    """
    if place == "system":
        if messages[0].role == "system":
            joined = replace(messages[0], content=f"{messages[0].content}\n\n{text}")
            return (joined, *messages[1:])
        return (Message(role="system", content=text), *messages)
    last = max((i for i, m in enumerate(messages) if m.role == "user"), default=None)
    if last is None:
        return (*messages, Message(role="user", content=text))
    joined = replace(messages[last], content=f"{messages[last].content}\n\n{text}")
    return (*messages[:last], joined, *messages[last + 1 :])


def make_trajectory(
    task: Task,
    prompt_ids: tuple[int, ...],
    sample: Sample,
    *,
    id: str,
    source: Source,
    policy_version: int | None,
    temperature: float,
    grade: Grade | None,
    preference: Literal["better", "worse"] | None = None,
) -> Trajectory:
    """A single-turn trajectory. A text from a data set has no sampler log-probs."""
    experts = sample.routed_experts if source == "student" else None
    prompt = Turn(
        role="prompt",
        text=format_messages(task.messages),
        token_ids=prompt_ids,
        completion_mask=(False,) * len(prompt_ids),
        routed_experts=() if experts is None else (experts[: len(prompt_ids)],),
    )
    answer = Turn(
        role="assistant",
        text=sample.text,
        token_ids=sample.token_ids,
        completion_mask=(True,) * len(sample.token_ids),
        sampler_logp=None if source == "dataset" else sample.logp,
        policy_versions=() if policy_version is None else sample.version_spans(policy_version),
        routed_experts=() if experts is None else (experts[len(prompt_ids) :],),
    )
    return Trajectory(
        id=id,
        task=task,
        turns=(prompt, answer),
        source=source,
        policy_version=policy_version,
        temperature=temperature,
        stop=sample.stop,
        grade=grade,
        preference=preference,
    )


def format_messages(messages: Sequence[Message]) -> str:
    """Messages as display text; tool calls and the like follow as JSON, and tools come first."""
    tools = [f"tools: {message.tools}" for message in messages if message.tools]
    texts = ("\n".join(filter(None, (message.content, message.extra))) for message in messages)
    return "\n\n".join(
        [*tools, *(f"{m.role}: {text}" for m, text in zip(messages, texts, strict=True))]
    )
