"""Layers of a KV cache at fixed addresses, which CUDA graphs replay: keys and values, and the
recurrent and convolution states of hybrid models."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from courtside.engines.forward.state_passes import StatePasses
from courtside.engines.patches.fused_layers import append_kv
from courtside.engines.row_states import RowState, find_slots


class KVLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values [rows, KV heads, capacity, D] of one layer."""

    is_initialized: bool

    def __init__(self, cache: Any, index: int):
        super().__init__()
        # Weak: a cycle would leave buffers and graphs to the garbage collector.
        self.cache, self.index = weakref.proxy(cache), index

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        cache = self.cache
        self._allocate(key_states, value_states)
        if cache.prefill_target is None:
            append_kv(self.keys, self.values, key_states, value_states, cache.length_B)
            return self.keys, self.values
        row_B, position_BN, width = cache.prefill_target
        index_B1 = (cache.row_B if row_B is None else row_B)[:, None]
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            buffer[index_B1, :, position_BN] = states.to(self.dtype).transpose(1, 2)
        keys, values = self.keys[:, :, :width], self.values[:, :, :width]
        return (keys, values) if row_B is None else (keys[row_B], values[row_B])

    def _allocate(self, keys: Tensor, values: Tensor) -> None:
        if not self.is_initialized:
            self.dtype, self.device = self.cache.dtype or keys.dtype, keys.device
            self.keys = self.cache.allocate(2 * self.index, keys, self.dtype)
            self.values = self.cache.allocate(2 * self.index + 1, values, self.dtype)
            self.is_initialized = True

    def copy_rows(self, source_B: Tensor, target_B: Tensor, num_positions: int) -> None:
        if self.is_initialized:  # layers that share the cache of another have none of their own
            for buffer in (self.keys, self.values):
                buffer[target_B, :, :num_positions] = buffer[source_B, :, :num_positions]

    def load(self, keys: Tensor, values: Tensor) -> None:
        """Copy rows from a smaller KV cache."""
        self._allocate(keys, values)
        for buffer, states in ((self.keys, keys), (self.values, values)):
            buffer[: states.shape[0], :, : states.shape[2]] = states


class StateLayer(LinearAttentionLayer):  # type: ignore[misc]
    """States [rows, …] of one layer, which a decode step advances in place."""

    def __init__(self, template: LinearAttentionLayer):
        super().__init__(number_of_states=template.number_of_states)
        self.conv_kernel_size = dict(template.conv_kernel_size)
        self.is_conv_states_initialized = dict(template.is_conv_states_initialized)
        self.is_recurrent_states_initialized = dict(template.is_recurrent_states_initialized)
        self.has_previous_state = dict.fromkeys(range(template.number_of_states), True)
        self.active_B: Tensor | None = None
        """The rows that a decode step advances."""

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **_: Any
    ) -> Tensor:
        buffer: Tensor = self.recurrent_states[state_idx]
        copy_rows_where(self.active_B, recurrent_states, buffer)
        return buffer


class StateAndKVLayer(StateLayer, KVLayer):
    """Of models whose layers have both."""

    def __init__(self, cache: Any, index: int, template: LinearAttentionLayer):
        KVLayer.__init__(self, cache, index)
        StateLayer.__init__(self, template)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("allocated before")


def copy_rows_where(is_copied_B: Tensor | None, source: Tensor, target: Tensor) -> None:
    """In place; None: all rows."""
    if is_copied_B is None:
        target.copy_(source)
        return
    is_copied = is_copied_B.view(-1, *(1,) * (target.dim() - 1))
    torch.where(is_copied, source.to(target.dtype), target, out=target)


# ── caches of hybrid models ──────────────────────────────────────────────────────────────────────

LAYER_TYPES = (DynamicLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)


def find_static_problem(passes: StatePasses) -> str | None:
    """Why the states of these passes have no fixed shapes here; None: they do."""
    cache = passes.layout.template
    layers = getattr(cache, "layers", None)
    if layers is None or type(cache).update is not Cache.update:
        return f"its {type(cache).__name__} is a cache of its own"
    if other := [layer for layer in layers if type(layer) not in LAYER_TYPES]:
        return f"its cache has a {type(other[0]).__name__}"
    if passes.batching != "any lengths":
        return "its rows cannot have different lengths in one pass"
    return None


def make_static_cache(cache: Any, passes: StatePasses) -> Cache:
    """With buffers for all rows of `cache`, in the place of each tensor that the model's own cache
    holds."""
    templates = passes.layout.template.layers
    layers = [_make_layer(cache, i, template) for i, template in enumerate(templates)]
    containers = {
        id(source): target
        for template, layer in zip(templates, layers, strict=True)
        for source, target in zip(_containers(template), _containers(layer), strict=True)
    }
    example = passes.example
    assert example is not None
    slots = find_slots(passes.layout.template)
    for index, (slot, tensor) in enumerate(zip(slots, example.tensors, strict=True)):
        if slot.kind == "kv":
            buffer = cache.allocate(index, tensor[None], cache.dtype or tensor.dtype)
        else:
            buffer = cache.allocate_shape(index, tensor.shape, tensor.dtype)
        containers[id(slot.container)][slot.key] = buffer
    for layer in layers:
        if isinstance(layer, KVLayer):
            layer.dtype, layer.device = layer.keys.dtype, layer.keys.device
            layer.is_initialized = True
    return Cache(layers=layers)


def _make_layer(cache: Any, index: int, template: Any) -> KVLayer | StateLayer:
    if isinstance(template, LinearAttentionAndFullAttentionLayer):
        return StateAndKVLayer(cache, index, template)
    if isinstance(template, LinearAttentionLayer):
        return StateLayer(template)
    return KVLayer(cache, index)


def _containers(layer: Any) -> list[dict[Any, Any]]:
    """Where `find_slots` finds the tensors of a layer."""
    states = [getattr(layer, name, None) for name in ("conv_states", "recurrent_states")]
    return [vars(layer), *(state for state in states if state is not None)]


def read_row(cache: Cache, row: int, num_tokens: int) -> RowState:
    tensors = (
        (slot.tensor[row, :, :num_tokens] if slot.kind == "kv" else slot.tensor[row]).clone()
        for slot in find_slots(cache)
    )
    return RowState(num_tokens=num_tokens, tensors=tuple(tensors))


def load_row(cache: Cache, row: int, state: RowState) -> None:
    for slot, tensor in zip(find_slots(cache), state.tensors, strict=True):
        if slot.kind == "kv":
            slot.tensor[row, :, : state.num_tokens] = tensor
        else:
            slot.tensor[row] = tensor
