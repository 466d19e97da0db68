"""Copies of the weights in the numbers that decoding multiplies in, and layers with few launches.

Trained weights are float32 and a pass under autocast rounds them to bfloat16 first. A step of
decoding would round every weight again for each token; copies that are refreshed once a batch are
the same numbers. Copies of layers that read the same input lie one behind the other and are one
product. What stands between the products is as `find_fused_layers` has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from courtside.engines.lm_head import LMHead
from courtside.engines.patches.dataflow import Trace
from courtside.engines.patches.fused_layers import FusedLayers
from courtside.engines.patches.patch import Patch, apply_patches

FUSED_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that may read the same input, in the order in which they are called."""


class DecodeWeights:
    @torch.no_grad()
    def __init__(self, model: Any, head: LMHead, dtype: torch.dtype | None):
        self.model, self.head, self.dtype = model, head, dtype
        self.parts = FusedLayers(model, head, dtype)
        trace = self.parts.trace
        self.groups = _grouped(model, self.parts.linear, trace)
        """Linear layers that are one product, most of them alone."""
        self.adapted = [m for m in model.modules() if _is_plain_adapter(m, trace)]
        """Layers of PEFT, which would turn what they read into the numbers of their weights."""
        self._copies: list[tuple[Tensor, Tensor | None]] = []
        """Weight and bias of each group, then of the head, then the two halves of its adapter."""
        self._views: list[Tensor] = []
        """Where in the copies each parameter goes."""
        self._num_users = 0

    def refresh(self) -> None:
        """Take over the weights of this moment; addresses stay, as graphs hold them."""
        if self.dtype is None:
            return
        now = [(list(weights), list(biases)) for weights, biases in self._parameters()]
        flat = [p for weights, biases in now for p in (*weights, *biases)]
        if [view.shape for view in self._views] != [p.shape for p in flat]:
            self._copies, self._views = [], []
            for weights, biases in now:
                weight = self._room(weights)
                self._copies.append((weight, self._room(biases) if biases else None))
        torch._foreach_copy_(self._views, flat)

    def _room(self, parameters: Sequence[Tensor]) -> Tensor:
        sizes = [len(p) for p in parameters]
        room = parameters[0].new_empty(sum(sizes), *parameters[0].shape[1:], dtype=self.dtype)
        self._views += room.split(sizes)
        return room

    def _parameters(self) -> Iterator[tuple[Iterable[Tensor], Iterable[Tensor]]]:
        for group in self.groups:
            biases = [m.bias.detach() for m in group if m.bias is not None]
            yield [m.weight.detach() for m in group], biases
        weight, bias = self.head.parameters()
        yield [weight.detach()], [] if bias is None else [bias.detach()]
        if (adapter := self.head.adapter) is not None:  # also while it is off: addresses stay
            yield [adapter.down_RD.detach()], []
            yield [adapter.up_VR[: self.head.vocab_size].detach()], []

    @property
    def key(self) -> int:
        """Where the copies lie: a graph holds that for good."""
        return hash(tuple(weight.data_ptr() for weight, _ in self._copies))

    def release(self) -> None:
        """The copies' memory, until the next `refresh`; not while passes multiply by them."""
        if self._num_users == 0:
            self._copies, self._views = [], []

    @contextmanager
    def used(self) -> Iterator[None]:
        """Passes of the model and its head in here multiply by the copies."""
        self._num_users += 1
        try:
            with apply_patches(self._patches() if self._num_users == 1 else ()):
                yield
        finally:
            self._num_users -= 1

    def _patches(self) -> Iterator[Patch]:
        yield from self.parts.patches()
        if self.dtype is None:
            return
        for layer in self.adapted:
            yield Patch(layer, "cast_input_dtype_enabled", False)
        copies, own = self._copies[: len(self.groups)], self._copies[len(self.groups) :]
        for group, copy in zip(self.groups, copies, strict=True):
            joined = FusedLinear(*copy, [module.out_features for module in group])
            for index, module in enumerate(group):
                yield Patch(module, "forward", partial(joined.part, index))
        (weight, bias), *adapter = own
        yield Patch(self.head, "linear", lambda hidden_ND, *_: _product(hidden_ND, weight, bias))
        if (low := self.head.low_rank()) is not None:
            (down_RD, _), (up_VR, _) = adapter
            low = replace(low, down_RD=down_RD, up_VR=up_VR)
            yield Patch(self.head, "low_rank", lambda: low)


class FusedLinear:
    """Layers that read the same input: the first computes for all, the others take their part.

    A layer that is given anything else than what the first one was computes for itself.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, sizes: Sequence[int]):
        self.weight_OI, self.bias_O, self.sizes = weight_OI, bias_O, list(sizes)
        self._input: Tensor | None = None
        self._waiting: dict[int, Tensor] = {}

    def part(self, index: int, x: Tensor) -> Tensor:
        if index == 0:
            parts = _product(x, self.weight_OI, self.bias_O).split(self.sizes, -1)
            self._waiting = dict(enumerate(parts[1:], start=1))
            self._input = x if self._waiting else None
            first: Tensor = parts[0]
            return first
        if x is self._input and index in self._waiting:
            part = self._waiting.pop(index)
            if not self._waiting:
                self._input = None
            return part
        bias_O = None if self.bias_O is None else self.bias_O.split(self.sizes)[index]
        return _product(x, self.weight_OI.split(self.sizes)[index], bias_O)


def _product(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return F.linear(x.to(weight_OI.dtype), weight_OI, bias_O)


def _grouped(model: Any, linear: list[nn.Linear], trace: Trace) -> list[tuple[nn.Linear, ...]]:
    """Each layer once: with those that read what it reads, or alone."""
    groups: list[tuple[nn.Linear, ...]] = []
    taken: set[nn.Linear] = set()
    for parent in model.modules():
        for names in FUSED_PROJECTIONS:
            group: Any = tuple(getattr(parent, name, None) for name in names)
            if all(m in trace.inputs and m not in taken for m in group) and _joins(group, trace):
                groups.append(group)
                taken.update(group)
    return groups + [(module,) for module in linear if module not in taken]


def _joins(group: Sequence[nn.Linear], trace: Trace) -> bool:
    one_kind = len({(m.bias is None, m.weight.dtype, m.weight.device) for m in group}) == 1
    return one_kind and trace.share_input(group)


def _is_plain_adapter(module: Any, trace: Trace) -> bool:
    adapters = getattr(module, "lora_A", None)
    if not isinstance(adapters, nn.ModuleDict) or getattr(module, "lora_variant", True):
        return False
    return all(adapter in trace.inputs for adapter in adapters.values())
