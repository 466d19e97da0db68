"""What a model has cached of each sequence: KV, convolution and recurrent states, row by row.

A cache of transformers holds a batch. Here it is split into one `RowState` per sequence, and joined
again from any of them: copies of a prompt's state for its samples, or rows of other lengths. Keys
and values of shorter rows are padded on the left; convolution and recurrent states have no
positions, and nothing may be padded there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from courtside.errors import ModelError

SlotKind = Literal["kv", "conv", "recurrent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowState:
    """The cached state of one sequence. Its tensors are never written to."""

    num_tokens: int
    tensors: tuple[Tensor, ...]
    """By slot of the cache, without the batch dimension. Keys and values: [heads, positions, D]."""


class Slot(NamedTuple):
    """Where a cache holds one tensor of a batch."""

    container: Any
    key: Any
    kind: SlotKind

    @property
    def tensor(self) -> Tensor:
        tensor: Tensor = self.container[self.key]
        return tensor


class StateLayout:
    """The structure of a model's cache, learned from one that the model has filled."""

    def __init__(self, cache: Any):
        """Raises `ModelError` where the cache holds tensors that are no known state."""
        self.template = _copy_structure(cache)
        slots = list(find_slots(self.template))
        expected = {id(slot.container[slot.key]) for slot in slots}
        for name, tensor in _find_tensors(self.template):
            if id(tensor) not in expected:
                raise ModelError(f"its {type(cache).__name__} holds {name}, an unknown state")
        self.kinds: tuple[SlotKind, ...] = tuple(slot.kind for slot in slots)
        for slot in slots:  # the structure alone, without the batch's memory
            slot.container[slot.key] = slot.container[slot.key].new_empty(0)

    @property
    def has_kv(self) -> bool:
        return "kv" in self.kinds

    def copy_row(self, cache: Any, row: int, num_tokens: int) -> RowState:
        """The state of a row of a batch, which has this length."""
        slots = list(find_slots(cache))
        assert tuple(slot.kind for slot in slots) == self.kinds
        tensors = (_copy_row(slot.tensor[row], slot.kind, num_tokens) for slot in slots)
        return RowState(num_tokens=num_tokens, tensors=tuple(tensors))

    def join(self, rows: Sequence[RowState], *, padding: float = 0.0) -> Any:
        """A cache of these rows. `padding` fills the positions before shorter rows, which the mask
        must hide."""
        cache = _copy_structure(self.template)
        columns = zip(*(row.tensors for row in rows), strict=True)
        for slot, column in zip(find_slots(cache), columns, strict=True):
            if slot.kind == "kv":
                slot.container[slot.key] = _stack_at_end(column, padding)
            else:
                slot.container[slot.key] = torch.stack(column)
        _set_length(cache, max(row.num_tokens for row in rows))
        return cache

    def select(self, cache: Any, rows_B: Tensor, num_tokens: Sequence[int]) -> None:
        """Keep these rows of the batch, which have these lengths. The cache is then as long as the
        longest of them."""
        longest = max(num_tokens)
        for slot in find_slots(cache):
            tensor = slot.container[slot.key].index_select(0, rows_B)
            if slot.kind == "kv":
                tensor = tensor[:, :, max(tensor.shape[2] - longest, 0) :]
            slot.container[slot.key] = tensor
        _set_length(cache, longest)

    def share_kv(self, state: RowState, later: RowState) -> RowState:
        """`state` with views of the keys and values of a `later` state of the same sequence, which
        take no memory; windows that have discarded keys stay as they are."""
        tensors = tuple(
            longer[:, : tensor.shape[1]]
            if kind == "kv"
            and (tensor.shape[1], longer.shape[1]) == (state.num_tokens, later.num_tokens)
            else tensor
            for tensor, longer, kind in zip(state.tensors, later.tensors, self.kinds, strict=True)
        )
        return RowState(num_tokens=state.num_tokens, tensors=tensors)

    def num_bytes(self, row: RowState, *, kv: bool) -> int:
        """Of its keys and values, or of the states that do not grow."""
        pairs = zip(row.tensors, self.kinds, strict=True)
        return sum(tensor.nbytes for tensor, kind in pairs if (kind == "kv") == kv)


def has_recurrent_states(cache: Any) -> bool:
    """Whether padding would corrupt what a cache holds: states without positions."""
    return any(slot.kind != "kv" for slot in find_slots(cache))


def without_states(row: RowState, layout: StateLayout, kind: SlotKind) -> RowState:
    """With zeros in place of all states of this kind, for probes."""
    pairs = zip(row.tensors, layout.kinds, strict=True)
    tensors = tuple(torch.zeros_like(t) if k == kind else t for t, k in pairs)
    return RowState(num_tokens=row.num_tokens, tensors=tensors)


def _copy_row(tensor: Tensor, kind: SlotKind, num_tokens: int) -> Tensor:
    if kind == "kv":
        tensor = tensor[:, max(tensor.shape[1] - num_tokens, 0) :]
    return tensor.clone()


def _stack_at_end(column: Sequence[Tensor], padding: float) -> Tensor:
    """[rows, heads, positions, D], each row's last position at the end."""
    longest = max(column, key=lambda tensor: tensor.shape[1])
    if all(tensor.shape == longest.shape for tensor in column):
        return torch.stack(list(column))
    stacked = longest.new_full((len(column), *longest.shape), padding)
    for row, tensor in enumerate(column):
        stacked[row, :, stacked.shape[2] - tensor.shape[1] :] = tensor
    return stacked


# ── the caches of transformers ───────────────────────────────────────────────────────────────────


def _layers(cache: Any) -> list[Any]:
    return list(getattr(cache, "layers", ()))


def _set_length(cache: Any, num_tokens: int) -> None:
    for layer in _layers(cache):
        if hasattr(layer, "cumulative_length"):  # of sliding windows, which discard keys
            layer.cumulative_length = num_tokens


def _copy_structure(cache: Any) -> Any:
    """The cache with containers of its own and the same tensors in them."""
    if isinstance(cache, list):  # RWKV
        return list(cache)
    copied = copy.copy(cache)
    if hasattr(cache, "layers"):
        copied.layers = [copy.copy(layer) for layer in cache.layers]
    for holder in (copied, *_layers(copied)):
        for name, value in vars(holder).items():
            if isinstance(value, dict):
                tuples = {k: list(v) if isinstance(v, tuple) else v for k, v in value.items()}
                setattr(holder, name, tuples)
            elif isinstance(value, list) and name != "layers":
                setattr(holder, name, list(value))
    return copied


def find_slots(cache: Any) -> Iterator[Slot]:
    if isinstance(cache, list):  # RWKV
        yield from _slots_of(cache, range(len(cache)), "recurrent")
        return
    for layer in _layers(cache):
        fields = vars(layer)
        yield from _slots_of(fields, ("keys", "values"), "kv")
        yield from _slots_of(fields.get("conv_states", {}), None, "conv")
        yield from _slots_of(fields.get("recurrent_states", {}), None, "recurrent")
    linear = getattr(cache, "linear_cache", [])  # MiniMax
    yield from _slots_of(linear, range(len(linear)), "recurrent")
    for states in getattr(cache, "rnn_state", {}).values():  # xLSTM
        yield from _slots_of(states, range(len(states)), "recurrent")


def _slots_of(container: Any, keys: Any, kind: SlotKind) -> Iterator[Slot]:
    for key in list(container) if keys is None else keys:
        value = container.get(key) if isinstance(container, dict) else container[key]
        if isinstance(value, Tensor):
            yield Slot(container, key, kind)


def _find_tensors(cache: Any) -> Iterator[tuple[str, Tensor]]:
    """All tensors with a batch dimension that a cache holds, by name; also those in containers."""
    if isinstance(cache, list):
        return
    for holder in (cache, *_layers(cache)):
        for name, value in vars(holder).items():
            values = value.values() if isinstance(value, dict) else [value]
            lists = (v if isinstance(v, list | tuple) else [v] for v in values)
            yield from (
                (name, tensor)
                for tensor in chain.from_iterable(lists)
                if isinstance(tensor, Tensor) and tensor.dim() > 1
            )
