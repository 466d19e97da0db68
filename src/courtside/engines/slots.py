"""Conversations on a GPU: each row has a slot in room for keys and values, and never moves.

Rows read several at a time, and write together, by a replayed graph (`graphs.py`); so do they read
where that is short. Rows
that have ended idle along at next to no cost, or make way for requests that wait. Room and graphs
are the engine's: a session of a shape that was seen before starts without either.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from courtside.engines.base import Head, SampleRequest, Sampling
from courtside.engines.batching import pad_right, pass_tokens
from courtside.engines.branches import as_taken
from courtside.engines.drawn import Drawn
from courtside.engines.graphs import Decoder, Reader
from courtside.engines.layer_parts import append
from courtside.engines.lent import LentWeights
from courtside.engines.session import portions
from courtside.types import Sample

ROW_STEP = 8
PLACE_STEP = 128
"""Shapes are rounded up to these, so that batches of about one size share a graph."""
KEPT = 8
"""Graphs kept; they share their working memory."""
KEPT_BYTES = 2**30
"""Room up to this stays when no session holds it. More is worth more to an update than the tenth of
a second in which room and graphs are made again."""
READ_STEP = 32
MOST_READ = 8192
MOST_LOOKED_AT = 2**17
"""Tokens of a replayed reading, and places that they look at: more keep a GPU busy without."""
REFILL = 8
"""Waiting requests begin once 1/8 of the rows is free: reading for a few costs as for many."""


class _SlotLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values [rows, heads, places, size] of one layer, at an address that stays."""

    is_initialized: bool

    def __init__(self, slots: Slots, index: int):
        super().__init__()
        self.slots, self.index = slots, index

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        slots = self.slots
        self._prepare(key_states, value_states)
        if slots.reading is None:
            append(self.keys, self.values, key_states, value_states, slots.length_B)
            return self.keys, self.values
        row_B, position_BN, width = slots.reading
        every = row_B is None
        new = key_states.to(self.dtype), value_states.to(self.dtype)
        for room, states in zip((self.keys, self.values), new, strict=True):
            where_B = slots.row_B if every else row_B
            room[where_B[:, None], :, position_BN] = states.transpose(1, 2)
        keys, values = self.keys[:, :, :width], self.values[:, :, :width]
        return (keys, values) if every else (keys[row_B], values[row_B])

    def _prepare(self, keys: Tensor, values: Tensor) -> None:
        if not self.is_initialized:
            self.dtype, self.device = self.slots.dtype or keys.dtype, keys.device
            self.keys = self.slots.room(2 * self.index, keys, self.dtype)
            self.values = self.slots.room(2 * self.index + 1, values, self.dtype)
            self.is_initialized = True

    def copy(self, source_B: Tensor, to_B: Tensor, num_places: int) -> None:
        for room in (self.keys, self.values):
            room[to_B, :, :num_places] = room[source_B, :, :num_places]

    def take(self, keys: Tensor, values: Tensor) -> None:
        """What rows have elsewhere."""
        self._prepare(keys, values)
        for room, theirs in ((self.keys, keys), (self.values, values)):
            room[: theirs.shape[0], :, : theirs.shape[2]] = theirs


class Slots:
    """Room for the keys and values of `num_rows` rows, and the graphs that write into it."""

    def __init__(self, pool: RoomPool, num_rows: int, num_places: int):
        self.pool, self.dtype = pool, pool.dtype
        self.num_rows, self.num_places = num_rows, num_places
        device = pool.model.device
        self.length_B = torch.zeros(num_rows, dtype=torch.long, device=device)
        """Ids in each row's keys and values."""
        self.row_B = torch.arange(num_rows, device=device)
        self.reading: tuple[Tensor | None, Tensor, int] | None = None
        """While rows read: which (None: all), at what positions, and how far they look back."""
        num_layers = pool.model.config.get_text_config().num_hidden_layers
        self.cache = Cache(layers=[_SlotLayer(self, i) for i in range(num_layers)])
        self.decoders: OrderedDict[Any, Decoder] = OrderedDict()
        self.readers: OrderedDict[Any, Reader] = OrderedDict()

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
        shape = (self.num_rows, like.shape[1], self.num_places, like.shape[3])
        return self.pool.store(self, index, prod(shape), dtype).view(shape)


class RoomPool:
    """The engine's memory for keys and values, lent to one session at a time."""

    def __init__(self, model: Any, dtype: torch.dtype | None):
        self.model, self.dtype = model, dtype
        self._stores: dict[int, Tensor] = {}
        self._slots: OrderedDict[tuple[int, int], Slots] = OrderedDict()
        self._holder: Callable[[], object | None] = lambda: None
        self.graph_pool = self._new_graph_pool()

    def lend(self, session: object, num_rows: int, num_places: int) -> Slots:
        """Slots of at least that size. A session that still holds the pool keeps its room: another
        one gets memory of its own."""
        if self._holder() not in (None, session):
            return RoomPool(self.model, self.dtype).lend(session, num_rows, num_places)
        if self._holder() is None:
            weakref.finalize(session, self._rest).atexit = False
        self._holder = weakref.ref(session)
        shape = (_up(num_rows, ROW_STEP), _up(num_places, PLACE_STEP))
        if shape not in self._slots:
            self._slots[shape] = Slots(self, *shape)
        self._slots.move_to_end(shape)
        while len(self._slots) > KEPT:
            self._slots.popitem(last=False)
        return self._slots[shape]

    def _rest(self) -> None:
        """Nobody samples now."""
        if sum(store.nbytes for store in self._stores.values()) > KEPT_BYTES:
            for slots in self._slots.values():
                slots.close()
            self._slots.clear()
            self._stores.clear()
            self.graph_pool = self._new_graph_pool()  # one that no graph uses is gone for good

    def _new_graph_pool(self) -> Any:
        return torch.cuda.graph_pool_handle() if self.model.device.type == "cuda" else None

    def store(self, asking: Slots, index: int, size: int, dtype: torch.dtype) -> Tensor:
        """All shapes lie in the same memory; when it is too small, those that lay there go."""
        there = self._stores.get(index)
        if there is None or len(there) < size or there.dtype != dtype:
            self._slots = OrderedDict((k, v) for k, v in self._slots.items() if v is asking)
            self._stores.pop(index, None)
            del there
            # Zeros, not empty: a masked place is multiplied by 0, and 0 · NaN is NaN.
            self._stores[index] = torch.zeros(size, dtype=dtype, device=self.model.device)
        return self._stores[index][:size]


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


class SlotSession:
    """Rows whose keys and values are kept: a turn costs its own tokens."""

    def __init__(
        self,
        model: Any,
        head: Head,
        *,
        pool: RoomPool,
        lent: LentWeights,
        num_rows: int,
        num_places: int,
        record: Callable[[int, Sampling], Drawn],
        casting: Callable[[], AbstractContextManager[Any]],
    ):
        self.model, self.head, self.pool, self.lent = model, head, pool, lent
        self.record, self.casting = record, casting
        self.num_rows = num_rows
        self.slots = pool.lend(self, num_rows, num_places)
        self.length = [0] * self.slots.num_rows
        self._begun: dict[int, tuple[tuple[int, ...], Tensor]] = {}
        """What each row read first and the hidden state behind it, for others that begin alike."""

    def sample(
        self, rows: Sequence[int], requests: Sequence[SampleRequest], sampling: Sampling
    ) -> list[Sample]:
        """Each row reads `prompt_ids` behind what it has, and writes.

        What it wrote last counts as read except its last token, which nobody has read yet: the next
        prompt must begin with that.
        """
        assert rows and len(set(rows)) == len(rows)
        asked = dict(zip(rows, range(len(rows)), strict=True))
        return self._serve(asked, deque(), requests, sampling)

    def sample_all(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Sample]:
        """Any number of requests, each from an empty row as soon as one is free."""
        first = dict(zip(range(self.num_rows), range(len(requests)), strict=False))
        waiting = deque(range(len(first), len(requests)))
        return self._serve(first, waiting, requests, sampling)

    @torch.no_grad()
    def _serve(
        self,
        asked: dict[int, int],
        waiting: deque[int],
        requests: Sequence[SampleRequest],
        sampling: Sampling,
    ) -> list[Sample]:
        """`asked`: the request of each row, by its number; `waiting`: those without a row yet."""
        record = self.record(len(requests), sampling)
        longest = max(
            self.length[row] + len(requests[number].prompt_ids) for row, number in asked.items()
        )
        later = max((len(requests[number].prompt_ids) for number in waiting), default=0)
        self._grow(max(longest, later) + sampling.max_new_tokens)
        # Rows that sit this out write where nothing is yet.
        self.slots.length_B.copy_(torch.tensor(self.length))
        with ExitStack() as passes:
            passes.enter_context(self.casting())
            self.lent.refresh()
            passes.enter_context(self.lent.used())
            decoder = self._decoder(sampling, record.eos)
            decoder.stop()  # an earlier batch may have been interrupted
            self._begin(decoder, asked, requests)
            at_work = dict(asked)
            free: list[int] = []
            while at_work:
                going = decoder.go()
                if sampling.stop:
                    going = self._stopped(decoder, at_work, record, going)
                ended = [row for row in at_work if not going[row]]
                if ended:
                    self._end(decoder, {row: at_work.pop(row) for row in ended}, record)
                    free += ended
                few = len(free) * REFILL < self.num_rows and at_work
                if waiting and not few:
                    count = min(len(free), len(waiting))
                    new = {free.pop(): waiting.popleft() for _ in range(count)}
                    for row in new:
                        self.length[row] = 0
                    self._begin(decoder, new, requests)
                    at_work |= new
        return record.samples()

    def _begin(
        self, decoder: Decoder, asked: Mapping[int, int], requests: Sequence[SampleRequest]
    ) -> None:
        hidden_BD = self._read({row: requests[n].prompt_ids for row, n in asked.items()})
        where_B = torch.tensor(list(asked), device=hidden_BD.device)
        length_B = torch.tensor([self.length[row] for row in asked], device=hidden_BD.device)
        self.slots.length_B[where_B] = length_B
        decoder.begin(list(asked), hidden_BD, [requests[n].seed for n in asked.values()])

    def _end(self, decoder: Decoder, ended: Mapping[int, int], record: Drawn) -> None:
        written = decoder.written(list(ended))
        for (row, number), (ids, logps) in zip(ended.items(), written, strict=True):
            record.extend(number, ids, logps)
            # The last token that counts has not been read.
            self.length[row] += len(record.ids[number]) - 1

    def _stopped(
        self, decoder: Decoder, at_work: Mapping[int, int], record: Drawn, going: list[bool]
    ) -> list[bool]:
        """Rows whose text has come to a stop string stop, too."""
        written = zip(at_work, decoder.written(list(at_work)), strict=True)
        stopped = [row for row, (ids, _) in written if going[row] and record.stops(ids)]
        if stopped:
            decoder.stop(stopped)
        return [is_going and row not in stopped for row, is_going in enumerate(going)]

    def _decoder(self, sampling: Sampling, eos: frozenset[int]) -> Decoder:
        decoders = self.slots.decoders
        key = (replace(sampling, stop=()), eos, weights_key(self.model), self.lent.key)
        if key not in decoders:
            while len(decoders) >= KEPT:
                decoders.popitem(last=False)
            decoders[key] = Decoder(
                self.model, self.head, self.slots.cache, self.slots.length_B, sampling,
                sorted(eos), self.pool.graph_pool,
            )  # fmt: skip
        decoders.move_to_end(key)
        return decoders[key]

    # ── reading ──────────────────────────────────────────────────────────────────────────────────

    def _read(self, reads: Mapping[int, tuple[int, ...]]) -> Tensor:
        """Hidden states behind each row's last id. Rows that begin alike share one reading."""
        assert all(reads.values()), "a row must read something before it writes"
        fresh = [row for row in reads if self.length[row] == 0]
        for row in fresh:
            self._begun.pop(row, None)
        leader = {ids: row for row, (ids, _) in self._begun.items()}
        hidden: dict[int, Tensor] = {}
        readers = [row for row in reads if self.length[row]]
        follows = {}
        for row in fresh:
            if reads[row] in leader:
                follows[row] = leader[reads[row]]
            else:
                leader[reads[row]] = row
                readers.append(row)
        readers.sort(key=lambda row: (-len(reads[row]), row))
        most = pass_tokens(self.slots.row_B.device)
        for _, rows in portions([len(reads[row]) for row in readers], readers, most):
            asked = {row: reads[row] for row in rows}
            hidden |= self._replayed_pass(asked) or self._pass(rows, reads)
            for row in rows:
                self.length[row] += len(reads[row])
        if follows:
            self._copy(follows, max(len(reads[row]) for row in follows))
        for row, leading in follows.items():
            behind = self._begun[leading][1] if leading in self._begun else hidden[leading]
            self.length[row], hidden[row] = len(reads[row]), behind
        for row in fresh:
            self._begun[row] = (reads[row], hidden[row])
        return torch.stack([hidden[row] for row in reads])

    def _replayed_pass(self, reads: Mapping[int, tuple[int, ...]]) -> dict[int, Tensor]:
        """By a graph over all rows, where so little is read that launches would take longer; empty:
        where it is not."""
        slots = self.slots
        num_tokens = _up(max(map(len, reads.values())), READ_STEP)
        longest = max(self.length[row] + num_tokens for row in reads)
        width = slots.num_places
        while width % 2 == 0 and width // 2 >= longest:
            width //= 2
        computed, looked_at = slots.num_rows * num_tokens, slots.num_rows * width
        fits = longest <= slots.num_places and max(self.length) < slots.num_places
        if not fits or computed > MOST_READ or looked_at > MOST_LOOKED_AT:
            return {}
        reader = self._reader(num_tokens, width)
        hidden_RD = reader.read(reads, self.length)
        return {row: hidden_RD[row] for row in reads}

    def _reader(self, num_tokens: int, width: int) -> Reader:
        slots, readers = self.slots, self.slots.readers
        key = (num_tokens, width, weights_key(self.model), self.lent.key)
        if key not in readers:
            while len(readers) >= KEPT:
                readers.popitem(last=False)
            readers[key] = Reader(
                self.model, slots.cache, partial(slots.read, None), num_tokens=num_tokens,
                width=width, shape=(slots.num_rows, slots.num_places), pool=self.pool.graph_pool,
            )  # fmt: skip
        readers.move_to_end(key)
        return readers[key]

    def _pass(self, rows: Sequence[int], reads: Mapping[int, tuple[int, ...]]) -> dict[int, Tensor]:
        slots, device = self.slots, self.slots.row_B.device
        lengths = [len(reads[row]) for row in rows]
        ids_BN = pad_right([reads[row] for row in rows], 0, device)
        has_B = torch.tensor([self.length[row] for row in rows], device=device)
        position_BN = has_B[:, None] + torch.arange(ids_BN.shape[1], device=device)
        # Padding may reach beyond the room; nobody looks at it, so all of it shares the last place.
        position_BN = position_BN.clamp(max=slots.num_places - 1)
        most = max(self.length[row] for row in rows) + ids_BN.shape[1]
        width = min(slots.num_places, most)
        place_W = torch.arange(width, device=device)
        with slots.read(torch.tensor(list(rows), device=device), position_BN, width):
            out = self.model.base_model(
                input_ids=ids_BN,
                attention_mask=as_taken(self.model, (place_W <= position_BN[:, :, None])[:, None]),
                position_ids=position_BN,
                past_key_values=slots.cache,
                use_cache=True,
            )
        last_B = torch.tensor(lengths, device=device) - 1
        hidden_BD = out.last_hidden_state[torch.arange(len(rows), device=device), last_B]
        return dict(zip(rows, hidden_BD, strict=True))

    def _copy(self, follows: Mapping[int, int], num_places: int) -> None:
        device = self.slots.row_B.device
        to_B = torch.tensor(list(follows), device=device)
        source_B = torch.tensor(list(follows.values()), device=device)
        for layer in self.slots.cache.layers:
            layer.copy(source_B, to_B, num_places)

    def _grow(self, num_places: int) -> None:
        if num_places <= self.slots.num_places:
            return
        # Copies: the larger room may lie in the same memory.
        kept = [
            (layer.keys.clone(), layer.values.clone())
            for layer in (self.slots.cache.layers if any(self.length) else ())
        ]
        # By at least half: many small growths would copy everything again and again.
        self.slots = self.pool.lend(
            self, self.num_rows, max(num_places, self.slots.num_places * 3 // 2)
        )
        if kept:
            for layer, (keys, values) in zip(self.slots.cache.layers, kept, strict=True):
                layer.take(keys, values)


def weights_key(model: Any) -> int:
    """Where the weights lie and whether adapters are on: a graph holds both for good."""
    places = tuple(p.data_ptr() for p in model.parameters())
    off = tuple(bool(getattr(m, "disable_adapters", False)) for m in model.modules())
    return hash((places, off))
