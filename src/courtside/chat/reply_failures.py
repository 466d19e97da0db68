"""Questions to a model that came to nothing: counted, and many of them stop the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from courtside.chat.model_client import Reply
from courtside.errors import DraftFailuresError
from courtside.sanitize import to_one_line, truncate

RECENT = 64
"""Questions over which the fraction of failures is taken, or those of the batch if more."""
MIN_FAILURES = 3
"""Fewer do not stop a run, unless no question was answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    kind: str
    """E.g. "no_answer": the name of its count."""
    details: str


@dataclass(kw_only=True)
class FailureMonitor:
    """Stops the run where too many questions fail."""

    name: str
    """How messages call who asks, e.g. "drafts[0] (rewrite)"."""
    max_fraction: float
    recent: list[Failure | None] = field(default_factory=list)
    """The failure of each recent question; None: it had a valid answer."""

    def max_failures(self, num_questions: int) -> int:
        """More of these questions than that stop the run in any case."""
        return max(MIN_FAILURES - 1, int(self.max_fraction * num_questions))

    def check(self, failures: Sequence[Failure | None]) -> None:
        """`failures`: of each question of a batch."""
        self.recent = [*self.recent, *failures][-max(RECENT, len(failures)) :]
        recent = [failure for failure in self.recent if failure is not None]
        num, total = len(recent), len(self.recent)
        if num <= self.max_fraction * total or (num < MIN_FAILURES and num < total):
            return
        kinds = Counter(failure.kind for failure in recent)
        self.recent = []
        raise DraftFailuresError(
            f"{self.name}: {num} of the last {total} questions have no valid answer "
            f"({', '.join(f'{kind} {n}' for kind, n in kinds.most_common())}), more than "
            f"max_failure_fraction = {self.max_fraction:g} allows. The last: "
            f"{recent[-1].details}. The steps done are saved; correct it and go on in the same "
            "folder"
        )


def quote_reply(reply: Reply) -> str:
    """Why a reply is no use, for people."""
    problem = "was cut off at max_new_tokens" if reply.is_truncated else "is not as asked for"
    name = "" if reply.request_id is None else f" to {reply.request_id}"
    return f"the reply{name} {problem}: {truncate(to_one_line(reply.text), 200)!r}"
