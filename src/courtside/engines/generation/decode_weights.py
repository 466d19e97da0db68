"""Weights for decoding: bf16 shadow copies, refreshed once per rollout; QKV and gate/up fused.

Trained weights are float32, and autocast rounds them to bfloat16 in every forward pass. Decoding
would round every weight again for each token; shadow copies hold the same values. Weights that have
the dtype of the matmuls already (a frozen LoRA base, a model in bfloat16) are not copied.

Linear layers with the same input are adjacent in memory and run as one matmul: in the copies, or in
place, where their parameters become slices of one tensor. Norms, rotary embeddings and MLPs run by
the kernels of `FusedLayers`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from courtside.engines.lm_head import LMHead
from courtside.engines.patches.experts import DECODE_COPIES, list_copied_parameters
from courtside.engines.patches.fused_layers import (
    FUSED_PROJECTIONS,
    FusedLayers,
    FusedLinear,
    Trace,
    linear,
)
from courtside.engines.patches.patch import Patch, apply_patches


class DecodeWeights:
    """`dtype` None: the model computes in the dtype of its weights."""

    @torch.no_grad()
    def __init__(self, model: Any, head: LMHead, dtype: torch.dtype | None):
        self.model, self.head, self.dtype = model, head, dtype
        self.layers = FusedLayers(model, head, dtype)
        trace = self.layers.trace
        groups = _group_by_input(model, self.layers.linear, trace)
        self.groups = groups if dtype is not None else [group for group in groups if group[1:]]
        """Linear layers that run as one matmul; most groups have one."""
        self.experts = list_copied_parameters(model) if dtype is not None else []
        self.adapted = [m for m in model.modules() if _is_plain_adapter(m, trace)]
        """PEFT layers, which would cast their input to the dtype of their weights."""
        self._weights: list[tuple[FusedTensor, FusedTensor]] = []
        """Weight and bias of each group, then each parameter of the experts, then those of the LM
        head, then the two of its adapter."""
        self._num_users = 0

    @torch.no_grad()
    def _refresh(self) -> None:
        """Copy the current weights; addresses stay, as CUDA graphs have them fixed."""
        parameters = list(self._parameters())
        if len(parameters) != len(self._weights):
            self._weights = [(FusedTensor(), FusedTensor()) for _ in parameters]
        copies: list[tuple[Tensor, Tensor]] = []
        for tensors, sources in zip(self._weights, parameters, strict=True):
            for tensor, source in zip(tensors, sources, strict=True):
                copies += tensor.refresh(source, self.dtype)
        if copies:
            torch._foreach_copy_([target for target, _ in copies], [source for _, source in copies])

    def _parameters(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        for group in self.groups:
            yield [m.weight for m in group], [m.bias for m in group if m.bias is not None]
        if self.dtype is None:
            return
        for _, _, parameter in self.experts:
            yield [parameter], []
        weight, bias = self.head.parameters()
        yield [weight], [] if bias is None else [bias]
        if (adapter := self.head.adapter) is not None:  # also while it is off: addresses stay
            yield [adapter.down_RD], []
            yield [adapter.up_VR[: self.head.vocab_size]], []

    @property
    def key(self) -> int:
        """Addresses of the weights: a CUDA graph has them fixed."""
        return hash(tuple(weight.address for weight, _ in self._weights))

    def release(self) -> None:
        """Free the copies until they are used again; does nothing while they are swapped in."""
        if self._num_users == 0:
            for tensor in (tensor for tensors in self._weights for tensor in tensors):
                tensor.release()

    @contextmanager
    def swap_in(self) -> Iterator[None]:
        """Forward passes of model and LM head in here use the fused and copied weights."""
        self._refresh()
        self._num_users += 1
        try:
            with apply_patches(list(self._patches()) if self._num_users == 1 else []):
                yield
        finally:
            self._num_users -= 1

    def _patches(self) -> Iterator[Patch]:
        yield from self.layers.patches
        weights = [(weight.tensor, bias.tensor) for weight, bias in self._weights]
        num_groups = len(self.groups)
        for group, (weight_OI, bias_O) in zip(self.groups, weights[:num_groups], strict=True):
            assert weight_OI is not None
            compute = partial(linear, weight_OI=weight_OI, bias_O=bias_O)
            fused = FusedLinear(compute, [module.out_features for module in group])
            for index, module in enumerate(group):
                yield Patch(module, "forward", partial(fused.forward, index))
        if self.dtype is None:
            return
        for layer in self.adapted:
            yield Patch(layer, "cast_input_dtype_enabled", False)
        num_parameters = len(self.experts)
        copies: dict[Any, dict[str, Tensor | None]] = {module: {} for module, _, _ in self.experts}
        for (module, name, _), (copy, _) in zip(
            self.experts, weights[num_groups : num_groups + num_parameters], strict=True
        ):
            copies[module][name] = copy
        for module, copies_by_name in copies.items():
            yield Patch(module, DECODE_COPIES, copies_by_name)
        (head_VD, bias_V), *adapter = weights[num_groups + num_parameters :]
        assert head_VD is not None
        yield Patch(self.head, "linear", lambda hidden_ND, *_: linear(hidden_ND, head_VD, bias_V))
        if (low := self.head.low_rank()) is not None:
            (down_RD, _), (up_VR, _) = adapter
            assert down_RD is not None and up_VR is not None
            low = replace(low, down_RD=down_RD, up_VR=up_VR)
            yield Patch(self.head, "low_rank", lambda: low)


class FusedTensor:
    """Parameters as slices of one tensor: a copy in another dtype, or their own memory."""

    def __init__(self) -> None:
        self.tensor: Tensor | None = None
        self.is_copy = False

    @property
    def address(self) -> int:
        return 0 if self.tensor is None else self.tensor.data_ptr()

    def refresh(
        self, parameters: Sequence[Tensor], dtype: torch.dtype | None
    ) -> list[tuple[Tensor, Tensor]]:
        """The copies (target, source) that bring it up to date; None: the parameters' dtype."""
        if not parameters:
            return []
        values = [parameter.detach() for parameter in parameters]
        dtype = dtype or values[0].dtype
        self.is_copy = any(value.dtype != dtype for value in values)
        sizes = [len(value) for value in values]
        shape = (sum(sizes), *values[0].shape[1:])
        if self.is_copy:
            if self.tensor is None or self.tensor.shape != shape:
                self.tensor = values[0].new_empty(shape, dtype=dtype)
            return list(zip(self.tensor.split(sizes), values, strict=True))
        if len(values) == 1:
            self.tensor = values[0]
        elif not self._is_memory_of(values, sizes):
            self.tensor = torch.cat(values)
            for parameter, part in zip(parameters, self.tensor.split(sizes), strict=True):
                parameter.data = part
        return []

    def _is_memory_of(self, values: Sequence[Tensor], sizes: Sequence[int]) -> bool:
        if self.tensor is None or len(self.tensor) != sum(sizes):
            return False
        parts = self.tensor.split(list(sizes))
        return [part.data_ptr() for part in parts] == [value.data_ptr() for value in values]

    def release(self) -> None:
        if self.is_copy:
            self.tensor = None


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
