"""Names of requests to servers, by which a message of ours and a line of a server's log are found
together."""

from __future__ import annotations

import itertools
from uuid import uuid4

HEADER = "X-Request-Id"


class RequestIds:
    """Those of one client, `courtside-1f0c2d3e-417`: unique among clients, too. Each try has its
    own, as servers log tries. Threads may share it."""

    def __init__(self) -> None:
        self._client, self._numbers = uuid4().hex[:8], itertools.count()

    def make(self) -> str:
        return f"courtside-{self._client}-{next(self._numbers)}"
