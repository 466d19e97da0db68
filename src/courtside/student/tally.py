"""Sums over the chunks of a step, so that a mean is over the step and not over its chunks."""

from __future__ import annotations

from torch import Tensor


class Tally:
    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._largest: dict[str, float] = {}
        self.values: dict[str, float] = {}
        """Loss components: already over their denominator, so they add up."""

    def mean(self, name: str, values: Tensor) -> None:
        if values.numel():
            total = float(values.double().sum())
            self._sums[name] = self._sums.get(name, 0.0) + total
            self._counts[name] = self._counts.get(name, 0) + values.numel()

    def largest(self, name: str, values: Tensor) -> None:
        if values.numel():
            self._largest[name] = max(self._largest.get(name, float("-inf")), float(values.max()))

    def value(self, name: str, part: Tensor) -> None:
        self.values[name] = self.values.get(name, 0.0) + float(part.detach())

    def metrics(self) -> dict[str, float]:
        return {name: self._sums[name] / self._counts[name] for name in self._sums} | self._largest
