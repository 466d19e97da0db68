"""Conversations that go on: what a row has read and written stays in its keys and values.

Every row has its own length. A row's next token is written behind its last one, and a token sees
the places up to its own: padding is overwritten before anything can see it, so no mask is ever
kept. Rows that are done for now are moved behind the others, so that passes run over a front.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from courtside.engines.attention_masks import format_mask
from courtside.engines.base import SampleRequest, Sampling
from courtside.engines.forward.batching import default_pass_tokens, pad_right
from courtside.engines.generation.outputs import SampleBuffer
from courtside.engines.generation.sampler import sample_tokens, uniforms_for
from courtside.engines.lm_head import LMHead
from courtside.engines.patches.gqa_cpu import use_gqa_attention
from courtside.engines.patches.onednn_prepack import prepack_if_faster
from courtside.engines.precision import cast_attention_inputs
from courtside.types import Sample

MIN_CAPACITY = 256
"""Room for keys and values grows by at least so many places: each growth copies what is there."""


@dataclass(slots=True, kw_only=True)
class _Writing:
    """Where the pass under way writes. A record of its own, because layers that knew their session,
    which holds them, would keep their room until the garbage collector comes by."""

    num_rows: int
    row_capacity: int = 0
    first: int = 0
    """Where the rows of the pass begin."""
    width: int = 0
    """How many places they look at."""
    position_BN: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.long))


class _PlacedLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of all rows; new ones go to `writing.position_BN`."""

    def __init__(self, writing: _Writing):
        super().__init__()
        self.writing = writing
        self.is_initialized = False

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        key_states, value_states = cast_attention_inputs(key_states, value_states)
        if not self.is_initialized:
            self.dtype, self.device = key_states.dtype, key_states.device
            self.keys = self._room(key_states, self.writing.row_capacity)
            self.values = self._room(value_states, self.writing.row_capacity)
            self.is_initialized = True
        first = self.writing.first
        rows = slice(first, first + key_states.shape[0])
        where = self.writing.position_BN[:, None, :, None]
        for room, new in ((self.keys, key_states), (self.values, value_states)):
            room[rows].scatter_(2, where.expand(-1, new.shape[1], -1, new.shape[3]), new)
        width = self.writing.width
        return self.keys[rows, :, :width], self.values[rows, :, :width]

    def grow(self, row_capacity: int) -> None:
        if self.is_initialized:
            for name in ("keys", "values"):
                old = getattr(self, name)
                room = self._room(old, row_capacity)
                room[:, :, : old.shape[2]] = old
                setattr(self, name, room)

    def swap(self, one: int, other: int) -> None:
        if not self.is_initialized:
            return
        for room in (self.keys, self.values):
            kept = room[one].clone()
            room[one] = room[other]
            room[other] = kept

    def copy(self, source: int, to: int, row_capacity: int) -> None:
        for room in (self.keys, self.values):
            room[to, :, :row_capacity] = room[source, :, :row_capacity]

    def _room(self, like: Tensor, row_capacity: int) -> Tensor:
        # Zeros, not empty: a masked place is multiplied by 0, and 0 · NaN is NaN.
        return like.new_zeros(self.writing.num_rows, like.shape[1], row_capacity, like.shape[3])


class CachedSession:
    """Rows whose keys and values are kept: a turn costs its own tokens."""

    def __init__(
        self,
        model: Any,
        head: LMHead,
        *,
        num_rows: int,
        record: Callable[[int, Sampling], SampleBuffer],
        autocast_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ):
        self.model, self.head, self.record = model, head, record
        self.autocast_context = autocast_context
        self.writing = _Writing(num_rows=num_rows)
        self.device = model.device
        self.length = [0] * num_rows
        """Ids in the keys and values, by row."""
        self.order = list(range(num_rows))
        """Which row lies at each place of the tensors."""
        num_layers = model.config.get_text_config().num_hidden_layers
        self.cache = Cache(layers=[_PlacedLayer(self.writing) for _ in range(num_layers)])

    @torch.no_grad()
    def sample(
        self, rows: Sequence[int], requests: Sequence[SampleRequest], sampling: Sampling
    ) -> list[Sample]:
        """Each row reads `prompt_ids` behind what it has, and writes.

        What it wrote last counts as read except its last token, which nobody has read yet: the next
        prompt must begin with that.
        """
        assert rows and len(set(rows)) == len(rows)
        reads = {row: r.prompt_ids for row, r in zip(rows, requests, strict=True)}
        assert all(reads.values()), "a row must read something before it writes"
        longest = max(self.length[row] + len(ids) for row, ids in reads.items())
        self._grow(longest + sampling.max_new_tokens)
        steps = sampling.max_new_tokens
        with self.autocast_context(), prepack_if_faster(self.model, self.head, num_steps=steps):
            return self._write(rows, self._read(reads), requests, sampling)

    def restart(self, row: int) -> None:
        self.length[row] = 0

    def _write(
        self,
        rows: Sequence[int],
        hidden: Mapping[int, Tensor],
        requests: Sequence[SampleRequest],
        sampling: Sampling,
    ) -> list[Sample]:
        front = self._to_front(rows)
        hidden_BD = torch.stack([hidden[row] for row in front])
        number = {row: i for i, row in enumerate(rows)}
        uniform_BN = torch.stack(
            [uniforms_for(r.seed, sampling.max_new_tokens) for r in requests]
        ).to(self.device)
        drawn = self.record(len(rows), sampling)
        for n in range(sampling.max_new_tokens):
            numbers = [number[row] for row in front]
            ids_B, logp_B = sample_tokens(self.head(hidden_BD), uniform_BN[numbers, n], sampling)
            going = drawn.add(numbers, ids_B.tolist(), logp_B.tolist())
            if not going or n + 1 == sampling.max_new_tokens:
                break
            if len(going) < len(front):
                next_id = {front[i]: token for i, token in enumerate(ids_B.tolist())}
                front = self._to_front([front[i] for i in going])
                ids_B = torch.tensor([next_id[row] for row in front], device=self.device)
            hidden_BD = self._forward(ids_B[:, None], front)[:, -1]
        return drawn.samples()

    def _read(self, reads: Mapping[int, tuple[int, ...]]) -> dict[int, Tensor]:
        """Hidden state behind each row's last id. Rows that begin alike share one reading."""
        leader: dict[tuple[int, ...], int] = {}
        for row, ids in reads.items():
            if self.length[row] == 0:
                leader.setdefault(ids, row)
        follows = {
            row: leader[ids]
            for row, ids in reads.items()
            if self.length[row] == 0 and leader[ids] != row
        }
        readers = [row for row in reads if row not in follows]
        front = self._in_order(readers, {row: len(reads[row]) for row in readers})
        hidden: dict[int, Tensor] = {}
        for first, rows in split_prefill(
            [len(reads[row]) for row in front], front, default_pass_tokens(self.device)
        ):
            lengths = [len(reads[row]) for row in rows]
            ids_BN = pad_right([reads[row] for row in rows], 0, self.device)
            hidden_BND = self._forward(ids_BN, rows, lengths, first=first)
            for row, length, hidden_ND in zip(rows, lengths, hidden_BND, strict=True):
                hidden[row] = hidden_ND[length - 1]
        place = {row: place for place, row in enumerate(self.order)}
        for row, leading in follows.items():
            for layer in self.cache.layers:
                layer.copy(place[leading], place[row], len(reads[row]))
            self.length[row], hidden[row] = len(reads[row]), hidden[leading]
        return hidden

    def _forward(
        self,
        ids_BN: Tensor,
        rows: Sequence[int],
        lengths: Sequence[int] | None = None,
        *,
        first: int = 0,
    ) -> Tensor:
        """Hidden states of ids behind what `rows` have, which lie one after another from `first`.

        `lengths`: how many of each row's ids are real; all, if not said.
        """
        num_new, row_capacity = ids_BN.shape[1], self.writing.row_capacity
        has_B = torch.tensor([self.length[row] for row in rows], device=self.device)
        position_BN = has_B[:, None] + torch.arange(num_new, device=self.device)
        # Padding may reach beyond the room; nobody looks at it, so all of it shares the last place.
        position_BN = position_BN.clamp(max=row_capacity - 1)
        width = min(row_capacity, max(self.length[row] for row in rows) + num_new)
        self.writing.first, self.writing.width = first, width
        self.writing.position_BN = position_BN
        place_W = torch.arange(width, device=self.device)
        mask = format_mask(self.model, (place_W <= position_BN[:, :, None])[:, None])
        with use_gqa_attention(self.model):
            out = self.model.base_model(
                input_ids=ids_BN,
                attention_mask=mask,
                position_ids=position_BN,
                past_key_values=self.cache,
                use_cache=True,
            )
        for row, num in zip(rows, lengths or [num_new] * len(rows), strict=True):
            self.length[row] += num
        hidden: Tensor = out.last_hidden_state
        return hidden

    def _in_order(self, rows: Sequence[int], lengths: Mapping[int, int]) -> list[int]:
        """Rows at the front: by length where that costs nothing, because none has anything yet."""
        front = self._to_front(rows)
        if not any(self.length[row] for row in self.order):
            front = sorted(front, key=lambda row: (-lengths[row], row))
            self.order[: len(front)] = front
        return front

    def _grow(self, row_capacity: int) -> None:
        has = self.writing.row_capacity
        if row_capacity > has:
            # By at least half: many small growths would copy everything again and again.
            self.writing.row_capacity = max(row_capacity, has * 3 // 2, MIN_CAPACITY)
            for layer in self.cache.layers:
                layer.grow(self.writing.row_capacity)

    def _to_front(self, rows: Sequence[int]) -> list[int]:
        """Move `rows` to the first places; returns them in the order in which they lie."""
        wanted = set(rows)
        front = [row for row in self.order[: len(rows)] if row in wanted]
        late = [
            place
            for place in range(len(rows), self.writing.num_rows)
            if self.order[place] in wanted
        ]
        free = [place for place in range(len(rows)) if self.order[place] not in wanted]
        for place, other in zip(free, late, strict=True):
            for layer in self.cache.layers:
                layer.swap(place, other)
            self.order[place], self.order[other] = self.order[other], self.order[place]
        assert len(front) + len(free) == len(rows)
        return self.order[: len(rows)]


def split_prefill(
    lengths: Sequence[int], rows: Sequence[int], max_tokens: int
) -> Iterator[tuple[int, Sequence[int]]]:
    """Neighbours in portions of at most a pass's tokens with their padding, and where each begins.

    A row that is much shorter than the longest of its portion begins another: padding to twice its
    length would cost as much as a pass of its own.
    """
    first, longest = 0, 0
    for place, length in enumerate(lengths):
        longest = max(longest, length)
        full = longest * (place - first + 1) > max_tokens
        if place > first and (full or 2 * length < longest):
            yield first, rows[first:place]
            first, longest = place, length
    if rows:
        yield first, rows[first:]
