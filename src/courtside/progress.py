"""How far the phase that is running has come, and what became of requests to servers.

Engines, rollouts and the student write their counts; a console reads them whenever it draws, so
that counting a token costs no call.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class PhaseProgress:
    total: int
    unit: str
    """What is counted: `answers`, `episodes`, `passes` of a teacher, or `micro-batches`."""
    max_tokens: int = 0
    """Limit of one sample, where each is one of the `total`; 0: samples are parts of them."""
    finished: int = 0
    partial: float = 0.0
    """Shares of those under way that are done, added up."""
    num_tokens: int = 0
    """Sampled so far."""
    num_unused: int = 0
    """Tokens that finished samples left of their limit."""
    start: float = field(default_factory=time.monotonic)

    @property
    def fraction(self) -> float:
        """Of the work. An answer or episode under way counts by how much of its limit is used, so
        the remaining time is an upper estimate."""
        if self.max_tokens:
            done = (self.num_tokens + self.num_unused) / (self.total * self.max_tokens or 1)
        else:
            done = (self.finished + self.partial) / (self.total or 1)
        return min(done, 1.0)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start

    @property
    def tokens_per_second(self) -> float | None:
        seconds = self.seconds
        return self.num_tokens / seconds if self.num_tokens and seconds > 0 else None

    @property
    def remaining(self) -> float | None:
        """Seconds; None before anything is done."""
        fraction = self.fraction
        return max(self.seconds * (1 - fraction) / fraction, 0.0) if fraction else None


@dataclass(eq=False, kw_only=True)
class ReplicaCounts:
    """Requests to one replica of a server, since the process began."""

    server: str
    """The recipe's field that names it: `rollout.server`, or a teacher's."""
    url: str
    num_assigned: int = 0
    """Requests that wait for it or are under way."""
    num_answered: int = 0
    num_failed: int = 0
    """Attempts without an answer that could be used; their requests are tried again."""
    num_hedged: int = 0
    """Requests that went to another replica, too, because this one took far longer than usual."""
    answer_seconds: float = 0.0
    """From sending to the answer, added up over those that were answered."""
    blocked_until: float = 0.0
    """By the monotonic clock; it gets no request before."""

    @property
    def is_blocked(self) -> bool:
        return time.monotonic() < self.blocked_until


@dataclass
class ProgressMeter:
    phase: PhaseProgress | None = None
    """Of the work that began last; None: nothing is counted in this phase."""
    replicas: Sequence[ReplicaCounts] = ()
    """Of all servers of the run."""
