"""Whether servers sample with the trainer's weights: log-probs of the same tokens by both.

A server can answer well with old weights, and nothing but these numbers tells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MIN_SLOPE = 0.5
"""Of the servers' change over the trainer's: 1 where the update arrived, 0 where it did not."""
MAX_SLOPE_ERROR = 0.1
"""Rounding must leave the slope this certain, or it says nothing."""
ROUNDING = 1e-5
"""Nats by which float32 log-probs differ at least."""
MAX_GROWTH = 10
"""Of the difference over that of the first weights, which is rounding alone: where a part of the
weights stays behind, the rest follows the trainer's, and only the difference grows."""
GROWTH_FLOOR = 1e-3
"""Nats below which a difference may grow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeLogps:
    """Of the probe prompts' tokens, by both sides, with weights of one version."""

    trainer: tuple[float, ...]
    server: tuple[float, ...]

    @property
    def mean_difference(self) -> float:
        pairs = zip(self.trainer, self.server, strict=True)
        return sum(abs(trainer - server) for trainer, server in pairs) / len(self.trainer)


def find_weight_problem(
    current: ProbeLogps, earlier: Sequence[ProbeLogps], *, max_difference: float
) -> str | None:
    """Why the servers' weights are not the trainer's; None: as far as can be told, they are."""
    if not current.mean_difference <= max_difference:  # also NaN
        return (
            f"their log-probs differ by {current.mean_difference:.3g} nats a token on average, and "
            f"{max_difference:g} are allowed"
        )
    for before in earlier:
        slope, error = _slope(before, current)
        if error < MAX_SLOPE_ERROR and slope < MIN_SLOPE:
            return (
                "the trainer's log-probs changed, and theirs changed by "
                f"{max(slope, 0.0):.0%} of that"
            )
    limit = max(MAX_GROWTH * earlier[0].mean_difference, GROWTH_FLOOR) if earlier else math.inf
    if current.mean_difference > limit:
        return (
            f"their log-probs differ by {current.mean_difference:.3g} nats a token on average, and "
            f"with the first weights it was {earlier[0].mean_difference:.3g}: a part of the "
            "weights did not arrive"
        )
    return None


def shows_last_change(current: ProbeLogps, earlier: Sequence[ProbeLogps]) -> bool:
    """Whether the last step changed log-probs by more than rounding, so that they prove a sync."""
    return bool(earlier) and _slope(earlier[-1], current)[1] < MAX_SLOPE_ERROR


def _slope(before: ProbeLogps, after: ProbeLogps) -> tuple[float, float]:
    """Least squares of the servers' changes on the trainer's, and its standard error from the
    rounding that was there before."""
    ours = [b - a for a, b in zip(before.trainer, after.trainer, strict=True)]
    server = [b - a for a, b in zip(before.server, after.server, strict=True)]
    square = sum(change * change for change in ours)
    if square == 0:
        return 1.0, math.inf
    residuals = [a - b for a, b in zip(before.trainer, before.server, strict=True)]
    noise = math.sqrt(sum(r * r for r in residuals) / len(residuals)) + ROUNDING
    slope = sum(a * b for a, b in zip(ours, server, strict=True)) / square
    return slope, math.sqrt(2 / square) * noise
