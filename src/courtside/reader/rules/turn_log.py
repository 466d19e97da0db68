"""A trajectory as tool calls and replies, for detectors: which calls repeat, fail or succeed."""

from __future__ import annotations

import re
from functools import cached_property

from courtside.types import Event, Trajectory

FAILURES = frozenset({"tool_not_found", "invalid_arguments", "unparsable_call", "tool_error"})
"""Events that say the call came to nothing."""
CUT_OFF = frozenset({"turns", "time", "length"})
"""Ways to stop in which the last turn is not a final answer."""
CALL = re.compile(
    r"<\w*(?:tool|function)|\[TOOL|\"(?:name|tool|function|action|arguments|parameters)\"\s*:"
    r"|^\s*[\w.]+\(.*\)\s*;?$|^\s*(?:action|call|tool|function)\s*:",
    re.IGNORECASE | re.MULTILINE,
)
"""What calls look like: <tool_call>, {"name": …}, a line that is name(…), Action: …"""


class TurnLog:
    """Queries on the assistant turns of one trajectory, by turn index."""

    def __init__(self, trajectory: Trajectory, error: re.Pattern[str]):
        self.trajectory = trajectory
        self.error = error

    @cached_property
    def assistant(self) -> tuple[int, ...]:
        return tuple(i for i, t in enumerate(self.trajectory.turns) if t.role == "assistant")

    @cached_property
    def _previous(self) -> dict[int, int]:
        return dict(zip(self.assistant[1:], self.assistant[:-1], strict=True))

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
        return self._previous.get(i)

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
