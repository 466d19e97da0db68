"""Decoding on a GPU as a replayed CUDA graph: one launch a token instead of hundreds.

The whole step is in the graph: model, head, draw, and writing the token where the next step reads
it. Shapes are fixed, so finished rows idle along until the batch is done, and whether all rows have
ended is looked at every few tokens only. The numbers are those of the eager loop up to rounding.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from courtside.engines.base import Head, Sampling
from courtside.engines.sampling import draw

ROW_STEP = 16
SLOT_STEP = 64
"""Rows and cache slots are rounded up to these, so that batches of about one size share a graph."""
LOOK_EVERY = 16
"""Tokens between looks at what was drawn: a look waits for the GPU."""
KEPT = 4
"""Graphs kept, each with its cache."""


class FixedLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values at addresses that never change; `slot` says where the next ones go."""

    def __init__(self, slot: Tensor, room_k: Tensor, room_v: Tensor):
        super().__init__()
        self.slot, self.keys, self.values = slot, room_k, room_v
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.slot, key_states)
        self.values.index_copy_(2, self.slot, value_states)
        return self.keys, self.values


class Decoder:
    """One graph, for batches of at most `rows` samples and `slots` positions."""

    def __init__(
        self, model: Any, head: Head, rooms: list[tuple[Tensor, Tensor]], sampling: Sampling
    ):
        rows, _, slots, _ = rooms[0][0].shape
        device = rooms[0][0].device
        self.rows, self.slots = rows, slots
        self.ids_B1 = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.position_B1 = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.slot = torch.zeros(1, dtype=torch.long, device=device)
        self.seen_BL = torch.zeros(rows, slots, dtype=torch.bool, device=device)
        self.step = torch.zeros(1, dtype=torch.long, device=device)
        self.uniform_NB = torch.zeros(slots, rows, dtype=torch.float64, device=device)
        self.drawn_NB = torch.zeros(slots, rows, dtype=torch.long, device=device)
        self.logp_NB = torch.zeros(slots, rows, dtype=torch.float32, device=device)
        self.cache = Cache(layers=[FixedLayer(self.slot, k, v) for k, v in rooms])
        self.model, self.head, self.sampling = model, head, sampling
        # On a CPU the step is simply called: the same logic, for tests.
        self.replay = self._capture() if device.type == "cuda" else self._step

    def _capture(self) -> Callable[[], None]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # lazy initialisation must not be captured
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph.replay

    def _step(self) -> None:
        """Read the last token, draw the next, leave it where the next replay reads it."""
        self.seen_BL.index_fill_(1, self.slot, True)
        out = self.model.base_model(
            input_ids=self.ids_B1,
            attention_mask=self.seen_BL[:, None, None, :],
            position_ids=self.position_B1,
            past_key_values=self.cache,
            use_cache=True,
        )
        uniform_B = self.uniform_NB.index_select(0, self.step)[0]
        ids_B, logp_B = draw(self.head(out.last_hidden_state[:, -1]), uniform_B, self.sampling)
        self.drawn_NB.index_copy_(0, self.step, ids_B[None])
        self.logp_NB.index_copy_(0, self.step, logp_B[None])
        self.ids_B1.copy_(ids_B[:, None])
        self.position_B1.add_(1)
        self.slot.add_(1)
        self.step.add_(1)

    def load(
        self,
        rooms: list[tuple[Tensor, Tensor]],
        *,
        mask_BL: Tensor,
        ids_B: Tensor,
        uniform_BN: Tensor,
    ) -> None:
        """Start from prompts that were read and a first token that was drawn for each row."""
        B, L = mask_BL.shape
        for layer, (k, v) in zip(self.cache.layers, rooms, strict=True):
            layer.keys[:B, :, :L] = k[:, :, :L]
            layer.values[:B, :, :L] = v[:, :, :L]
        self.seen_BL.zero_()
        self.seen_BL[:B, :L] = mask_BL.bool()
        self.seen_BL[B:, 0] = True  # idle rows must see something, or their softmax is NaN
        self.ids_B1.zero_()
        self.ids_B1[:B, 0] = ids_B
        self.position_B1.zero_()
        self.position_B1[:B, 0] = mask_BL.sum(-1)
        self.slot.fill_(L)
        self.step.fill_(1)
        self.uniform_NB.zero_()
        self.uniform_NB[: uniform_BN.shape[1], :B] = uniform_BN.T

    def run(self, num_tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Tokens 2 … num_tokens in portions (ids_NB, logp_NB); stop asking to stop decoding."""
        done = 1
        while done < num_tokens:
            portion = min(LOOK_EVERY, num_tokens - done)
            for _ in range(portion):
                self.replay()
            yield self.drawn_NB[done : done + portion], self.logp_NB[done : done + portion]
            done += portion


class Decoders:
    """The graphs of one model, by shape, sampling and the weights they were captured with."""

    def __init__(self, model: Any, head: Head):
        self.model, self.head = model, head
        self._kept: OrderedDict[Any, Decoder] = OrderedDict()

    def get(self, rooms: list[tuple[Tensor, Tensor]], sampling: Sampling) -> Decoder:
        rows, _, slots, _ = rooms[0][0].shape
        rows, slots = _up(rows, ROW_STEP), _up(slots, SLOT_STEP)
        key = (rows, slots, sampling, self._weights())
        if key not in self._kept:
            while len(self._kept) >= KEPT:
                self._kept.popitem(last=False)
            fixed = [(_room(k, rows, slots), _room(v, rows, slots)) for k, v in rooms]
            self._kept[key] = Decoder(self.model, self.head, fixed, sampling)
        self._kept.move_to_end(key)
        return self._kept[key]

    def _weights(self) -> int:
        """Where the weights lie and whether adapters are on: a graph holds both for good."""
        places = tuple(p.data_ptr() for p in self.model.parameters())
        off = tuple(bool(getattr(m, "disable_adapters", False)) for m in self.model.modules())
        return hash((places, off))


def _room(like: Tensor, rows: int, slots: int) -> Tensor:
    return like.new_zeros(rows, like.shape[1], slots, like.shape[3])


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
