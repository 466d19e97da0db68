"""Conversations on a GPU: each row has a slot in room for keys and values, and never moves.

Rows write together, by a replayed graph (`graphs.py`), and read so where that is short; prompts are
read several at a time. Rows that have ended idle along at next to no cost, or make way for requests
that wait. Where keys, values and graphs lie: `rooms.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from warnings import warn

import torch
from torch import Tensor

from courtside.engines.attention_masks import format_mask
from courtside.engines.base import SampleRequest, Sampling
from courtside.engines.forward.batching import default_pass_tokens, pad_right
from courtside.engines.generation.cuda_graphs import DecodeStep, PrefillStep
from courtside.engines.generation.decode_weights import DecodeWeights
from courtside.engines.generation.kv_cache import MAX_CACHED_GRAPHS, KVCachePool, round_up
from courtside.engines.generation.outputs import SampleBuffer
from courtside.engines.generation.session import split_prefill
from courtside.engines.lm_head import LMHead
from courtside.types import Sample

PREFILL_STEP = 32
MAX_GRAPH_TOKENS = 8192
MAX_GRAPH_POSITIONS = 2**17
"""Tokens of a replayed reading, and places that they look at: more keep a GPU busy without."""
REFILL_FRACTION = 8
"""Waiting requests begin once 1/8 of the rows is free: reading for a few costs as for many."""


class ContinuousBatchingSession:
    """Rows whose keys and values are kept: a turn costs its own tokens."""

    def __init__(
        self,
        model: Any,
        head: LMHead,
        *,
        pool: KVCachePool,
        lent: DecodeWeights,
        num_rows: int,
        row_capacity: int,
        record: Callable[[int, Sampling], SampleBuffer],
        autocast_context: Callable[[], AbstractContextManager[Any]],
    ):
        self.model, self.head, self.pool, self.lent = model, head, pool, lent
        self.record, self.autocast_context = record, autocast_context
        self.num_rows = num_rows
        self.slots = pool.lend(self, num_rows, row_capacity)
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

    def restart(self, row: int) -> None:
        self.length[row] = 0
        self._begun.pop(row, None)  # a row that sits out writes over it, and leads nobody

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
            passes.enter_context(self.autocast_context())
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
                few = len(free) * REFILL_FRACTION < self.num_rows and at_work
                if waiting and not few:
                    count = min(len(free), len(waiting))
                    new = {free.pop(): waiting.popleft() for _ in range(count)}
                    for row in new:
                        self.restart(row)
                    self._begin(decoder, new, requests)
                    at_work |= new
        return record.samples()

    def _begin(
        self, decoder: DecodeStep, asked: Mapping[int, int], requests: Sequence[SampleRequest]
    ) -> None:
        hidden_BD = self._read({row: requests[n].prompt_ids for row, n in asked.items()})
        where_B = torch.tensor(list(asked), device=hidden_BD.device)
        length_B = torch.tensor([self.length[row] for row in asked], device=hidden_BD.device)
        self.slots.length_B[where_B] = length_B
        decoder.begin(list(asked), hidden_BD, [requests[n].seed for n in asked.values()])

    def _end(self, decoder: DecodeStep, ended: Mapping[int, int], record: SampleBuffer) -> None:
        written = decoder.written(list(ended))
        for (row, number), (ids, logps) in zip(ended.items(), written, strict=True):
            record.extend(number, ids, logps)
            # The last token that counts has not been read.
            self.length[row] += len(record.ids[number]) - 1

    def _stopped(
        self,
        decoder: DecodeStep,
        at_work: Mapping[int, int],
        record: SampleBuffer,
        going: list[bool],
    ) -> list[bool]:
        """Rows whose text has come to a stop string stop, too."""
        written = zip(at_work, decoder.written(list(at_work)), strict=True)
        stopped = [row for row, (ids, _) in written if going[row] and record.stops(ids)]
        if stopped:
            decoder.stop(stopped)
        return [is_going and row not in stopped for row, is_going in enumerate(going)]

    def _decoder(self, sampling: Sampling, eos: frozenset[int]) -> DecodeStep:
        decoders = self.slots.decoders
        key = (replace(sampling, stop=()), eos, weights_key(self.model), self.lent.key)
        if key not in decoders:
            while len(decoders) >= MAX_CACHED_GRAPHS:
                decoders.popitem(last=False)
            decoders[key] = DecodeStep(
                self.model, self.head, self.slots.cache, self.slots.length_B,
                (self.slots.prefix_row_B, self.slots.prefix_length_B), sampling, sorted(eos),
                self.pool.graph_pool,
            )  # fmt: skip
        decoders.move_to_end(key)
        return decoders[key]

    # ── reading ──────────────────────────────────────────────────────────────────────────────────

    def _read(self, reads: Mapping[int, tuple[int, ...]]) -> Tensor:
        """Hidden states behind each row's last id. Rows that begin alike share one reading."""
        assert all(reads.values()), "a row must read something before it writes"
        fresh = [row for row in reads if self.length[row] == 0]
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
        most = default_pass_tokens(self.slots.row_B.device)
        for _, rows in split_prefill([len(reads[row]) for row in readers], readers, most):
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
        self._lead()
        return torch.stack([hidden[row] for row in reads])

    def _lead(self) -> None:
        """Of the rows that began with the same ids the first leads: the others are its copies."""
        leader, alike = list(range(self.slots.num_rows)), [0] * self.slots.num_rows
        first: dict[tuple[int, ...], int] = {}
        for row, (ids, _) in self._begun.items():
            leader[row], alike[row] = first.setdefault(ids, row), len(ids)
        self.slots.prefix_row_B.copy_(torch.tensor(leader))
        self.slots.prefix_length_B.copy_(torch.tensor(alike))

    def _replayed_pass(self, reads: Mapping[int, tuple[int, ...]]) -> dict[int, Tensor]:
        """By a graph over all rows, where so little is read that launches would take longer; empty:
        where it is not."""
        slots = self.slots
        num_tokens = round_up(max(map(len, reads.values())), PREFILL_STEP)
        longest = max(self.length[row] + num_tokens for row in reads)
        width = slots.row_capacity
        while width % 2 == 0 and width // 2 >= longest:
            width //= 2
        computed, looked_at = slots.num_rows * num_tokens, slots.num_rows * width
        too_large = computed > MAX_GRAPH_TOKENS or looked_at > MAX_GRAPH_POSITIONS
        if self.pool.reads_eagerly or too_large:
            return {}
        # What a row writes last is not read before it goes on, and then room has grown.
        assert max(self.length) < slots.row_capacity, "the last place of every row is free"
        try:
            hidden_RD = self._reader(num_tokens, width).read(reads, self.length)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # a pass with something in it that no graph can hold
            self.pool.reads_eagerly = True
            warn(f"readings between turns are not replayed as a graph: {error}", stacklevel=2)
            return {}
        return {row: hidden_RD[row] for row in reads}

    def _reader(self, num_tokens: int, width: int) -> PrefillStep:
        slots, readers = self.slots, self.slots.readers
        key = (num_tokens, width, weights_key(self.model), self.lent.key)
        if key not in readers:
            while len(readers) >= MAX_CACHED_GRAPHS:
                readers.popitem(last=False)
            readers[key] = PrefillStep(
                self.model, slots.cache, partial(slots.read, None), num_tokens=num_tokens,
                width=width, shape=(slots.num_rows, slots.row_capacity), pool=self.pool.graph_pool,
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
        position_BN = position_BN.clamp(max=slots.row_capacity - 1)
        most = max(self.length[row] for row in rows) + ids_BN.shape[1]
        width = min(slots.row_capacity, most)
        place_W = torch.arange(width, device=device)
        with slots.read(torch.tensor(list(rows), device=device), position_BN, width):
            out = self.model.base_model(
                input_ids=ids_BN,
                attention_mask=format_mask(
                    self.model, (place_W <= position_BN[:, :, None])[:, None]
                ),
                position_ids=position_BN,
                past_key_values=slots.cache,
                use_cache=True,
            )
        last_B = torch.tensor(lengths, device=device) - 1
        hidden_BD = out.last_hidden_state[torch.arange(len(rows), device=device), last_B]
        return dict(zip(rows, hidden_BD, strict=True))

    def _copy(self, follows: Mapping[int, int], row_capacity: int) -> None:
        device = self.slots.row_B.device
        to_B = torch.tensor(list(follows), device=device)
        source_B = torch.tensor(list(follows.values()), device=device)
        for layer in self.slots.cache.layers:
            layer.copy(source_B, to_B, row_capacity)

    def _grow(self, row_capacity: int) -> None:
        if row_capacity <= self.slots.row_capacity:
            return
        # Copies: the larger room may lie in the same memory.
        kept = [
            (layer.keys.clone(), layer.values.clone())
            for layer in (self.slots.cache.layers if any(self.length) else ())
        ]
        # By at least half: many small growths would copy everything again and again.
        self.slots = self.pool.lend(
            self, self.num_rows, max(row_capacity, self.slots.row_capacity * 3 // 2)
        )
        if kept:
            for layer, (keys, values) in zip(self.slots.cache.layers, kept, strict=True):
                layer.take(keys, values)


def weights_key(model: Any) -> int:
    """Where the weights lie and whether adapters are on: a graph holds both for good."""
    places = tuple(p.data_ptr() for p in model.parameters())
    off = tuple(bool(getattr(m, "disable_adapters", False)) for m in model.modules())
    return hash((places, off))
