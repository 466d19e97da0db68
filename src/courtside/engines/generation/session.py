"""Eager decoding, and multi-turn sessions on a CPU: each row keeps its KV cache from turn to turn.

Every row has its own length. A row's next token goes to the position after its last, and tokens
attend to positions up to their own. Rows that have finished are moved after the others, so that
forward passes run over the first rows of the buffers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from courtside.engines.base import SampleRequest, Sampling
from courtside.engines.forward.batching import (
    MIN_PREFIX_TOKENS,
    common_length,
    default_pass_tokens,
    pad_right,
    split_prefill,
)
from courtside.engines.generation.sampler import SampleBuffer, sample_tokens, stack_uniforms
from courtside.engines.lm_head import LMHead
from courtside.engines.patches.attention import (
    cache_mask,
    cached_attention_patches,
    cast_attention_inputs,
    new_positions,
)
from courtside.engines.patches.onednn_prepack import make_prepacked_patches
from courtside.engines.patches.patch import Patch, apply_patches
from courtside.engines.routing import PassRouting, Routers, RowRouting
from courtside.types import Sample

MIN_CAPACITY = 256
"""Positions of a new KV cache: each growth copies what is cached."""
MIN_SAVED_TOKENS = 64
"""By a prefix that rows share: a pass of its own takes as long as some forty tokens."""

Advance = Callable[[Mapping[int, int]], tuple[Sequence[int], Tensor]]
"""Runs a forward pass over the new token of each request that goes on, by the request's index.
Returns those requests in the order of the batch, and their hidden states [B, D]."""


def decode(
    order: Sequence[int],
    hidden_BD: Tensor,
    advance: Advance,
    *,
    requests: Sequence[SampleRequest],
    sampling: Sampling,
    head: LMHead,
    buffer: SampleBuffer,
) -> list[Sample]:
    """Samples of all requests after prefill, whose hidden states come in `order`. Requests leave
    the batch as they finish."""
    seeds = [request.seed for request in requests]
    uniform_BN = stack_uniforms(seeds, sampling.max_new_tokens, hidden_BD.device)
    for n in range(sampling.max_new_tokens):
        ids_B, logp_B = sample_tokens(head(hidden_BD), uniform_BN[list(order), n], sampling)
        ids = ids_B.tolist()
        running = buffer.append(order, ids, logp_B.tolist())
        if not running or n + 1 == sampling.max_new_tokens:
            break
        order, hidden_BD = advance({order[i]: ids[i] for i in running})
    return buffer.samples()


class _Layer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of all rows; new ones go to the session's `position_BN`."""

    def __init__(self, session: CachedSession):
        super().__init__()
        # Weak: a cycle would leave the buffers to the garbage collector.
        self.session = weakref.proxy(session)
        self.is_initialized = False

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        key_states, value_states = cast_attention_inputs(key_states, value_states)
        session = self.session
        if not self.is_initialized:
            self.dtype, self.device = key_states.dtype, key_states.device
            capacity = session.capacity
            self.keys = self._allocate(key_states, capacity)
            self.values = self._allocate(value_states, capacity)
            self.is_initialized = True
            self.clear(0, session.num_positions)
        rows, index_B = session.buffer_rows, session.index_B
        for buffer, new in ((self.keys, key_states), (self.values, value_states)):
            buffer[index_B[:, None], :, session.position_BN] = new.transpose(1, 2)
        return self.keys[rows, :, : session.width], self.values[rows, :, : session.width]

    def grow(self, capacity: int) -> None:
        if self.is_initialized:
            keys, values = self.keys, self.values
            self.keys = self._allocate(keys, capacity)
            self.values = self._allocate(values, capacity)
            self.keys[:, :, : keys.shape[2]], self.values[:, :, : values.shape[2]] = keys, values

    def clear(self, first: int, end: int) -> None:
        # A masked position is multiplied by 0, and 0 · NaN is NaN.
        if self.is_initialized:
            for buffer in (self.keys, self.values):
                buffer[:, :, first:end] = 0

    def _allocate(self, states: Tensor, capacity: int) -> Tensor:
        # Pages that are never cleared or written take no memory.
        num_rows = len(self.session.order)
        return states.new_empty(num_rows, states.shape[1], capacity, states.shape[3])

    def swap_rows(self, row: int, other: int, num_positions: int) -> None:
        if self.is_initialized:
            for buffer in (self.keys, self.values):
                part = buffer[:, :, :num_positions]
                part[[row, other]] = part[[other, row]]

    def copy_row(self, source: int, target: int, num_positions: int) -> None:
        if self.is_initialized:  # layers that share the cache of another have none of their own
            for buffer in (self.keys, self.values):
                buffer[target, :, :num_positions] = buffer[source, :, :num_positions]


class CachedSession:
    """Rows with KV caches that persist: a turn costs its own tokens.

    The model's weights must not change while a session is in use: they are prepacked once for all
    of its turns.
    """

    def __init__(
        self,
        model: Any,
        head: LMHead,
        *,
        num_rows: int,
        row_capacity: int = MIN_CAPACITY,
        make_buffer: Callable[[int, Sampling], SampleBuffer],
        autocast_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        routers: Routers | None = None,
    ):
        self.model, self.head, self.make_buffer = model, head, make_buffer
        self.routers = routers
        self.routing: RowRouting | None = None
        """Experts of what is cached, from the first call on that asks for them."""
        self.autocast_context = autocast_context
        self.device = model.device
        self.length = [0] * num_rows
        """Cached tokens by row."""
        self.order = list(range(num_rows))
        """The row at each index of the buffers."""
        num_layers = model.config.get_text_config().num_hidden_layers
        self.cache = Cache(layers=[_Layer(self) for _ in range(num_layers)])
        self.row_buffers: list[_Layer | RowRouting] = list(self.cache.layers)
        """What has a place for each cached token, at the same rows and positions."""
        self.prepacked: list[Patch] = []
        self.row_capacity = max(row_capacity, MIN_CAPACITY)
        self.capacity, self.num_positions = 0, 0
        """Positions of each row of the buffers, and how many of them are in use by any row."""
        self.buffer_rows: slice | Tensor = slice(0)
        self.index_B = torch.zeros(0, dtype=torch.long)
        self.width = 0
        self.position_BN = torch.zeros(0, 0, dtype=torch.long)
        """Of the current pass: its rows in the buffers (a slice of neighbors is not copied), how
        many positions it attends to, and those of its new tokens."""

    @torch.no_grad()
    def sample(
        self, rows: Sequence[int], requests: Sequence[SampleRequest], sampling: Sampling
    ) -> list[Sample]:
        """Append each row's `prompt_ids` to what it has cached, and generate.

        The last token that a row sampled is not cached: its next prompt must start with it.
        """
        assert rows and len(set(rows)) == len(rows)
        prompts = {row: r.prompt_ids for row, r in zip(rows, requests, strict=True)}
        assert all(prompts.values()), "a prompt needs at least one token"
        longest = max(self.length[row] + len(ids) for row, ids in prompts.items())
        if sampling.return_routed_experts and self.routers is not None and self.routing is None:
            shape = (len(self.order), self.capacity, *self.routers.shape)
            experts_BNLK = torch.empty(shape, dtype=self.routers.dtype, device=self.device)
            self.routing = RowRouting(self.routers, experts_BNLK)
            self.row_buffers.append(self.routing)
        self._grow(longest + sampling.max_new_tokens)
        start = {row: self.length[row] for row in rows}
        index_of = {row: i for i, row in enumerate(rows)}

        def advance(next_ids: Mapping[int, int]) -> tuple[list[int], Tensor]:
            front = self._move_to_front([rows[i] for i in next_ids])
            order = [index_of[row] for row in front]
            ids_B1 = torch.tensor([[next_ids[i]] for i in order], device=self.device)
            return order, self._forward(ids_B1, front)[:, -1]

        with (
            self.autocast_context(),
            apply_patches(self._patches(num_steps=sampling.max_new_tokens)),
        ):
            hidden = self._prefill(prompts)
            samples = decode(
                range(len(rows)),
                torch.stack([hidden[row] for row in rows]),
                advance,
                requests=requests,
                sampling=sampling,
                head=self.head,
                buffer=self.make_buffer(len(rows), sampling),
            )
        if self.routing is None or not sampling.return_routed_experts:
            return samples
        index_of_row = {row: index for index, row in enumerate(self.order)}
        return [
            replace(s, routed_experts=self.routing.read(index_of_row[r], start[r], self.length[r]))
            for r, s in zip(rows, samples, strict=True)
        ]

    def restart(self, row: int) -> None:
        self.length[row] = 0

    def _patches(self, *, num_steps: int) -> list[Patch]:
        if not self.prepacked:
            self.prepacked = make_prepacked_patches(self.model, self.head, num_steps=num_steps)
        patches = self.prepacked + cached_attention_patches(self.model)
        if self.routing is not None:
            patches += self.routing.routers.patches()
        return patches

    def _prefill(self, prompts: Mapping[int, tuple[int, ...]]) -> dict[int, Tensor]:
        """Hidden state of each row's last token. Empty rows with equal prompts share a prefill."""
        first: dict[tuple[int, ...], int] = {}
        sources = {
            row: row if self.length[row] else first.setdefault(ids, row)
            for row, ids in prompts.items()
        }
        unique = [row for row, source in sources.items() if row == source]
        by_length = sorted(unique, key=lambda row: (-len(prompts[row]), row))
        if not any(self.length):  # nothing is cached, so that order costs nothing
            self.order = by_length + [row for row in self.order if row not in set(by_length)]
        num_shared = self._share_prefix({row: prompts[row] for row in by_length})
        suffixes = {row: prompts[row][num_shared.get(row, 0) :] for row in by_length}
        hidden: dict[int, Tensor] = {}
        for rows in split_prefill(
            [len(suffixes[row]) for row in by_length], by_length, default_pass_tokens(self.device)
        ):
            lengths = [len(suffixes[row]) for row in rows]
            ids_BN = pad_right([suffixes[row] for row in rows], 0, self.device)
            hidden_BND = self._forward(ids_BN, rows, lengths)
            for row, length, hidden_ND in zip(rows, lengths, hidden_BND, strict=True):
                hidden[row] = hidden_ND[length - 1]
        index_of = {row: index for index, row in enumerate(self.order)}
        for row, source in sources.items():
            if row != source:
                for buffer in self.row_buffers:
                    buffer.copy_row(index_of[source], index_of[row], len(prompts[row]))
                self.length[row], hidden[row] = len(prompts[row]), hidden[source]
        return hidden

    def _share_prefix(self, prompts: Mapping[int, tuple[int, ...]]) -> dict[int, int]:
        """Prefill what the prompts of all empty rows begin with, once; its length by row."""
        rows = [row for row in prompts if not self.length[row]]
        if len(rows) < 2:
            return {}
        ids = [prompts[row] for row in rows]
        num_shared = min(common_length(min(ids), max(ids)), min(map(len, ids)) - 1)
        if num_shared < MIN_PREFIX_TOKENS or num_shared * (len(rows) - 1) < MIN_SAVED_TOKENS:
            return {}
        self._forward(pad_right([ids[0][:num_shared]], 0, self.device), rows[:1])
        source, *targets = (self.order.index(row) for row in rows)
        for buffer in self.row_buffers:
            for target in targets:
                buffer.copy_row(source, target, num_shared)
        for row in rows:
            self.length[row] = num_shared
        return dict.fromkeys(rows, num_shared)

    def _forward(
        self,
        ids_BN: Tensor,
        rows: Sequence[int],
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Hidden states of new tokens of `rows`. `lengths`: new tokens of each row without padding;
        None: all of them."""
        num_new = ids_BN.shape[1]
        index_of = {row: index for index, row in enumerate(self.order)}
        indices = [index_of[row] for row in rows]
        self.index_B = torch.tensor(indices, device=self.device)
        neighbors = slice(indices[0], indices[0] + len(rows))
        are_neighbors = indices == list(range(neighbors.start, neighbors.stop))
        self.buffer_rows = neighbors if are_neighbors else self.index_B
        self.position_BN, self.width = new_positions(
            [self.length[row] for row in rows], num_new,
            capacity=self.num_positions, device=self.device,
        )  # fmt: skip
        recording: AbstractContextManager[PassRouting | None] = nullcontext()
        if self.routing is not None:
            recording = self.routing.routers.record()
        with recording as pass_routing:
            out = self.model.base_model(
                input_ids=ids_BN,
                attention_mask=cache_mask(self.model, self.position_BN, self.width),
                position_ids=self.position_BN,
                past_key_values=self.cache,
                use_cache=True,
            )
        if self.routing is not None and pass_routing is not None:
            self.routing.write(self.index_B, self.position_BN, pass_routing)
        for row, num in zip(rows, lengths or [num_new] * len(rows), strict=True):
            self.length[row] += num
        hidden_BND: Tensor = out.last_hidden_state
        return hidden_BND

    def _grow(self, num_positions: int) -> None:
        if num_positions > self.capacity:
            # By at least half: many small growths would copy everything again and again.
            self.capacity = max(num_positions, self.capacity * 3 // 2, self.row_capacity)
            for buffer in self.row_buffers:
                buffer.grow(self.capacity)
        if num_positions > self.num_positions:
            for layer in self.cache.layers:
                layer.clear(self.num_positions, num_positions)
            self.num_positions = num_positions

    def _move_to_front(self, rows: Sequence[int]) -> list[int]:
        """Swap `rows` to the first indices; returns them in the order of the buffers."""
        wanted_rows, count = set(rows), len(rows)
        inside = [i for i in range(count) if self.order[i] not in wanted_rows]
        outside = [i for i in range(count, len(self.order)) if self.order[i] in wanted_rows]
        for index, other in zip(inside, outside, strict=True):
            num_positions = max(self.length[self.order[i]] for i in (index, other))
            for buffer in self.row_buffers:
                buffer.swap_rows(index, other, num_positions)
            self.order[index], self.order[other] = self.order[other], self.order[index]
        return self.order[:count]
