"""A model in shards over the ranks that only scores and samples, never trains.

Each of its layers is gathered for its own forward pass, so all ranks make every pass together. They
have different numbers of them (other trajectories, hints and routes), so they take turns: before a
pass each says which model it needs, the first of these is run by all, and who has nothing for it
adds a pass over two tokens. Who is done goes on so until nobody needs a pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property, wraps
from typing import Any, Protocol

import torch

from courtside.engines.base import Capabilities
from courtside.engines.forward.forward import ForwardPasses, probe_forward_passes
from courtside.engines.local import LocalEngine
from courtside.engines.probes import probe_kv_cache
from courtside.ranks import ALONE, Ranks


class GatheredWeights(Protocol):
    """Whole weights that exist only while ranks score."""

    def gather(self) -> None:
        """All ranks call it together."""

    def release(self) -> None: ...


class ForwardTurns:
    """Whose forward pass is next, over all sharded models of a run."""

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks
        self.models: list[Any] = []
        self.weights: list[GatheredWeights] = []
        self.is_open = False
        self.in_step = False
        """Whether all ranks make the same passes now, and need no turns."""

    @contextmanager
    def open(self) -> Iterator[None]:
        """Around what scores or samples with teachers: all ranks enter and leave it together, and
        exchange nothing else in it."""
        if not self.models and not self.weights:
            yield
            return
        with self.ranks.work_apart():
            for model in self.models:
                # Embeddings, final norm and LM head, which the update needs, too: they stay until
                # the weights change.
                model.unshard()
            for weights in self.weights:
                weights.gather()
        self.is_open = True
        try:
            yield
            while (model := self._choose_model(None)) is not None:
                self._pass_idly(model)
        finally:
            self.is_open = False
            for weights in self.weights:
                weights.release()

    def add(self, model: Any) -> None:
        """From now on ranks take turns with this model."""
        if any(other is model for other in self.models):  # that of another teacher, too
            return
        decoder = model.base_model
        forward = decoder.forward

        @wraps(forward)
        def take_turn(*args: Any, **kwargs: Any) -> Any:
            with self.take(model):
                return forward(*args, **kwargs)

        decoder.forward = take_turn
        self.models.append(model)

    @contextmanager
    def take(self, model: Any) -> Iterator[None]:
        """Around one forward pass."""
        if not self.in_step:
            assert self.is_open, "other ranks would wait for this pass, or this rank for theirs"
            while (other := self._choose_model(model)) is not model:
                self._pass_idly(other)
        with self.ranks.work_apart():
            yield

    @contextmanager
    def keep_step(self) -> Iterator[None]:
        """Around passes that all ranks make together."""
        before, self.in_step = self.in_step, True
        try:
            yield
        finally:
            self.in_step = before

    def _choose_model(self, needed: Any) -> Any:
        """The first that any rank needs; None: all ranks are done."""
        number = next((n for n, model in enumerate(self.models) if model is needed), None)
        numbers = [n for n in self.ranks.exchange(number) if n is not None]
        return self.models[min(numbers)] if numbers else None

    @torch.no_grad()
    def _pass_idly(self, model: Any) -> None:
        with self.keep_step():
            ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
            model.base_model(input_ids=ids, use_cache=False)


class ShardedEngine(LocalEngine):
    """`LocalEngine` on a model that `training.sharding` has sharded. All ranks make it together,
    and with it every probe that a pass would make first.

    Weights of layers have no addresses that stay, so nothing is fused, prepacked or captured in
    CUDA graphs. A decoding step gathers all of them: its samples are slow."""

    def __init__(self, model: Any, tokenizer: Any, *, turns: ForwardTurns, **options: Any) -> None:
        with turns.keep_step():
            model.unshard()  # the LM head is found and compared before a pass gathers it
            super().__init__(model, tokenizer, **options)
            self._probe()
        for module in model.modules():  # a probe that ends within a layer leaves it gathered
            if hasattr(module, "reshard"):
                module.reshard()
        turns.add(model)

    def _probe(self) -> None:
        """What is computed when it is first asked for, and here must not be asked by one rank."""
        for name in ("passes", "stateless_reason", "separate_branches_reason"):
            getattr(self, name)
        if self.stateless_reason is not None and self.state_passes is None:
            _ = self.decode_path

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, mixed_sampling=False)

    @property
    def uses_continuous_batching(self) -> bool:
        return False

    @cached_property
    def passes(self) -> ForwardPasses:
        with self.autocast_context():
            return probe_forward_passes(self.model, pad_id=self.pad_id)

    @cached_property
    def stateless_reason(self) -> str | None:
        """Of eager decoding, whatever the device."""
        with self.autocast_context():
            return probe_kv_cache(self.model)

    def _patch_model(self) -> AbstractContextManager[None]:
        return self.passes.patch_model()
