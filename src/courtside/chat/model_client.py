"""The protocol of models that are asked in messages: messages in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from courtside.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    text: str
    input_tokens: int = 0
    """0 where the server does not say."""
    output_tokens: int = 0
    thoughts: str = ""
    """Those that the server gives apart from the text."""
    tool_calls: Sequence[Any] = ()
    """As the server sent them, not checked."""
    is_truncated: bool = False
    """Whether it ended at the limit of tokens, and not by itself."""
    request_id: str | None = None
    """By which the server's log names it; None: no server wrote it."""


class ModelClient(Protocol):
    def __call__(self, prompts: Sequence[Sequence[Message]]) -> list[Reply]:
        """A reply for each prompt, in their order."""
        ...

    def fits(self, prompt: Sequence[Message]) -> bool:
        """Whether it is short enough to be asked. True where that is not known beforehand."""
        ...
