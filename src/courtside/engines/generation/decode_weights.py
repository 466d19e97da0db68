"""bf16 shadow weights for decoding, refreshed once per rollout; QKV and gate/up fused.

Trained weights are float32, and autocast rounds them to bfloat16 in every forward pass. Decoding
would round every weight again for each token; shadow copies hold the same values. Linear layers
with the same input are adjacent in the copies and run as one matmul. Norms, rotary embeddings and
MLPs run by the kernels of `FusedLayers`.
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
from courtside.engines.patches.fused_layers import FusedLayers, Trace
from courtside.engines.patches.patch import Patch, apply_patches

FUSED_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that may have the same input, in the order of their calls."""


class DecodeWeights:
    """`dtype` None: the model computes in the dtype of its weights and needs no shadow copies."""

    @torch.no_grad()
    def __init__(self, model: Any, head: LMHead, dtype: torch.dtype | None):
        self.model, self.head, self.dtype = model, head, dtype
        self.layers = FusedLayers(model, head, dtype)
        trace = self.layers.trace
        self.groups = _group_by_input(model, self.layers.linear, trace)
        """Linear layers that run as one matmul; most groups have one."""
        self.adapted = [m for m in model.modules() if _is_plain_adapter(m, trace)]
        """PEFT layers, which would cast their input to the dtype of their weights."""
        self._copies: list[tuple[Tensor, Tensor | None]] = []
        """Weight and bias of each group, then of the LM head, then the two of its adapter."""
        self._views: list[Tensor] = []
        """The slice of the copies for each parameter."""
        self._num_users = 0

    def _refresh(self) -> None:
        """Copy the current weights; addresses stay, as CUDA graphs have them fixed."""
        if self.dtype is None:
            return
        groups = [(list(weights), list(biases)) for weights, biases in self._parameters()]
        parameters = [p for weights, biases in groups for p in (*weights, *biases)]
        if [view.shape for view in self._views] != [p.shape for p in parameters]:
            self._copies, self._views = [], []
            for weights, biases in groups:
                weight = self._allocate(weights)
                self._copies.append((weight, self._allocate(biases) if biases else None))
        torch._foreach_copy_(self._views, parameters)

    def _allocate(self, parameters: Sequence[Tensor]) -> Tensor:
        sizes = [len(p) for p in parameters]
        fused = parameters[0].new_empty(sum(sizes), *parameters[0].shape[1:], dtype=self.dtype)
        self._views += fused.split(sizes)
        return fused

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
        """Addresses of the copies: a CUDA graph has them fixed."""
        return hash(tuple(weight.data_ptr() for weight, _ in self._copies))

    def release(self) -> None:
        """Free the copies until they are used again; does nothing while they are swapped in."""
        if self._num_users == 0:
            self._copies, self._views = [], []

    @contextmanager
    def swap_in(self) -> Iterator[None]:
        """Forward passes of model and LM head in here use shadow copies of the current weights."""
        self._refresh()
        self._num_users += 1
        try:
            with apply_patches(self._patches() if self._num_users == 1 else ()):
                yield
        finally:
            self._num_users -= 1

    def _patches(self) -> Iterator[Patch]:
        yield from self.layers.patches()
        if self.dtype is None:
            return
        for layer in self.adapted:
            yield Patch(layer, "cast_input_dtype_enabled", False)
        num_groups = len(self.groups)
        for group, copy in zip(self.groups, self._copies[:num_groups], strict=True):
            fused = FusedLinear(*copy, [module.out_features for module in group])
            for index, module in enumerate(group):
                yield Patch(module, "forward", partial(fused.forward, index))
        (weight, bias), *adapter = self._copies[num_groups:]
        yield Patch(self.head, "linear", lambda hidden_ND, *_: _linear(hidden_ND, weight, bias))
        if (low := self.head.low_rank()) is not None:
            (down_RD, _), (up_VR, _) = adapter
            low = replace(low, down_RD=down_RD, up_VR=up_VR)
            yield Patch(self.head, "low_rank", lambda: low)


class FusedLinear:
    """Linear layers with the same input: the first computes all, the others take their slice.

    A layer whose input is another tensor than the first one's runs by itself.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, sizes: Sequence[int]):
        self.weight_OI, self.bias_O, self.sizes = weight_OI, bias_O, list(sizes)
        self._input: Tensor | None = None
        self._slices: dict[int, Tensor] = {}
        """Outputs that their layers have not taken yet."""

    def forward(self, index: int, x: Tensor) -> Tensor:
        if index == 0:
            slices = _linear(x, self.weight_OI, self.bias_O).split(self.sizes, -1)
            self._slices = dict(enumerate(slices[1:], start=1))
            self._input = x if self._slices else None
            first: Tensor = slices[0]
            return first
        if x is self._input and index in self._slices:
            output = self._slices.pop(index)
            if not self._slices:
                self._input = None
            return output
        bias_O = None if self.bias_O is None else self.bias_O.split(self.sizes)[index]
        return _linear(x, self.weight_OI.split(self.sizes)[index], bias_O)


def _linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return F.linear(x.to(weight_OI.dtype), weight_OI, bias_O)


def _group_by_input(
    model: Any, linear: list[nn.Linear], trace: Trace
) -> list[tuple[nn.Linear, ...]]:
    """Each linear layer once: with those that have its input, or alone."""
    groups: list[tuple[nn.Linear, ...]] = []
    grouped: set[nn.Linear] = set()
    for parent in model.modules():
        for names in FUSED_PROJECTIONS:
            group: Any = tuple(getattr(parent, name, None) for name in names)
            if not all(m in trace.inputs and m not in grouped for m in group):
                continue
            kinds = {(m.bias is None, m.weight.dtype, m.weight.device) for m in group}
            if len(kinds) == 1 and trace.share_input(group):
                groups.append(group)
                grouped.update(group)
    return groups + [(module,) for module in linear if module not in grouped]


def _is_plain_adapter(module: Any, trace: Trace) -> bool:
    adapters = getattr(module, "lora_A", None)
    if not isinstance(adapters, nn.ModuleDict) or getattr(module, "lora_variant", True):
        return False
    return all(adapter in trace.inputs for adapter in adapters.values())
