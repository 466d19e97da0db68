"""Continuous batching on a GPU: a row of the KV cache that finishes takes the next request.

All rows decode together by a replayed CUDA graph, finished ones included, at next to no cost.
Prompts are prefilled several at a time, short ones by a graph too.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from courtside.engines.base import SampleRequest, Sampling
from courtside.engines.forward.batching import (
    default_pass_tokens,
    pad_right,
    split_prefill,
    tensor_on,
)
from courtside.engines.generation.decode_weights import DecodeWeights
from courtside.engines.generation.kv_cache import (
    MAX_CACHED_GRAPHS,
    STEPS_PER_SYNC,
    DecodeStep,
    KVCachePool,
    PrefillStep,
    round_up,
)
from courtside.engines.generation.sampler import SampleBuffer
from courtside.engines.lm_head import LMHead
from courtside.engines.patches.attention import new_positions
from courtside.engines.routing import Routers
from courtside.types import Sample

PREFILL_STEP = 32
MAX_GRAPH_TOKENS = 8192
MAX_GRAPH_POSITIONS = 2**17
"""Tokens of a prefill graph, and positions that they attend to: more keep a GPU busy without."""
NUM_EAGER_PREFILLS = 1
"""Of a shape, before its graph is captured: warm-up and capture cost three passes over all rows,
which a rollout with one prompt per row would never earn back."""
REFILL_FRACTION = 8
"""Waiting requests start once 1/8 of the rows is free: a prefill for few costs as for many."""

Step = TypeVar("Step")


class ContinuousBatchingSession:
    """Rows with KV caches that persist: a turn costs its own tokens."""

    def __init__(
        self,
        model: Any,
        head: LMHead,
        *,
        pool: KVCachePool,
        weights: DecodeWeights,
        num_rows: int,
        row_capacity: int,
        make_buffer: Callable[[int, Sampling], SampleBuffer],
        autocast_context: Callable[[], AbstractContextManager[Any]],
        num_eager_prefills: int = NUM_EAGER_PREFILLS,
        routers: Routers | None = None,
    ):
        self.routers = routers
        self.num_eager_prefills = num_eager_prefills
        self.model, self.head, self.weights, self.num_rows = model, head, weights, num_rows
        self.make_buffer, self.autocast_context = make_buffer, autocast_context
        self.pool = pool.claim(self)
        self.cache = self.pool.acquire(num_rows, row_capacity)
        self.length = [0] * self.cache.num_rows
        self._first_prompts: dict[int, tuple[tuple[int, ...], Tensor]] = {}
        """First prompt of each row and its last hidden state, for rows that start with the same."""

    def sample(
        self, rows: Sequence[int], requests: Sequence[SampleRequest], sampling: Sampling
    ) -> list[Sample]:
        """Append each row's `prompt_ids` to what it has cached, and generate.

        The last token that a row sampled is not cached: its next prompt must start with it.
        """
        assert rows and len(set(rows)) == len(rows)
        return self._serve(dict(zip(rows, range(len(rows)), strict=True)), requests, sampling)

    def sample_all(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Sample]:
        """Any number of requests, each in an empty row as soon as one is free."""
        assigned = {i: i for i in range(min(self.num_rows, len(requests)))}
        return self._serve(assigned, requests, sampling)

    def steps_per_sync(self, sampling: Sampling) -> int:
        return STEPS_PER_SYNC

    def restart(self, row: int) -> None:
        self.length[row] = 0
        self._first_prompts.pop(row, None)  # an idle row overwrites it, so nothing may share it

    @torch.no_grad()
    def _serve(
        self, assigned: dict[int, int], requests: Sequence[SampleRequest], sampling: Sampling
    ) -> list[Sample]:
        """`assigned`: row → index of its request; later requests wait for a free row."""
        buffer = self.make_buffer(len(requests), sampling)
        waiting = deque(range(len(assigned), len(requests)))
        longest = max(
            *(self.length[row] + len(requests[i].prompt_ids) for row, i in assigned.items()),
            *(len(requests[i].prompt_ids) for i in waiting),
            0,
        )
        self._grow(longest + sampling.max_new_tokens)
        records = sampling.return_routed_experts and self.routers is not None
        if records and self.routers is not None:
            self.cache.start_recording(self.routers)
        experts: dict[int, Tensor] = {}
        start = {i: self.length[row] for row, i in assigned.items()}
        # Rows that are not in this batch append after what they have cached.
        self.cache.length_B.copy_(torch.tensor(self.length))
        with self.autocast_context(), self.weights.swap_in():
            step = self._decode_step(sampling, buffer.eos)
            step.stop()  # an earlier batch may have been interrupted
            self._start(step, assigned, requests, buffer)
            running, free = dict(assigned), list[int]()
            while running:
                is_active = step.run(self.steps_per_sync(sampling))
                if sampling.stop:
                    stopped = _stop_at_strings(step, list(running), buffer)
                    is_active = [a and row not in stopped for row, a in enumerate(is_active)]
                finished = {row: running.pop(row) for row in list(running) if not is_active[row]}
                outputs = step.outputs(list(finished))
                for (row, i), (ids, logps) in zip(finished.items(), outputs, strict=True):
                    buffer.extend(i, ids, logps)
                    self.length[row] += len(buffer.ids[i]) - 1  # the last token is not cached
                    if records and self.cache.routing is not None:
                        experts[i] = self.cache.routing.read(row, start.get(i, 0), self.length[row])
                free += finished
                is_worth_it = len(free) * REFILL_FRACTION >= self.num_rows or not running
                if waiting and is_worth_it:
                    count = min(len(free), len(waiting))
                    started = {free.pop(): waiting.popleft() for _ in range(count)}
                    for row in started:
                        self.restart(row)
                    self._start(step, started, requests, buffer)
                    running |= started
        return [replace(s, routed_experts=experts.get(i)) for i, s in enumerate(buffer.samples())]

    def _start(
        self,
        step: DecodeStep,
        assigned: Mapping[int, int],
        requests: Sequence[SampleRequest],
        buffer: SampleBuffer,
    ) -> None:
        hidden_BD = self._prefill({row: requests[i].prompt_ids for row, i in assigned.items()})
        rows, device = list(assigned), hidden_BD.device
        length_B = torch.tensor([self.length[row] for row in rows], device=device)
        self.cache.length_B[torch.tensor(rows, device=device)] = length_B
        step.start(rows, hidden_BD, [requests[i].seed for i in assigned.values()])
        if buffer.sampling.stop:
            _stop_at_strings(step, rows, buffer)

    def _decode_step(self, sampling: Sampling, eos: frozenset[int]) -> DecodeStep:
        records = self.cache.routing is not None
        key = (replace(sampling, stop=()), eos, weights_key(self.model), self.weights.key, records)
        return _get_or_make(
            self.cache.decode_steps,
            key,
            lambda: DecodeStep(
                self.model, self.head, self.cache, sampling, sorted(eos), self.pool.graphs
            ),
        )

    # ── prefill ──────────────────────────────────────────────────────────────────────────────────

    def _prefill(self, prompts: Mapping[int, tuple[int, ...]]) -> Tensor:
        """Last hidden states [B, D]. Rows that start with the same prompt share one prefill."""
        assert all(prompts.values()), "a prompt needs at least one token"
        empty = [row for row in prompts if self.length[row] == 0]
        first_row = {ids: row for row, (ids, _) in self._first_prompts.items()}
        sources = {row: first_row.setdefault(prompts[row], row) for row in empty}
        copies = {row: source for row, source in sources.items() if row != source}
        rows = sorted(prompts.keys() - copies, key=lambda row: (-len(prompts[row]), row))
        hidden: dict[int, Tensor] = {}
        max_tokens = default_pass_tokens(self.cache.row_B.device)
        for batch in split_prefill([len(prompts[row]) for row in rows], rows, max_tokens):
            batch_prompts = {row: prompts[row] for row in batch}
            step = self._prefill_step(batch_prompts)
            if step is None:
                hidden |= self._prefill_eagerly(batch_prompts)
            else:
                inputs = step.make_inputs(self.cache, batch_prompts, self.length)
                inputs_RT = tensor_on(inputs, dtype=torch.long, device=self.cache.row_B.device)
                hidden_RD = step.run(self.cache, inputs_RT)
                hidden |= {row: hidden_RD[row] for row in batch}
            for row in batch:
                self.length[row] += len(prompts[row])
        if copies:
            target_B, source_B = torch.tensor(
                [list(copies), list(copies.values())], device=self.cache.row_B.device
            )
            num_positions = max(len(prompts[row]) for row in copies)
            for layer in self.cache.hf_cache.layers:
                layer.copy_rows(source_B, target_B, num_positions)
            if self.cache.routing is not None:
                self.cache.routing.copy_row(source_B, target_B, num_positions)
        for row, source in copies.items():
            self.length[row] = len(prompts[row])
            first_prompt = self._first_prompts.get(source)
            hidden[row] = hidden[source] if first_prompt is None else first_prompt[1]
        for row in empty:
            self._first_prompts[row] = (prompts[row], hidden[row])
        self._update_prefixes()
        return torch.stack([hidden[row] for row in prompts])

    def _prefill_step(self, prompts: Mapping[int, tuple[int, ...]]) -> PrefillStep | None:
        """A step over all rows, replayed as a graph, where its launches would take longer than its
        computation; None: elsewhere, and the first time that a shape occurs."""
        cache = self.cache
        num_tokens = round_up(max(map(len, prompts.values())), PREFILL_STEP)
        longest = max(self.length[row] + num_tokens for row in prompts)
        width = cache.row_capacity
        while width % 2 == 0 and width // 2 >= longest:
            width //= 2
        num_rows = cache.num_rows
        if num_rows * num_tokens > MAX_GRAPH_TOKENS or num_rows * width > MAX_GRAPH_POSITIONS:
            return None
        # The last token of a row is cached in its next turn, and the capacity grows before that.
        assert max(self.length) < cache.row_capacity, "the last position of every row is free"
        records = cache.routing is not None
        key = (num_tokens, width, weights_key(self.model), self.weights.key, records)
        cache.num_prefills[key] += 1
        if cache.num_prefills[key] <= self.num_eager_prefills:
            return None
        return _get_or_make(
            cache.prefill_steps,
            key,
            lambda: PrefillStep(cache, num_tokens=num_tokens, width=width, graphs=self.pool.graphs),
        )

    def _prefill_eagerly(self, prompts: Mapping[int, tuple[int, ...]]) -> dict[int, Tensor]:
        cache, device = self.cache, self.cache.row_B.device
        ids_BN = pad_right(list(prompts.values()), 0, device)
        position_BN, width = new_positions(
            [self.length[row] for row in prompts], ids_BN.shape[1],
            capacity=cache.row_capacity, device=device,
        )  # fmt: skip
        row_B = torch.tensor(list(prompts), device=device)
        hidden_BND = cache.prefill(row_B, ids_BN, position_BN, width)
        last_B = torch.tensor([len(ids) - 1 for ids in prompts.values()], device=device)
        hidden_BD = hidden_BND[torch.arange(len(prompts), device=device), last_B]
        return dict(zip(prompts, hidden_BD, strict=True))

    def _update_prefixes(self) -> None:
        """Of rows with the same first prompt, decode attention loads it from the first one's."""
        rows, lengths = list(range(self.cache.num_rows)), [0] * self.cache.num_rows
        first_row: dict[Any, int] = {}
        for row, key, length in self._list_prefixes():
            rows[row], lengths[row] = first_row.setdefault(key, row), length
        self.cache.prefix_row_B.copy_(torch.tensor(rows))
        self.cache.prefix_length_B.copy_(torch.tensor(lengths))

    def _list_prefixes(self) -> Sequence[tuple[int, Any, int]]:
        """Rows whose first tokens others may have cached, too: a key that such rows share, and how
        many tokens."""
        return [(row, ids, len(ids)) for row, (ids, _) in self._first_prompts.items()]

    def _grow(self, row_capacity: int) -> None:
        if row_capacity <= self.cache.row_capacity:
            return
        # Copies: the larger KV cache may use the same memory. Layers that use the cache of another
        # have none of their own.
        cached = {
            i: (layer.keys.clone(), layer.values.clone())
            for i, layer in enumerate(self.cache.hf_cache.layers if any(self.length) else ())
            if layer.is_initialized
        }
        routing = self.cache.routing
        experts_BNLK = None if routing is None else routing.experts_BNLK.clone()
        # By at least half: many small growths would copy everything again and again.
        row_capacity = max(row_capacity, self.cache.row_capacity * 3 // 2)
        self.cache = self.pool.acquire(self.num_rows, row_capacity)
        for i, (keys, values) in cached.items():
            self.cache.hf_cache.layers[i].load(keys, values)
        if routing is not None and experts_BNLK is not None:
            self.cache.start_recording(routing.routers)
            assert self.cache.routing is not None
            self.cache.routing.load(experts_BNLK)


def _stop_at_strings(step: DecodeStep, rows: Sequence[int], buffer: SampleBuffer) -> list[int]:
    """Deactivate the rows whose text ends with a stop string, and return them."""
    outputs = step.outputs(rows)
    stopped = [
        row for row, (ids, _) in zip(rows, outputs, strict=True) if buffer.has_stop_string(ids)
    ]
    step.stop(stopped)
    return stopped


def _get_or_make(steps: OrderedDict[Any, Step], key: Any, make: Callable[[], Step]) -> Step:
    """Least recently used steps are dropped, with their graphs."""
    if key not in steps:
        while len(steps) >= MAX_CACHED_GRAPHS:
            steps.popitem(last=False)
        steps[key] = make()
    steps.move_to_end(key)
    return steps[key]


def weights_key(model: Any) -> int:
    """Addresses of the weights, and whether adapters are on: a graph has both fixed."""
    addresses = tuple(p.data_ptr() for p in model.parameters())
    is_off = tuple(bool(getattr(m, "disable_adapters", False)) for m in model.modules())
    return hash((addresses, is_off))
