"""Small trajectories, written down as who said what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from courtside.types import Event, Grade, Message, StopReason, Task, Trajectory, Turn

PROMPT = "What is the weather in Oslo?"


def tool(*texts: str) -> Turn:
    """What an environment says in one turn, by its tools."""
    return environment(*(Message(role="tool", content=text) for text in texts))


def environment(*messages: Message) -> Turn:
    text = "\n".join(message.content for message in messages)
    return Turn(
        role="environment",
        text=text,
        token_ids=(7, 8),
        completion_mask=(False, False),
        messages=messages,
    )


def assistant(text: str, *events: Event, num_tokens: int = 3) -> Turn:
    return Turn(
        role="assistant",
        text=text,
        token_ids=tuple(range(num_tokens)),
        completion_mask=(True,) * num_tokens,
        events=events,
    )


def event(kind: str, **details: str) -> Event:
    return Event(kind=kind, details=details)


def play(
    *turns: Turn | str,
    id: str = "t",
    prompt: str = PROMPT,
    privileged: Mapping[str, str] | None = None,
    stop: StopReason = "done",
    grade: Grade | None = None,
    messages: Sequence[Message] | None = None,
) -> Trajectory:
    """A text is an assistant's turn without events. Turn 0 is the prompt."""
    prompt_messages = tuple(messages or [Message(role="user", content=prompt)])
    task = Task(
        id=f"task-{id}", split="train", messages=prompt_messages, privileged=privileged or {}
    )
    opening = Turn(role="prompt", text=prompt, token_ids=(1, 2), completion_mask=(False, False))
    later_turns = tuple(assistant(turn) if isinstance(turn, str) else turn for turn in turns)
    return Trajectory(
        id=id,
        task=task,
        turns=(opening, *later_turns),
        source="student",
        policy_version=0,
        temperature=1.0,
        stop=stop,
        grade=grade,
    )


def tool_missing(name: str = "weather", **more: Any) -> Event:
    return event("tool_not_found", tool=name, message=f"Tool not found: {name}", **more)


def balanced(counts: Mapping[str, int]) -> bool:
    """Whether every proposed hint was kept or dropped, once."""
    aside = {"model/windows", "model/invalid_json", "model/input_tokens", "model/output_tokens",
             "model/window_too_long", "human/unfinished_line"}  # fmt: skip
    ways = ("rules/", "model/", "human/", "control/")
    came = sum(n for name, n in counts.items() if name.startswith(ways) and name not in aside)
    dropped = sum(n for name, n in counts.items() if name.startswith("dropped/"))
    return came == dropped + counts.get("accepted", 0)
