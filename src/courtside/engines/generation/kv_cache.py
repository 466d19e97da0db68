"""Room for the keys and values of rows, at addresses that stay: graphs write there.

Room and graphs are the engine's and lent to one session at a time; a session of a shape that was
seen before starts without making either.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from courtside.engines.generation.cuda_graphs import DecodeStep, PrefillStep
from courtside.engines.patches.layer_ops import append_kv

ROW_STEP = 8
POSITION_STEP = 128
"""Shapes are rounded up to these, so that batches of about one size share a graph."""
MAX_CACHED_GRAPHS = 8
"""Graphs kept; they share their working memory."""
MAX_IDLE_CACHE_BYTES = 2**30
"""Room up to this stays when no session holds it. More is worth more to an update than the tenth of
a second in which room, graphs and copies of weights are made again."""


class _SlotLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values [rows, heads, places, size] of one layer, at an address that stays."""

    is_initialized: bool

    def __init__(self, slots: KVCache, index: int):
        super().__init__()
        self.slots, self.index = slots, index

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        slots = self.slots
        self._prepare(key_states, value_states)
        if slots.reading is None:
            append_kv(self.keys, self.values, key_states, value_states, slots.length_B)
            return self.keys, self.values
        row_B, position_BN, width = slots.reading
        where_B = slots.row_B if row_B is None else row_B
        new = key_states.to(self.dtype), value_states.to(self.dtype)
        for room, states in zip((self.keys, self.values), new, strict=True):
            room[where_B[:, None], :, position_BN] = states.transpose(1, 2)
        keys, values = self.keys[:, :, :width], self.values[:, :, :width]
        return (keys, values) if row_B is None else (keys[row_B], values[row_B])

    def _prepare(self, keys: Tensor, values: Tensor) -> None:
        if not self.is_initialized:
            self.dtype, self.device = self.slots.dtype or keys.dtype, keys.device
            self.keys = self.slots.room(2 * self.index, keys, self.dtype)
            self.values = self.slots.room(2 * self.index + 1, values, self.dtype)
            self.is_initialized = True

    def copy(self, source_B: Tensor, to_B: Tensor, row_capacity: int) -> None:
        for room in (self.keys, self.values):
            room[to_B, :, :row_capacity] = room[source_B, :, :row_capacity]

    def take(self, keys: Tensor, values: Tensor) -> None:
        """What rows have elsewhere."""
        self._prepare(keys, values)
        for room, theirs in ((self.keys, keys), (self.values, values)):
            room[: theirs.shape[0], :, : theirs.shape[2]] = theirs


class KVCache:
    """Room for the keys and values of `num_rows` rows, and the graphs that write into it."""

    def __init__(self, pool: KVCachePool, num_rows: int, row_capacity: int):
        self.pool, self.dtype = pool, pool.dtype
        self.num_rows, self.row_capacity = num_rows, row_capacity
        device = pool.model.device
        self.length_B = torch.zeros(num_rows, dtype=torch.long, device=device)
        """Ids in each row's keys and values."""
        self.prefix_row_B = torch.arange(num_rows, device=device)
        self.prefix_length_B = torch.zeros_like(self.prefix_row_B)
        """For each row one that has the same in its first places, and how many those are."""
        self.row_B = torch.arange(num_rows, device=device)
        self.reading: tuple[Tensor | None, Tensor, int] | None = None
        """While rows read: which (None: all), at what positions, and how far they look back."""
        num_layers = pool.model.config.get_text_config().num_hidden_layers
        self.cache = Cache(layers=[_SlotLayer(self, i) for i in range(num_layers)])
        self.decoders: OrderedDict[Any, DecodeStep] = OrderedDict()
        self.readers: OrderedDict[Any, PrefillStep] = OrderedDict()

    @contextmanager
    def read(self, row_B: Tensor | None, position_BN: Tensor, width: int) -> Iterator[None]:
        """Passes in here put keys and values at these positions."""
        self.reading = row_B, position_BN, width
        try:
            yield
        finally:
            self.reading = None

    def close(self) -> None:
        """Let go of room and graphs at once: layers and slots hold on to each other."""
        self.decoders.clear()
        self.readers.clear()
        self.cache.layers.clear()

    def room(self, index: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        shape = (self.num_rows, like.shape[1], self.row_capacity, like.shape[3])
        return self.pool.store(self, index, prod(shape), dtype).view(shape)


class KVCachePool:
    """The engine's memory for keys and values, lent to one session at a time."""

    def __init__(
        self,
        model: Any,
        dtype: torch.dtype | None,
        release_weights: Callable[[], None] = lambda: None,
    ):
        """`let_go`: called where room is given back, of what else only sampling needs."""
        self.model, self.dtype, self.release_weights = model, dtype, release_weights
        self._stores: dict[int, Tensor] = {}
        self._slots: OrderedDict[tuple[int, int], KVCache] = OrderedDict()
        self._holder: Callable[[], object | None] = lambda: None
        self.graph_pool = self._new_graph_pool()
        self.reads_eagerly = False

    def lend(self, session: object, num_rows: int, row_capacity: int) -> KVCache:
        """Slots of at least that size. A session that still holds the pool keeps its room: another
        one gets memory of its own."""
        if self._holder() not in (None, session):
            return KVCachePool(self.model, self.dtype).lend(session, num_rows, row_capacity)
        if self._holder() is None:
            weakref.finalize(session, self._rest).atexit = False
        self._holder = weakref.ref(session)
        shape = (round_up(num_rows, ROW_STEP), round_up(row_capacity, POSITION_STEP))
        if shape not in self._slots:
            self._slots[shape] = KVCache(self, *shape)
        self._slots.move_to_end(shape)
        while len(self._slots) > MAX_CACHED_GRAPHS:
            self._slots.popitem(last=False)
        return self._slots[shape]

    def _rest(self) -> None:
        """Nobody samples now."""
        if sum(store.nbytes for store in self._stores.values()) > MAX_IDLE_CACHE_BYTES:
            for slots in self._slots.values():
                slots.close()
            self._slots.clear()
            self._stores.clear()
            self.graph_pool = self._new_graph_pool()  # one that no graph uses is gone for good
            self.release_weights()

    def _new_graph_pool(self) -> Any:
        return torch.cuda.graph_pool_handle() if self.model.device.type == "cuda" else None

    def store(self, asking: KVCache, index: int, size: int, dtype: torch.dtype) -> Tensor:
        """All shapes lie in the same memory; when it is too small, those that lay there go."""
        there = self._stores.get(index)
        if there is None or len(there) < size or there.dtype != dtype:
            self._slots = OrderedDict((k, v) for k, v in self._slots.items() if v is asking)
            self._stores.pop(index, None)
            del there
            # Zeros, not empty: a masked place is multiplied by 0, and 0 · NaN is NaN.
            self._stores[index] = torch.zeros(size, dtype=dtype, device=self.model.device)
        return self._stores[index][:size]


def round_up(number: int, step: int) -> int:
    return -(-number // step) * step
