"""Costs of each phase of a run: wall-clock seconds, tokens and estimated FLOPs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace


def forward_flops(num_parameters: int, num_tokens: int) -> float:
    """A multiply and an add per parameter and token; attention scores are left out."""
    return 2.0 * num_parameters * num_tokens


def training_flops(num_parameters: int, num_tokens: int, trainable: int) -> float:
    """Forward, backward through the activations, and gradients of the trained weights only."""
    return 2 * forward_flops(num_parameters, num_tokens) + forward_flops(trainable, num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCost:
    """What one phase (rollout, teacher, update, evaluate) has cost so far."""

    seconds: float = 0.0
    input_tokens: int = 0
    """Tokens of forward passes: prompts, contexts, scored or trained sequences."""
    output_tokens: int = 0
    """Sampled tokens."""
    flops: float = 0.0
    """2 · parameters · tokens for a forward pass, three times that for a trained one."""


class CostMeter:
    """Adds up seconds, tokens and FLOPs by phase.

    A nested phase pauses the outer one, so no second is counted twice. GPU work counts in the phase
    that synchronizes with it.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._totals: dict[str, PhaseCost] = {}
        self._open: list[str] = []
        self._since = 0.0
        self._at_lap: dict[str, float] = {}

    @property
    def current_phase(self) -> str | None:
        return self._open[-1] if self._open else None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def add(
        self, phase: str, *, input_tokens: int = 0, output_tokens: int = 0, flops: float = 0.0
    ) -> None:
        so_far = self._totals.get(phase, PhaseCost())
        self._totals[phase] = replace(
            so_far,
            input_tokens=so_far.input_tokens + input_tokens,
            output_tokens=so_far.output_tokens + output_tokens,
            flops=so_far.flops + flops,
        )

    def totals(self) -> dict[str, PhaseCost]:
        self._charge()
        return dict(self._totals)

    def restore(self, totals: Mapping[str, PhaseCost]) -> None:
        """Continue from the totals of an earlier process of the same run."""
        assert not self._totals and not self._open, "restore comes before the first phase"
        self._totals = dict(totals)
        self._at_lap = {name: cost.seconds for name, cost in totals.items()}

    def lap(self) -> dict[str, float]:
        """Seconds of each phase since the last lap; phases that did not run are left out."""
        self._charge()
        seconds = {name: cost.seconds for name, cost in self._totals.items()}
        lap = {name: total - self._at_lap.get(name, 0.0) for name, total in seconds.items()}
        self._at_lap = seconds
        return {name: spent for name, spent in lap.items() if spent > 0}

    def _charge(self) -> None:
        now = self._clock()
        if self._open:
            name = self._open[-1]
            so_far = self._totals.get(name, PhaseCost())
            self._totals[name] = replace(so_far, seconds=so_far.seconds + now - self._since)
        self._since = now
