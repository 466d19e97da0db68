"""Replicas of a server: which one takes a request, and which ones are left alone for a while."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from courtside.progress import ReplicaCounts

LONGEST_WAIT = 60.0
"""Seconds between two tries, whatever the server asks for."""
IMBALANCE = 1.25
"""A replica takes up to so many times its share of the requests before others get those whose
prompts it has cached."""


@dataclass(eq=False, kw_only=True)
class Replica(ReplicaCounts):
    slots: asyncio.Semaphore
    """One for each request that may be under way."""
    is_checked: bool = True
    """Whether it is known what this replica can do."""
    num_failures: int = 0
    """In a row."""
    loaded: set[str] = field(default_factory=set)
    """Adapters that this replica has, as far as we know."""

    def report_failure(self, first_wait: float, wait: float | None) -> bool:
        """`wait`: seconds that the server asked for. Requests that fail together count once.
        Returns whether this is the first failure since an answer."""
        if self.is_blocked:
            return False
        self.num_failures += 1
        pause = first_wait * 2.0 ** (self.num_failures - 1) if wait is None else wait
        self.blocked_until = time.monotonic() + min(pause, LONGEST_WAIT)
        return self.num_failures == 1

    def report_answer(self) -> bool:
        """Returns whether it had failed before."""
        has_failed, self.num_failures = self.num_failures > 0, 0
        self.num_answered += 1
        return has_failed


def choose_replica(replicas: Sequence[Replica], key: str | None) -> Replica | None:
    """Rendezvous hashing with bounded loads; None: all are blocked.

    Requests of one `key` (samples of a prompt, turns of an episode) go to one replica, whose prefix
    cache has their beginning, unless it has more than its share of requests. Without a key the
    replica with the fewest takes it.
    """
    free = [replica for replica in replicas if not replica.is_blocked]
    if not free:
        return None
    if key is None:
        return min(free, key=lambda replica: replica.num_assigned)
    total = 1 + sum(replica.num_assigned for replica in free)
    limit = IMBALANCE * total / len(free)
    ranked = sorted(free, key=lambda replica: _weight(key, replica.url), reverse=True)
    return next((r for r in ranked if r.num_assigned < limit), ranked[0])


def choose_idle_replica(replicas: Sequence[Replica], busy: Replica) -> Replica | None:
    """Another one that has a slot at once."""
    idle = [r for r in replicas if r is not busy and not r.is_blocked and not r.slots.locked()]
    return min(idle, key=lambda replica: replica.num_assigned, default=None)


def _weight(key: str, url: str) -> bytes:
    return hashlib.sha256(f"{key} {url}".encode()).digest()
