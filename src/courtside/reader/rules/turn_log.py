"""A trajectory as calls and replies: what was asked, what came back, what failed."""

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
        """Assistant turns by what they say."""
        found: dict[str, list[int]] = {}
        for i in self.assistant:
            found.setdefault(self.said(i), []).append(i)
        return found

    def text(self, i: int) -> str:
        return self.trajectory.turns[i].text

    def said(self, i: int) -> str:
        """The text without regard to white space."""
        return " ".join(self.text(i).split())

    def events(self, i: int) -> tuple[Event, ...]:
        return self.trajectory.turns[i].events

    def previous(self, i: int) -> int | None:
        """The assistant turn before this one."""
        return self._previous.get(i)

    def earlier_identical(self, i: int) -> list[int]:
        """Earlier assistant turns that say exactly the same; none for a turn that says nothing."""
        return [j for j in self._same[self.said(i)] if j < i] if self.said(i) else []

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
        """The assistant's last word, by its own choice, and not a call."""
        is_last = i == len(self.trajectory.turns) - 1
        called = self.failed(i) or CALL.search(self.text(i)) is not None
        return is_last and not called and self.trajectory.stop not in CUT_OFF
