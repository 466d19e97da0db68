"""Fallbacks of eager decoding for models whose cache does not take a padded batch.

`SeparateRows`: each prompt in a batch of its own, over the cache that transformers makes for the
model. `UncachedRows`: every token takes a plain pass over the whole sequence, which is right for
any causal model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from courtside.engines.forward.forward import ForwardPasses


class DecodeBatch(Protocol):
    """Prompts that are decoded together, eagerly."""

    order: list[int]
    """The prompt of each row."""

    def prefill(self) -> Tensor:
        """Hidden states [B, D] of the last prompt tokens, in `order`."""

    def advance(self, next_ids: Mapping[int, int]) -> tuple[list[int], Tensor]:
        """One new token per prompt that goes on; the others leave. Returns the rows' prompts and
        hidden states [B, D]."""


class SeparateRows:
    """One batch per prompt, made by `make_batch`."""

    def __init__(
        self,
        prompts: Sequence[tuple[int, ...]],
        make_batch: Callable[[Sequence[tuple[int, ...]]], DecodeBatch],
    ):
        self.order = list(range(len(prompts)))
        self._rows = [make_batch([prompt]) for prompt in prompts]

    def prefill(self) -> Tensor:
        return torch.cat([self._rows[i].prefill() for i in self.order])

    def advance(self, next_ids: Mapping[int, int]) -> tuple[list[int], Tensor]:
        self.order = [i for i in self.order if i in next_ids]
        hidden = [self._rows[i].advance({0: next_ids[i]})[1] for i in self.order]
        return self.order, torch.cat(hidden)


class UncachedRows:
    """Whole sequences in the model's own forward passes, again for each token."""

    def __init__(
        self, passes: ForwardPasses, prompts: Sequence[tuple[int, ...]], *, max_tokens: int
    ):
        self.passes, self.max_tokens = passes, max_tokens
        self.order = list(range(len(prompts)))
        self._sequences = [list(prompt) for prompt in prompts]

    def prefill(self) -> Tensor:
        return self._last_hidden()

    def advance(self, next_ids: Mapping[int, int]) -> tuple[list[int], Tensor]:
        self.order = [i for i in self.order if i in next_ids]
        for i in self.order:
            self._sequences[i].append(next_ids[i])
        return self.order, self._last_hidden()

    def _last_hidden(self) -> Tensor:
        sequences = [self._sequences[i] for i in self.order]
        hidden: dict[int, Tensor] = {}
        with self.passes.patch_model():
            for batch in self.passes.plan_batches([[ids] for ids in sequences], self.max_tokens):
                hidden_ND, spans = self.passes.forward([sequences[i] for i in batch])
                for i, span in zip(batch, spans, strict=True):
                    (last,) = span.indices([len(sequences[i]) - 1])
                    hidden[i] = hidden_ND[last]
        return torch.stack([hidden[i] for i in range(len(sequences))])
