"""Metrics and loss values accumulated over the chunks and micro-batches of an optimizer step.

Accumulators are float64 scalars on the device of the values; they are copied to the host together,
when they are first asked for, so that accumulating never synchronizes with a GPU.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Kind = Literal["sum", "count", "max", "loss"]


class MetricAccumulator:
    def __init__(self) -> None:
        # Allocated at first use: no small tensor ends up between the temporaries of later chunks.
        self._scalars: dict[tuple[Kind, str], Tensor] = {}
        self._host: dict[tuple[Kind, str], float] | None = None

    def mean(self, name: str, values: Tensor, where: Tensor | None = None) -> None:
        """Add `values`, or those `where` it is True, to a mean over the whole step."""
        if values.numel():
            values = values.detach().double()
            values = values if where is None else torch.where(where, values, 0.0)
            self._scalar("sum", name, values).add_(values.sum())
            self._count(name, values, where)

    def max(self, name: str, values: Tensor, where: Tensor | None = None) -> None:
        """Add to a maximum over the whole step; NaNs are ignored."""
        if values.numel():
            values = values.detach().double()
            values = values if where is None else torch.where(where, values, -torch.inf)
            scalar = self._scalar("max", name, values, start=-torch.inf)
            torch.fmax(scalar, values.max(), out=scalar)
            self._count(name, values, where)

    def add_loss(self, name: str, part: Tensor) -> None:
        """Add a part of a loss term; it is already divided by the term's denominator."""
        self._scalar("loss", name, part).add_(part.detach())

    @property
    def losses(self) -> dict[str, float]:
        return self._of_kind("loss")

    def means(self) -> dict[str, float]:
        """Means and maxima by name; a metric without any value is left out."""
        counts = self._of_kind("count")
        means = {
            name: total / counts[name]
            for name, total in self._of_kind("sum").items()
            if counts[name]
        }
        return means | {name: v for name, v in self._of_kind("max").items() if counts[name]}

    def _count(self, name: str, values: Tensor, where: Tensor | None) -> None:
        scalar = self._scalar("count", name, values)
        scalar.add_(values.numel() if where is None else where.sum())

    def _scalar(self, kind: Kind, name: str, values: Tensor, start: float = 0.0) -> Tensor:
        self._host = None
        if (kind, name) not in self._scalars:
            self._scalars[kind, name] = torch.full(
                (), start, dtype=torch.float64, device=values.device
            )
        return self._scalars[kind, name]

    def _of_kind(self, kind: Kind) -> dict[str, float]:
        if self._host is None:
            self._host = _copy_to_host(self._scalars)
        return {name: value for (k, name), value in self._host.items() if k == kind}


def _copy_to_host(scalars: dict[tuple[Kind, str], Tensor]) -> dict[tuple[Kind, str], float]:
    """One copy per device; the order of first use is preserved."""
    values: dict[tuple[Kind, str], float] = {}
    for device in {scalar.device for scalar in scalars.values()}:
        group = {key: scalar for key, scalar in scalars.items() if scalar.device == device}
        values |= dict(zip(group, torch.stack(list(group.values())).tolist(), strict=True))
    return {key: values[key] for key in scalars}
