"""AdamW, with its state offloaded on request.

The two moments take twice the memory of the weights and are used only during the optimizer step.
Offloaded, they are in pinned host memory and streamed through the GPU. Chunks run over all
parameters as if concatenated; while one is updated, the next is copied in and the previous one
copied out. Results are bit-identical to AdamW on the GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from courtside.recipe import Recipe

CHUNK_SIZE = 2**23
"""Elements of a chunk. A power of two, the granularity in which pinned memory is allocated."""
NUM_STAGING_BUFFERS = 3
"""On the GPU: one being copied in, one being updated, one being copied out."""
STATE_KEYS = ("exp_avg", "exp_avg_sq")


def make_optimizer(trained: Mapping[str, nn.Parameter], recipe: Recipe) -> torch.optim.AdamW:
    # Gains and biases are not decayed: pulling them to zero is no regularizer.
    matrices = [p for p in trained.values() if p.ndim >= 2]
    vectors = [p for p in trained.values() if p.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": recipe.train.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    settings: dict[str, Any] = {"lr": recipe.learning_rate, "betas": recipe.train.betas}
    if recipe.train.optimizer_offload:
        return OffloadedAdamW(groups, **settings)
    return torch.optim.AdamW(groups, fused=True, **settings)


# ── offloaded state ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSlice:
    """Elements `start` to `stop` of a parameter, at `offset` in their chunk."""

    parameter: nn.Parameter
    start: int
    stop: int
    offset: int

    @property
    def in_chunk(self) -> slice:
        return slice(self.offset, self.offset + self.stop - self.start)

    def of(self, tensor: Tensor) -> Tensor:
        """These elements of a tensor with the parameter's shape."""
        return tensor.reshape(-1)[self.start : self.stop]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChunk:
    """The moments of consecutive parameter slices, in host memory."""

    group: dict[str, Any]
    """The optimizer's param group: learning rate, decay."""
    slices: tuple[ParameterSlice, ...]
    moments: Tensor
    """[2, size]"""


@dataclass(slots=True)
class StagingBuffer:
    """GPU memory for one chunk, with the events that order its use by three streams."""

    moments: Tensor
    loaded: torch.cuda.Event = field(default_factory=torch.cuda.Event)
    updated: torch.cuda.Event = field(default_factory=torch.cuda.Event)
    stored: torch.cuda.Event = field(default_factory=torch.cuda.Event)


class OffloadedAdamW(torch.optim.AdamW):
    def __init__(
        self, groups: Iterable[dict[str, Any]], *, chunk_size: int = CHUNK_SIZE, **settings: Any
    ):
        super().__init__(groups, fused=True, **settings)
        self._chunk_size = chunk_size
        self._chunks: list[StateChunk] = []
        """Allocated in the first step: evaluation needs no optimizer state."""
        self._num_steps: dict[Tensor, int] = {}
        parameters = [p for group in self.param_groups for p in group["params"]]
        self._device = parameters[0].device
        assert all(p.is_contiguous() and p.device == self._device for p in parameters)

    @property
    def staging_bytes(self) -> int:
        """GPU memory during a step."""
        return NUM_STAGING_BUFFERS * 2 * 4 * self._chunk_size

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        self._allocate()
        for parameter in self._num_steps:
            self._num_steps[parameter] += parameter.grad is not None
        if self._device.type == "cuda":
            self._stream_chunks()
        else:
            for chunk in self._chunks:
                self._update(chunk, chunk.moments)

    def state_tensors(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter in the form of AdamW's; empty before the first step."""
        if not self._num_steps.get(parameter):
            return {}
        state = {"step": torch.tensor(float(self._num_steps[parameter]))}
        slices = [moments for _, moments in self._moments_of(parameter)]
        for row, key in enumerate(STATE_KEYS):
            state[key] = torch.cat([moments[row] for moments in slices]).view_as(parameter)
        return state

    def load_state_tensors(self, parameter: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state_tensors` returned, or the state of a plain AdamW."""
        self._allocate()
        self._num_steps[parameter] = int(tensors["step"])
        for part, moments in self._moments_of(parameter):
            for row, key in enumerate(STATE_KEYS):
                moments[row] = part.of(tensors[key])

    def _moments_of(self, parameter: Tensor) -> Iterator[tuple[ParameterSlice, Tensor]]:
        """Slices of the parameter with their moments, which the last step has stored by then."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for chunk in self._chunks:
            for part in chunk.slices:
                if part.parameter is parameter:
                    yield part, chunk.moments[:, part.in_chunk]

    def _allocate(self) -> None:
        if self._chunks:
            return
        pinned = self._device.type == "cuda"
        for group in self.param_groups:
            for slices in _cut_into_chunks(group["params"], self._chunk_size):
                size = slices[-1].in_chunk.stop
                moments = torch.zeros(2, size, dtype=torch.float32, pin_memory=pinned)
                self._chunks.append(StateChunk(group=group, slices=slices, moments=moments))
            self._num_steps |= dict.fromkeys(group["params"], 0)

    def _update(self, chunk: StateChunk, moments: Tensor) -> None:
        slices = [part for part in chunk.slices if part.parameter.grad is not None]
        if not slices:
            return
        gradients = [p.of(p.parameter.grad) for p in slices if p.parameter.grad is not None]
        num_steps = [float(self._num_steps[part.parameter] - 1) for part in slices]
        group = chunk.group
        adamw(
            [part.of(part.parameter) for part in slices],
            gradients,
            [moments[0, part.in_chunk] for part in slices],
            [moments[1, part.in_chunk] for part in slices],
            [],
            [torch.full((), count, device=self._device) for count in num_steps],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _stream_chunks(self) -> None:
        compute = torch.cuda.current_stream(self._device)
        load, store = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        buffers = [
            StagingBuffer(
                torch.empty(2, self._chunk_size, dtype=torch.float32, device=self._device)
            )
            for _ in range(NUM_STAGING_BUFFERS)
        ]
        load.wait_stream(compute)
        for chunk, buffer in zip(self._chunks, cycle(buffers), strict=False):
            moments = buffer.moments[:, : chunk.moments.shape[1]]
            load.wait_event(buffer.stored)
            with torch.cuda.stream(load):
                _copy_rows(moments, chunk.moments)
            buffer.loaded.record(load)
            compute.wait_event(buffer.loaded)
            self._update(chunk, moments)
            buffer.updated.record(compute)
            store.wait_event(buffer.updated)
            with torch.cuda.stream(store):
                _copy_rows(chunk.moments, moments)
            buffer.stored.record(store)
        # The allocator frees the buffers in the order of the compute stream, and the next step
        # must begin after the last store of this one.
        compute.wait_stream(store)


def _cut_into_chunks(
    parameters: Iterable[nn.Parameter], size: int
) -> Iterator[tuple[ParameterSlice, ...]]:
    """All elements of the parameters, `size` at a time."""
    slices: list[ParameterSlice] = []
    filled = 0
    for parameter in parameters:
        start = 0
        while start < parameter.numel():
            stop = min(parameter.numel(), start + size - filled)
            slices.append(
                ParameterSlice(parameter=parameter, start=start, stop=stop, offset=filled)
            )
            filled += stop - start
            start = stop
            if filled == size:
                yield tuple(slices)
                slices, filled = [], 0
    if slices:
        yield tuple(slices)


def _copy_rows(target: Tensor, source: Tensor) -> None:
    """Row by row: a row is contiguous, so its copy is asynchronous."""
    for target_row, source_row in zip(target, source, strict=True):
        target_row.copy_(source_row, non_blocking=True)
