"""AdamW whose moments lie in the host's memory and pass through the GPU piece by piece.

The two moments are twice as large as the weights and are needed for a moment of a step only. Pieces
run over all parameters as if those lay in one row; while one is updated, the next is on its way in
and the one before on its way out. Every number is the one that AdamW on the GPU would have made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

CHUNK_SIZE = 2**23
"""Numbers in a piece. A power of two: pinned memory is given out in such sizes."""
NUM_STAGING_BUFFERS = 3
"""On the GPU: for what comes, what is there and what goes."""
STATE_KEYS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSlice:
    """Of a parameter, numbers start … stop, which lie from `at` on in their piece."""

    parameter: nn.Parameter
    start: int
    stop: int
    at: int

    @property
    def place(self) -> slice:
        return slice(self.at, self.at + self.stop - self.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChunk:
    """Moments of parts that lie one behind the other, in the host's memory."""

    group: dict[str, Any]
    """The optimiser's, with rates and decay."""
    parts: tuple[ParameterSlice, ...]
    moments: Tensor
    """[2, size]"""


@dataclass(slots=True)
class StagingBuffer:
    """Where a piece is while it is on the GPU."""

    moments: Tensor
    loaded: torch.cuda.Event = field(default_factory=torch.cuda.Event)
    updated: torch.cuda.Event = field(default_factory=torch.cuda.Event)
    stored: torch.cuda.Event = field(default_factory=torch.cuda.Event)


class OffloadedAdamW(torch.optim.AdamW):
    def __init__(
        self, groups: Iterable[dict[str, Any]], *, piece: int = CHUNK_SIZE, **settings: Any
    ):
        super().__init__(groups, fused=True, **settings)
        self._piece = piece
        self._pieces: list[StateChunk] = []
        """None before the first step: who only evaluates needs no memory for them."""
        self._counts: dict[Tensor, int] = {}
        """Steps that a parameter has seen."""
        own = [p for group in self.param_groups for p in group["params"]]
        self._device = own[0].device
        assert all(p.is_contiguous() and p.device == self._device for p in own)

    @property
    def room_bytes(self) -> int:
        """On the GPU, during a step."""
        return NUM_STAGING_BUFFERS * 2 * 4 * self._piece

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        self._make()
        for parameter in self._counts:
            self._counts[parameter] += parameter.grad is not None
        if self._device.type == "cuda":
            self._through_rooms()
        else:
            for piece in self._pieces:
                self._update(piece, piece.moments)

    def tensors(self, parameter: Tensor) -> dict[str, Tensor]:
        """What AdamW keeps of a parameter, as it would keep it; empty before the first step."""
        if not self._counts.get(parameter):
            return {}
        self._wait()
        parts = [(piece, part) for piece in self._pieces for part in _of(parameter, piece)]
        found = {
            key: torch.cat([piece.moments[row, part.place] for piece, part in parts])
            for row, key in enumerate(STATE_KEYS)
        }
        shaped = {key: flat.view_as(parameter) for key, flat in found.items()}
        return {"step": torch.tensor(float(self._counts[parameter])), **shaped}

    def restore(self, parameter: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Take up what `tensors` gave, or a plain AdamW's state."""
        self._make()
        self._wait()
        self._counts[parameter] = int(tensors["step"])
        for piece in self._pieces:
            for part in _of(parameter, piece):
                for row, key in enumerate(STATE_KEYS):
                    flat = tensors[key].reshape(-1)
                    piece.moments[row, part.place] = flat[part.start : part.stop]

    def _make(self) -> None:
        if self._pieces:
            return
        pinned = self._device.type == "cuda"
        for group in self.param_groups:
            for parts in _cut(group["params"], self._piece):
                size = parts[-1].place.stop
                moments = torch.zeros(2, size, dtype=torch.float32, pin_memory=pinned)
                self._pieces.append(StateChunk(group=group, parts=parts, moments=moments))
            self._counts |= dict.fromkeys(group["params"], 0)

    def _update(self, piece: StateChunk, moments: Tensor) -> None:
        parts = [part for part in piece.parts if part.parameter.grad is not None]
        if not parts:
            return
        counts = [float(self._counts[part.parameter] - 1) for part in parts]
        group = piece.group
        adamw(
            [part.parameter.view(-1)[part.start : part.stop] for part in parts],
            [_gradient(part) for part in parts],
            [moments[0, part.place] for part in parts],
            [moments[1, part.place] for part in parts],
            [],
            [torch.full((), count, device=self._device) for count in counts],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _through_rooms(self) -> None:
        here = torch.cuda.current_stream(self._device)
        inward, outward = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        rooms = [
            StagingBuffer(torch.empty(2, self._piece, dtype=torch.float32, device=self._device))
            for _ in range(NUM_STAGING_BUFFERS)
        ]
        inward.wait_stream(here)
        for piece, room in zip(self._pieces, cycle(rooms), strict=False):
            moments = room.moments[:, : piece.moments.shape[1]]
            inward.wait_event(room.stored)
            with torch.cuda.stream(inward):
                _copy(moments, piece.moments)
            room.loaded.record(inward)
            here.wait_event(room.loaded)
            self._update(piece, moments)
            room.updated.record(here)
            outward.wait_event(room.updated)
            with torch.cuda.stream(outward):
                _copy(piece.moments, moments)
            room.stored.record(outward)
        # The rooms go back to the allocator, which knows of one stream only; and the next step
        # begins behind this one's last store.
        here.wait_stream(outward)

    def _wait(self) -> None:
        """Until what the GPU still writes has arrived."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _cut(parameters: Iterable[nn.Parameter], size: int) -> Iterator[tuple[ParameterSlice, ...]]:
    """All numbers of the parameters, `size` at a time."""
    parts: list[ParameterSlice] = []
    filled = 0
    for parameter in parameters:
        start = 0
        while start < parameter.numel():
            stop = min(parameter.numel(), start + size - filled)
            parts.append(ParameterSlice(parameter=parameter, start=start, stop=stop, at=filled))
            filled += stop - start
            start = stop
            if filled == size:
                yield tuple(parts)
                parts, filled = [], 0
    if parts:
        yield tuple(parts)


def _of(parameter: Tensor, piece: StateChunk) -> Iterator[ParameterSlice]:
    return (part for part in piece.parts if part.parameter is parameter)


def _gradient(part: ParameterSlice) -> Tensor:
    assert part.parameter.grad is not None
    return part.parameter.grad.reshape(-1)[part.start : part.stop]


def _copy(to: Tensor, source: Tensor) -> None:
    """Row by row: a row is one piece of memory, which is copied without the host's help."""
    for row, own in zip(to, source, strict=True):
        row.copy_(own, non_blocking=True)
