"""Sums over the chunks of a step, so that a mean is over the step and not over its chunks.

They run where the numbers are, in float64, and come to the host all together when they are asked
for: a GPU goes on computing while they add up.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Kind = Literal["sum", "count", "largest", "value"]


class MetricAccumulator:
    def __init__(self) -> None:
        # One scalar for each, made when it is first seen: nothing of a later chunk outlives it.
        self._running: dict[tuple[Kind, str], Tensor] = {}
        self._read: dict[tuple[Kind, str], float] | None = None

    def mean(self, name: str, values: Tensor, where: Tensor | None = None) -> None:
        """Of all `values`, or of those `where` it is True; how many those are is not asked."""
        if values.numel():
            values = values.detach().double()
            values = values if where is None else torch.where(where, values, 0.0)
            self._at("sum", name, values).add_(values.sum())
            self._count(name, values, where)

    def largest(self, name: str, values: Tensor, where: Tensor | None = None) -> None:
        """A NaN is larger than nothing."""
        if values.numel():
            values = values.detach().double()
            values = values if where is None else torch.where(where, values, -torch.inf)
            running = self._at("largest", name, values, -torch.inf)
            torch.fmax(running, values.max(), out=running)
            self._count(name, values, where)

    def value(self, name: str, part: Tensor) -> None:
        """A part of a loss component: already over its denominator, so parts add up."""
        self._at("value", name, part).add_(part.detach())

    @property
    def values(self) -> dict[str, float]:
        return self._of("value")

    def metrics(self) -> dict[str, float]:
        """Of what was never seen there is no mean, and none is made up."""
        counts = self._of("count")
        means = {
            name: total / counts[name] for name, total in self._of("sum").items() if counts[name]
        }
        return means | {name: v for name, v in self._of("largest").items() if counts[name]}

    def _count(self, name: str, values: Tensor, where: Tensor | None) -> None:
        running = self._at("count", name, values)
        running.add_(values.numel() if where is None else where.sum())

    def _at(self, kind: Kind, name: str, values: Tensor, start: float = 0.0) -> Tensor:
        self._read = None
        if (kind, name) not in self._running:
            self._running[kind, name] = torch.full(
                (), start, dtype=torch.float64, device=values.device
            )
        return self._running[kind, name]

    def _of(self, kind: Kind) -> dict[str, float]:
        if self._read is None:
            self._read = _on_host(self._running)
        return {name: value for (its, name), value in self._read.items() if its == kind}


def _on_host(running: dict[tuple[Kind, str], Tensor]) -> dict[tuple[Kind, str], float]:
    """In one piece from each device, in the order in which they were first seen."""
    found: dict[tuple[Kind, str], float] = {}
    for device in {scalar.device for scalar in running.values()}:
        own = {key: scalar for key, scalar in running.items() if scalar.device == device}
        found |= dict(zip(own, torch.stack(list(own.values())).tolist(), strict=True))
    return {key: found[key] for key in running}
