"""Continuous batching for recurrent and hybrid models: states at fixed addresses in addition to the
KV cache, advanced by the same replayed steps. Prompts are prefilled from their rows' states,
without padding (`forward/state_passes.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from courtside.engines.base import Sampling
from courtside.engines.forward.batching import default_pass_tokens
from courtside.engines.forward.state_passes import StatePasses
from courtside.engines.generation.cache_layers import load_row, read_row
from courtside.engines.generation.continuous_batching import ContinuousBatchingSession
from courtside.engines.generation.kv_cache import STEPS_PER_SYNC


class StateBatchingSession(ContinuousBatchingSession):
    def __init__(self, *args: Any, passes: StatePasses, **options: Any):
        super().__init__(*args, **options)
        self.passes = passes

    def steps_per_sync(self, sampling: Sampling) -> int:
        """A stop string is noticed on the host, and a state cannot take back the tokens after."""
        return 1 if sampling.stop else STEPS_PER_SYNC

    def _prefill(self, prompts: Mapping[int, tuple[int, ...]]) -> Tensor:
        """Last hidden states [B, D]. New conversations with the same prompt share one prefill."""
        assert all(prompts.values()), "a prompt needs at least one token"
        hf_cache = self.cache.hf_cache
        first_row: dict[tuple[int, ...], int] = {}
        sources = {
            row: row if self.length[row] else first_row.setdefault(ids, row)
            for row, ids in prompts.items()
        }
        rows = sorted(set(sources.values()))
        states = [
            read_row(hf_cache, row, length) if (length := self.length[row]) else None
            for row in rows
        ]
        extended = self.passes.extend(
            list(zip(states, (prompts[row] for row in rows), strict=True)),
            max_tokens=default_pass_tokens(self.cache.row_B.device),
            last_only=True,
        )
        results = dict(zip(rows, extended, strict=True))
        hidden = {source: hidden_1D[0] for source, (_, hidden_1D) in results.items()}
        for row, source in sources.items():
            if self.length[row] == 0:
                self._first_prompts[row] = (prompts[row], hidden[source])
            load_row(hf_cache, row, results[source][0])
            self.length[row] += len(prompts[row])
        self._update_prefixes()
        return torch.stack([hidden[source] for source in sources.values()])

    def _list_prefixes(self) -> Sequence[tuple[int, Any, int]]:
        """Only rows of one prefill have the same keys and values bit for bit."""
        prompts = self._first_prompts.items()
        return [(row, id(hidden_D), len(ids)) for row, (ids, hidden_D) in prompts]

    def _grow(self, row_capacity: int) -> None:
        if row_capacity <= self.cache.row_capacity:
            return
        lengths = enumerate(self.length)
        states = {row: read_row(self.cache.hf_cache, row, n) for row, n in lengths if n}
        self.cache = self.pool.acquire(
            self.num_rows, max(row_capacity, self.cache.row_capacity * 3 // 2)
        )
        for row, state in states.items():
            load_row(self.cache.hf_cache, row, state)
