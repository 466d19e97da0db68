"""The step of several processes (ranks): each trains on its trajectories, in shards of the weights.

Denominators, advantages, metrics and log-probs are those of the whole batch on every rank. Layers
are gathered and their gradients reduced by all ranks together, so each makes as many passes as the
one that has most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from courtside.engines.forward.forward import ForwardPasses
from courtside.engines.lm_head import LMHead
from courtside.ranks import Ranks
from courtside.recipe import Recipe
from courtside.seeds import seed_for
from courtside.training.loss_terms import LossTerm
from courtside.training.metrics import MetricAccumulator
from courtside.training.sharding import ShardedWeights
from courtside.training.shards import gather_whole
from courtside.training.student import LogProbs, MicroBatch, Student
from courtside.types import Scored


class ShardedStudent(Student):
    weights: ShardedWeights
    caches_cast_weights = False
    """A layer's gradients are reduced when its backward pass ends. That of a cast in an earlier
    pass would come after it, and be lost."""

    def __init__(self, weights: ShardedWeights, recipe: Recipe, *, ranks: Ranks, **options: Any):
        self.ranks = ranks
        self._has_head = False
        """Whether embeddings, final norm and LM head are gathered."""
        super().__init__(weights, recipe, **options)
        # The gradients of these patches do not pass through autograd, where sharding collects them.
        self.uses_cpu_patches = False

    def find_head(self, vocab_size: int) -> LMHead:
        with self._gather_head():
            return super().find_head(vocab_size)

    def make_terms(self, scored: Sequence[Scored]) -> list[LossTerm]:
        """Of all ranks' trajectories; `scored` is this rank's share."""
        records = self.ranks.gather_lists([s.to_record() for s in scored])
        self.batch = sorted(records, key=lambda s: s.trajectory.id)
        return super().make_terms(self.batch)

    @torch.enable_grad()
    def accumulate(
        self,
        step: int,
        scored: Sequence[Scored],
        terms: Sequence[LossTerm],
        metrics: MetricAccumulator,
    ) -> LogProbs:
        logps = super().accumulate(step, scored, terms, metrics)
        gather = self.ranks.gather_dicts
        logps = LogProbs(gather(logps.student), gather(logps.teacher), gather(logps.harmful))
        metrics.merge(self.ranks)
        return logps

    def each_pass(self, micro_batches: Sequence[MicroBatch]) -> Iterator[MicroBatch]:
        num_passes = self.ranks.max(len(micro_batches))
        for index in range(num_passes):
            self.weights.start_pass(self.head, is_last=index == num_passes - 1)
            if index < len(micro_batches):
                yield micro_batches[index]
            else:  # adds zeros to the gradients
                hidden_ND, _ = self.passes.forward([(self.pad_id, self.pad_id)])
                hidden_ND.backward(torch.zeros_like(hidden_ND))

    @contextmanager
    def training(self, step: int) -> Iterator[None]:
        with self._gather_head(), super().training(step):
            yield

    @contextmanager
    def _gather_head(self) -> Iterator[None]:
        if self._has_head:
            yield
            return
        with self.ranks.work_apart(), self.weights.gather_head():
            self._has_head = True
            try:
                yield
            finally:
                self._has_head = False

    def dropout_seed(self, step: int) -> int:
        rank = [self.ranks.rank] if self.ranks.rank else []
        return seed_for(self.recipe.seed, "dropout", step, *rank)

    def probe_passes(self) -> ForwardPasses:
        with self._gather_head(), self.weights.gather_layers():
            return super().probe_passes()

    def exchange(self, value: Any) -> list[Any]:
        return self.ranks.exchange(value)

    def clip_gradients(self) -> Tensor:
        with self.ranks.work_apart():
            return gather_whole(super().clip_gradients())

    def apply_gradients(self, step: int, rate: float, metrics: MetricAccumulator) -> None:
        super().apply_gradients(step, rate, metrics)
        with self.ranks.work_apart():
            self.weights.publish()
