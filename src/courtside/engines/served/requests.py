"""What is asked of a server, and how an answer may fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from courtside.errors import ServerError

Answer = TypeVar("Answer")

GO_ON = "Then start the same command again: a run goes on from its last checkpoint"


class BadAnswerError(Exception):
    """An answer of a server that says something else than it was asked."""


class RefusedError(ServerError):
    """A request that a server will not answer, however often it is sent."""

    def __init__(self, message: str, *, status: int, text: str):
        super().__init__(message)
        self.status, self.text = status, text


class NoAnswerError(ServerError):
    """No replica that was asked answers, however often it is asked."""


class UnavailableError(Exception):
    """No answer now: worth another try, on this replica later or on another one at once."""

    def __init__(self, reason: str, wait: float | None = None):
        super().__init__(reason)
        self.wait = wait


class AttemptError(Exception):
    """A replica did not answer a request; another one may."""


class StaleReplicaError(Exception):
    """An answer by a replica that has lost what `prepare` gave it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Generic[Answer]):
    path: str
    body: Mapping[str, Any] | None = None
    """None: a GET."""
    parse: Callable[[Any], Answer]
    """Of the JSON that came; raises `BadAnswerError`, or `UnavailableError` or `StaleReplicaError`
    for another try."""
    key: str | None = None
    """Requests of one key go to one replica; None: to the one with the fewest."""
    kind: str | None = None
    """Requests of one kind take about as long; None: never sent to two replicas."""
    timeout: float | None = None
    """Seconds to wait for the answer; None: as the recipe says."""
