"""What a run must not end without saying. Each alarm is a sentence, or None."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

READER = "reader/"


def nothing_trained(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Of a run's metrics: no token of any step was trained, so its weights are those it had."""
    if any(row[key] for row in rows for key in row if key.startswith("tokens/")):
        return None
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update({k: v for k, v in row.items() if k.startswith(READER) and v})
    said = ", ".join(
        f"{name.removeprefix(READER)} {count}" for name, count in sorted(counts.items())
    )
    return (
        f"none of the {len(rows)} steps trained a single token: the weights are what they were. "
        + (
            f"The reader counted over all steps: {said}."
            if said
            else "No loss found a token that is its own; see `on` of the losses."
        )
    )
