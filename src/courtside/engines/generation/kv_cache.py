"""KV cache preallocated at fixed addresses, as CUDA graphs require.

Buffers and graphs belong to the engine and serve one session at a time: a session of a shape that
an earlier one had starts without allocating or capturing anything.
"""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from courtside.engines.generation.cuda_graphs import CudaGraphs
from courtside.engines.generation.steps import DecodeStep, PrefillStep
from courtside.engines.patches.attention import cache_mask
from courtside.engines.patches.layer_ops import append_kv

ROW_STEP = 8
POSITION_STEP = 128
"""Shapes are rounded up to multiples of these, so that batches of similar size share a graph."""
MAX_CACHED_GRAPHS = 8
"""Of each kind per KV cache; also KV caches per pool."""
MAX_IDLE_CACHE_BYTES = 2**30
"""Larger buffers are freed when no session uses them: the memory is worth more to an update than
the tenth of a second in which buffers, graphs and shadow weights are made again."""


class _Layer(DynamicLayer):  # type: ignore[misc]
    """Keys and values [rows, KV heads, capacity, D] of one layer."""

    is_initialized: bool

    def __init__(self, cache: KVCache, index: int):
        super().__init__()
        # Weak: a cycle would leave buffers and graphs to the garbage collector.
        self.cache, self.index = weakref.proxy(cache), index

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        cache = self.cache
        self._allocate(key_states, value_states)
        if cache.prefill_target is None:
            append_kv(self.keys, self.values, key_states, value_states, cache.length_B)
            return self.keys, self.values
        row_B, position_BN, width = cache.prefill_target
        index_B1 = (cache.row_B if row_B is None else row_B)[:, None]
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            buffer[index_B1, :, position_BN] = states.to(self.dtype).transpose(1, 2)
        keys, values = self.keys[:, :, :width], self.values[:, :, :width]
        return (keys, values) if row_B is None else (keys[row_B], values[row_B])

    def _allocate(self, keys: Tensor, values: Tensor) -> None:
        if not self.is_initialized:
            self.dtype, self.device = self.cache.dtype or keys.dtype, keys.device
            self.keys = self.cache.allocate(2 * self.index, keys, self.dtype)
            self.values = self.cache.allocate(2 * self.index + 1, values, self.dtype)
            self.is_initialized = True

    def copy_rows(self, source_B: Tensor, target_B: Tensor, num_positions: int) -> None:
        for buffer in (self.keys, self.values):
            buffer[target_B, :, :num_positions] = buffer[source_B, :, :num_positions]

    def load(self, keys: Tensor, values: Tensor) -> None:
        """Copy rows from a smaller KV cache."""
        self._allocate(keys, values)
        for buffer, states in ((self.keys, keys), (self.values, values)):
            buffer[: states.shape[0], :, : states.shape[2]] = states


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
        num_layers = pool.model.config.get_text_config().num_hidden_layers
        self.hf_cache = Cache(layers=[_Layer(self, i) for i in range(num_layers)])
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
        try:
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

    def allocate(self, index: int, states: Tensor, dtype: torch.dtype) -> Tensor:
        shape = (self.num_rows, states.shape[1], self.row_capacity, states.shape[3])
        buffer: Tensor = self._pool.buffer(self, index, prod(shape), dtype)
        return buffer.view(shape)


class KVCachePool:
    """The engine's KV cache memory, for one session at a time."""

    def __init__(
        self,
        model: Any,
        dtype: torch.dtype | None,
        *,
        graphs: CudaGraphs | None,
        release_weights: Callable[[], None] = lambda: None,
        max_idle_bytes: int = MAX_IDLE_CACHE_BYTES,
    ):
        """`release_weights`: called when idle buffers are freed, as only sampling uses both."""
        self.model, self.dtype, self.graphs = model, dtype, graphs
        self.release_weights, self.max_idle_bytes = release_weights, max_idle_bytes
        self._buffers: dict[int, Tensor] = {}
        self._caches: OrderedDict[tuple[int, int], KVCache] = OrderedDict()
        self._session: Callable[[], object | None] = lambda: None

    def claim(self, session: object) -> KVCachePool:
        """The pool that the session is to use: this one, or a new one while this one is in use."""
        if self._session() is not None:
            return KVCachePool(self.model, self.dtype, graphs=self.graphs).claim(session)
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
            if self.graphs is not None:
                self.graphs.renew()
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


def round_up(number: int, step: int) -> int:
    return -(-number // step) * step
