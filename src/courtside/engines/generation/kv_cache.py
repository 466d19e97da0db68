"""KV cache preallocated at fixed addresses, as CUDA graphs require, and the two steps over it.

Buffers and graphs belong to the engine and serve one session at a time: a session of a shape that
an earlier one had starts without allocating or capturing anything.

A decode step is everything for one token of every row: model, LM head, sampling, and the sampled
token as the next step's input. Rows count their own tokens and stop by themselves, so they may
start at any time. Shapes and addresses never change. On a CPU steps run eagerly, for tests.
"""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from courtside.engines.base import Sampling
from courtside.engines.forward.state_passes import StatePasses
from courtside.engines.generation.cache_layers import (
    KVLayer,
    StateLayer,
    copy_rows_where,
    make_static_cache,
)
from courtside.engines.generation.cuda_graphs import CudaGraphs, StepGraph
from courtside.engines.generation.sampler import sample_from_hidden, stack_uniforms
from courtside.engines.lm_head import LMHead
from courtside.engines.patches.attention import (
    DECODE_ATTENTION,
    RowLengths,
    cache_mask,
    cached_attention_patches,
    decode_rows,
)
from courtside.engines.patches.patch import Patch, apply_patches, patch_attention
from courtside.engines.routing import Routers, RowRouting
from courtside.engines.row_states import SlotKind, find_slots

ROW_STEP = 8
POSITION_STEP = 128
"""Shapes are rounded up to multiples of these, so that batches of similar size share a graph."""
MAX_CACHED_GRAPHS = 8
"""Of each kind per KV cache; also KV caches per pool."""
MAX_IDLE_CACHE_BYTES = 2**30
"""Larger buffers are freed when no session uses them: the memory is worth more to an update than
the tenth of a second in which buffers, graphs and shadow weights are made again."""
ROUTING_BUFFER = -1
"""Index of the buffer for experts among those of the layers."""
STEPS_PER_SYNC = 4
"""Decode steps between checks for finished rows: a check waits for the GPU."""


class KVCache:
    """Keys and values of `num_rows` rows of `row_capacity` positions, and the steps over them."""

    def __init__(self, pool: KVCachePool, num_rows: int, row_capacity: int):
        self._pool, self.dtype = weakref.proxy(pool), pool.dtype
        self.num_rows, self.row_capacity = num_rows, row_capacity
        device = pool.model.device
        self.length_B = torch.zeros(num_rows, dtype=torch.long, device=device)
        """Cached tokens of each row."""
        self.prefix_row_B = torch.arange(num_rows, device=device)
        self.prefix_length_B = torch.zeros_like(self.prefix_row_B)
        """A row with the same first tokens, and their number."""
        self.row_B = torch.arange(num_rows, device=device)
        self.prefill_target: tuple[Tensor | None, Tensor, int] | None = None
        """During prefill: rows (None: all), positions of their tokens, attention width."""
        self.prefill_patches = cached_attention_patches(pool.model)
        self.passes = pool.passes
        if pool.passes is None:
            num_layers = pool.model.config.get_text_config().num_hidden_layers
            self.hf_cache = Cache(layers=[KVLayer(self, i) for i in range(num_layers)])
        else:
            self.hf_cache = make_static_cache(self, pool.passes)
        self.routing: RowRouting | None = None
        """Experts of what is cached, from the first call on that asks for them."""
        self.decode_steps: OrderedDict[Any, DecodeStep] = OrderedDict()
        self.prefill_steps: OrderedDict[Any, PrefillStep] = OrderedDict()
        self.num_prefills: Counter[Any] = Counter()
        """By the key that their step has or would have."""

    def prefill(
        self, row_B: Tensor | None, ids_BN: Tensor, position_BN: Tensor, width: int
    ) -> Tensor:
        """Last hidden states [B, N, D] of new tokens of rows (None: all of them), whose keys and
        values are cached at these positions. They attend to the first `width` positions at most."""
        model = self._pool.model
        self.prefill_target = row_B, position_BN, width
        index_B = self.row_B if row_B is None else row_B
        try:
            with (
                apply_patches(self.prefill_patches),
                record_rows(self.routing, index_B, position_BN),
            ):
                out = model.base_model(
                    input_ids=ids_BN,
                    attention_mask=cache_mask(model, position_BN, width),
                    position_ids=position_BN,
                    past_key_values=self.hf_cache,
                    use_cache=True,
                )
        finally:
            self.prefill_target = None
        hidden_BND: Tensor = out.last_hidden_state
        return hidden_BND

    def start_recording(self, routers: Routers) -> None:
        """Record the experts of what is cached from now on."""
        if self.routing is None:
            shape = (self.num_rows, self.row_capacity, *routers.shape)
            buffer = self._pool.buffer(self, ROUTING_BUFFER, prod(shape), routers.dtype)
            self.routing = RowRouting(routers, buffer.view(shape))

    def allocate(self, index: int, states: Tensor, dtype: torch.dtype) -> Tensor:
        """For keys or values such as `states`."""
        _, num_heads, _, size = states.shape
        return self.allocate_shape(index, (num_heads, self.row_capacity, size), dtype)

    def allocate_shape(self, index: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """For each row a tensor of that shape."""
        rows = (self.num_rows, *shape)
        buffer: Tensor = self._pool.buffer(self, index, prod(rows), dtype)
        return buffer.view(rows)


class KVCachePool:
    """The engine's KV cache memory, for one session at a time."""

    def __init__(
        self,
        model: Any,
        dtype: torch.dtype | None,
        *,
        graphs: CudaGraphs | None,
        passes: StatePasses | None = None,
        release_weights: Callable[[], None] = lambda: None,
        max_idle_bytes: int = MAX_IDLE_CACHE_BYTES,
    ):
        """`passes`: of a model with recurrent states. `release_weights`: called when idle buffers
        are freed, as only sampling uses both."""
        self.model, self.dtype, self.graphs, self.passes = model, dtype, graphs, passes
        self.release_weights, self.max_idle_bytes = release_weights, max_idle_bytes
        self._buffers: dict[int, Tensor] = {}
        self._caches: OrderedDict[tuple[int, int], KVCache] = OrderedDict()
        self._session: Callable[[], object | None] = lambda: None

    def claim(self, session: object) -> KVCachePool:
        """The pool that the session is to use: this one, or a new one while this one is in use."""
        if self._session() is not None:
            pool = KVCachePool(self.model, self.dtype, graphs=self.graphs, passes=self.passes)
            return pool.claim(session)
        self._session = weakref.ref(session)
        weakref.finalize(session, self._free_if_large).atexit = False
        return self

    def acquire(self, num_rows: int, row_capacity: int) -> KVCache:
        """A KV cache of at least that size. It uses the memory of those acquired before."""
        shape = (round_up(num_rows, ROW_STEP), round_up(row_capacity, POSITION_STEP))
        if shape not in self._caches:
            self._caches[shape] = KVCache(self, *shape)
        self._caches.move_to_end(shape)
        while len(self._caches) > MAX_CACHED_GRAPHS:
            self._caches.popitem(last=False)
        return self._caches[shape]

    def _free_if_large(self) -> None:
        if sum(buffer.nbytes for buffer in self._buffers.values()) > self.max_idle_bytes:
            self._caches.clear()
            self._buffers.clear()
            self.release_weights()

    def buffer(self, cache: KVCache, index: int, size: int, dtype: torch.dtype) -> Tensor:
        """Memory that all KV caches share. Where it is too small, the other caches are dropped."""
        buffer = self._buffers.get(index)
        if buffer is None or len(buffer) < size or buffer.dtype != dtype:
            self._caches = OrderedDict((k, v) for k, v in self._caches.items() if v is cache)
            del buffer
            self._buffers.pop(index, None)
            # Zeros, not empty: a masked position is multiplied by 0, and 0 · NaN is NaN.
            self._buffers[index] = torch.zeros(size, dtype=dtype, device=self.model.device)
        return self._buffers[index][:size]


def record_rows(
    routing: RowRouting | None, index_B: Tensor, position_BN: Tensor
) -> AbstractContextManager[None]:
    return nullcontext() if routing is None else routing.record(index_B, position_BN)


def round_up(number: int, step: int) -> int:
    return -(-number // step) * step


# ── steps ────────────────────────────────────────────────────────────────────────────────────────


class RowDecoder:
    """The forward pass of a decode step: one new token of every row.

    It has not the KV cache itself, which holds its steps: a cycle would outlive both until the
    garbage collector runs.
    """

    def __init__(self, model: Any, cache: KVCache):
        self.model, self.passes = model, cache.passes
        self.hf_cache, self.length_B = cache.hf_cache, cache.length_B
        self.routing, self.row_B = cache.routing, cache.row_B
        self.prefix_row_B, self.prefix_length_B = cache.prefix_row_B, cache.prefix_length_B
        # Of four dimensions, which keeps models from making one: decode attention masks by length.
        self._mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=cache.length_B.device)
        self._state_layers = [x for x in cache.hf_cache.layers if isinstance(x, StateLayer)]

    def forward(self, ids_B1: Tensor, active_B: Tensor) -> Tensor:
        """Last hidden states [B, D]. The states of rows that are not active stay as they are; what
        these rows append to the KV cache is not in their length."""
        position_B1 = self.length_B[:, None]
        arguments: dict[str, Any] = {"attention_mask": self._mask, "position_ids": position_B1}
        cache_argument, patches = "past_key_values", list[Patch]()
        if self.passes is not None:
            cache_argument = self.passes.cache_argument
            patches += self.passes.patches
            if not self.passes.takes_positions:
                del arguments["position_ids"]
        if self.passes is None or self.passes.layout.has_kv:
            patches.append(patch_attention(self.model, DECODE_ATTENTION))
        else:
            del arguments["attention_mask"]
        rows = RowLengths(
            length_B=self.length_B + 1,
            prefix_row_B=self.prefix_row_B,
            prefix_length_B=self.prefix_length_B,
        )
        in_place = self.passes is not None and self.passes.advances_in_place
        advanced = [*self.states("conv"), *(self.states("recurrent") if in_place else ())]
        earlier = [state.clone() for state in advanced]
        for layer in self._state_layers:
            layer.active_B = active_B
        with (
            record_rows(self.routing, self.row_B, position_B1),
            apply_patches(patches),
            decode_rows(rows),
        ):
            out = self.model.base_model(
                input_ids=ids_B1, use_cache=True, **arguments, **{cache_argument: self.hf_cache}
            )
        for state, before in zip(advanced, earlier, strict=True):
            copy_rows_where(~active_B, before, state)
        hidden_BD: Tensor = out.last_hidden_state[:, -1]
        return hidden_BD

    def states(self, kind: SlotKind) -> list[Tensor]:
        """Recurrent or convolution states of all rows, by layer."""
        if not self._state_layers:
            return []
        return [slot.tensor for slot in find_slots(self.hf_cache) if slot.kind == kind]


class DecodeStep:
    """One token of every row of a KV cache, with the buffers of their outputs."""

    def __init__(
        self,
        model: Any,
        head: LMHead,
        cache: KVCache,
        sampling: Sampling,
        eos: Sequence[int],
        graphs: CudaGraphs | None = None,
    ):
        self.head, self.sampling = head, sampling
        self.decoder = RowDecoder(model, cache)
        self.length_B = cache.length_B
        self.device = cache.length_B.device
        B, N = cache.num_rows, sampling.max_new_tokens
        self.ids_B1 = self._zeros(B, 1)
        self.count_B = self._zeros(B)
        """Tokens that each row has sampled."""
        self.active_B = self._zeros(B, dtype=torch.bool)
        # One column more than tokens: inactive rows write there.
        self.uniform_BN = self._zeros(B, N + 1, dtype=torch.float64)
        self.sampled_BN = self._zeros(B, N + 1)
        self.logp_BN = self._zeros(B, N + 1, dtype=torch.float32)
        self.eos_E = torch.tensor(sorted(eos), device=self.device)
        self._state = [
            self.ids_B1, self.length_B, self.count_B, self.active_B, self.sampled_BN, self.logp_BN,
            *self.decoder.states("conv"), *self.decoder.states("recurrent"),
        ]  # fmt: skip
        """What a step advances."""
        self._graph = StepGraph(graphs)

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.long) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self.device)

    def start(self, rows: Sequence[int], hidden_BD: Tensor, seeds: Sequence[int]) -> None:
        """Sample the first token of rows after prefill, from their last hidden states."""
        N = self.sampling.max_new_tokens
        row_B = torch.tensor(rows, device=self.device)
        uniform_BN = stack_uniforms(seeds, N, self.device)
        ids_B, logp_B = sample_from_hidden(self.head, hidden_BD, uniform_BN[:, 0], self.sampling)
        self.uniform_BN[row_B, :N] = uniform_BN
        self.sampled_BN[row_B, 0] = ids_B
        self.logp_BN[row_B, 0] = logp_B.float()
        self.ids_B1[row_B, 0] = ids_B
        self.count_B[row_B] = 1
        self.active_B[row_B] = ~self._is_eos(ids_B) if N > 1 else False

    def stop(self, rows: Sequence[int] | None = None) -> None:
        """Deactivate rows; None: all of them."""
        if rows is None:
            self.active_B.zero_()
        elif rows:
            self.active_B[torch.tensor(rows, device=self.device)] = False

    def run(self, num_steps: int = STEPS_PER_SYNC) -> list[bool]:
        """A few tokens for every active row; returns which rows are still active."""
        for _ in range(num_steps):
            self._graph.run(self._step, self._state)
        is_active: list[bool] = self.active_B.tolist()
        return is_active

    def outputs(self, rows: Sequence[int]) -> list[tuple[list[int], list[float]]]:
        """Token ids and log-probs of each row so far."""
        if not rows:
            return []
        row_B = torch.tensor(rows, device=self.device)
        counts = self.count_B[row_B].tolist()
        longest = max(counts)
        ids = self.sampled_BN[row_B, :longest].tolist()
        logps = self.logp_BN[row_B, :longest].tolist()
        return [(i[:n], p[:n]) for i, p, n in zip(ids, logps, counts, strict=True)]

    def _is_eos(self, ids_B: Tensor) -> Tensor:
        return (ids_B[:, None] == self.eos_E).any(-1)

    def _step(self) -> None:
        hidden_BD = self.decoder.forward(self.ids_B1, self.active_B)
        uniform_B = self.uniform_BN.gather(1, self.count_B[:, None])[:, 0]
        ids_B, logp_B = sample_from_hidden(self.head, hidden_BD, uniform_B, self.sampling)
        last = self.sampling.max_new_tokens
        column_B1 = torch.where(self.active_B, self.count_B, last)[:, None]
        self.sampled_BN.scatter_(1, column_B1, ids_B[:, None])
        self.logp_BN.scatter_(1, column_B1, logp_B[:, None].float())
        self.ids_B1.copy_(torch.where(self.active_B, ids_B, self.ids_B1[:, 0])[:, None])
        self.length_B.add_(self.active_B)
        self.count_B.add_(self.active_B)
        self.active_B.logical_and_(~self._is_eos(ids_B) & (self.count_B < last))


class PrefillStep:
    """Prefill of up to `num_tokens` tokens per row. All rows of the KV cache take part, so that the
    shape stays: rows without a prompt write to their last position only, which must be free."""

    def __init__(
        self, cache: KVCache, *, num_tokens: int, width: int, graphs: CudaGraphs | None = None
    ):
        """`width`: cached positions that tokens attend to at most."""
        self.num_tokens, self.width = num_tokens, width
        shape, device = (cache.num_rows, 2 + num_tokens), cache.length_B.device
        self.inputs_RT = torch.zeros(shape, dtype=torch.long, device=device)
        """Of each row: its cached length, the index of its last new token, and the new tokens."""
        self.hidden_RD: Tensor | None = None
        self._graph = StepGraph(graphs)

    def make_inputs(
        self, cache: KVCache, prompts: Mapping[int, Sequence[int]], lengths: Sequence[int]
    ) -> list[list[int]]:
        """What `run` takes, on the host. `lengths`: cached tokens of every row."""
        table = [[cache.row_capacity - 1, 0, *(0,) * self.num_tokens]] * cache.num_rows
        for row, ids in prompts.items():
            padding = (0,) * (self.num_tokens - len(ids))
            table[row] = [lengths[row], len(ids) - 1, *ids, *padding]
        return table

    def run(self, cache: KVCache, inputs_RT: Tensor) -> Tensor:
        """Hidden states [rows, D] of the last new token of each row with a prompt."""
        self.inputs_RT.copy_(inputs_RT)
        self._graph.run(lambda: self._step(cache))
        assert self.hidden_RD is not None
        return self.hidden_RD.clone()

    def _step(self, cache: KVCache) -> None:
        length_R1, last_R1, ids_RN = self.inputs_RT.split([1, 1, self.num_tokens], dim=1)
        ahead_N = torch.arange(self.num_tokens, device=ids_RN.device)
        position_RN = (length_R1 + ahead_N).clamp(max=cache.row_capacity - 1)
        hidden_RND = cache.prefill(None, ids_RN, position_RN, self.width)
        last_R1D = last_R1[:, :, None].expand(-1, -1, hidden_RND.shape[-1])
        hidden_RD = hidden_RND.gather(1, last_R1D)[:, 0]
        if self.hidden_RD is None:
            self.hidden_RD = torch.empty_like(hidden_RD)
        self.hidden_RD.copy_(hidden_RD)
