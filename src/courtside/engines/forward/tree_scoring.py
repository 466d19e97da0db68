"""Branches off sequences that were packed into one pass, over the keys and values it left behind.

What `branches.py` does for padded rows, for a row without padding, as a training step has it: the
pass keeps its keys and values, and a branch looks at those of its own sequence up to its splice,
then at its own. No mask exists over the whole row, and neither the pass nor its graph is changed.

Keys are laid out once for each branch, a layer at a time: [trunk up to the splice, its own] of all
branches, one behind the other. `default_max_keys` bounds how many those are; more branches take
several passes over the same trunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from courtside.engines.base import BranchRequest
from courtside.engines.forward.batching import default_pass_tokens
from courtside.engines.forward.forward import ForwardPasses, forward_packed
from courtside.engines.forward.padded_tree_scoring import Read, read_together
from courtside.engines.forward.prefix_sharing import SequenceSpan
from courtside.engines.forward.varlen import (
    forward_varlen,
    make_varlen_layout,
    use_varlen_attention,
)
from courtside.engines.precision import cast_attention_inputs
from courtside.engines.probes import distance_from_plain_forward, eval_mode, run_probe
from courtside.engines.transfer import copy_to_device
from courtside.types import Branch


def default_max_keys(device: torch.device) -> int:
    """Of all branches in one pass. With 8 heads of 128 in 16 bits a layer has 0.5 GiB of them on a
    GPU, and again as much for each time that heads which share them are repeated."""
    return 2**17 if device.type == "cuda" else 2**15


# ── the pass that keeps ──────────────────────────────────────────────────────────────────────────


class _KeptLayer(DynamicLayer):  # type: ignore[misc]
    """Hands keys and values on, as the attention will have them, and keeps them without a graph."""

    is_initialized: bool

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        assert not self.is_initialized, "one pass"
        keys, values = cast_attention_inputs(key_states, value_states)
        self.keys, self.values = keys.detach(), values.detach()
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        return keys, values


def make_trunk_cache() -> Cache:
    """For one packed pass, `Passes.hidden(…, kept=keeping())`: no number is copied."""
    return Cache(layer_class_to_replicate=_KeptLayer)


# ── the branches ─────────────────────────────────────────────────────────────────────────────────


Placed = tuple[SequenceSpan, Branch]
"""A branch, and where in the row its trunk lies."""


def by_index(device: torch.device) -> bool:
    """Whether keys are picked place by place: slices cost a GPU's host a call each, in every layer,
    and a CPU takes ten times as long without them."""
    return device.type == "cuda"


class Layout:
    """Of all branches: the keys that each looks at, its trunk's up to its splice and its own."""

    def __init__(self, branches: Sequence[Placed], *, device: torch.device):
        self.sizes = [len(branch.token_ids) for _, branch in branches]
        self.trunks = [place.slices(branch.splice) for place, branch in branches]
        self.indexed = by_index(device)
        if self.indexed:
            self.rows_K, self.own_N = self._indices(device)

    def _indices(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Of each place, the row of the trunk; and the places of branches' own."""
        rows: list[Tensor] = []
        own: list[Tensor] = []
        start = 0
        for size, trunks in zip(self.sizes, self.trunks, strict=True):
            rows += [torch.arange(its.start, its.stop) for its in trunks]
            rows.append(torch.zeros(size, dtype=torch.long))
            start += sum(its.stop - its.start for its in trunks)
            own.append(torch.arange(start, start + size))
            start += size
        return copy_to_device(torch.cat(rows), device), copy_to_device(torch.cat(own), device)

    def laid_out(self, trunk: Tensor, new: Tensor) -> Tensor:
        """[1, heads, N, D] of the trunks' row and of the branches' to [1, heads, K, D]."""
        new = new.to(trunk.dtype)
        if self.indexed:
            found_KHD = trunk.squeeze(0).transpose(0, 1).index_select(0, self.rows_K)
            found_KHD.index_copy_(0, self.own_N, new.squeeze(0).transpose(0, 1))
            return found_KHD.transpose(0, 1)[None]
        parts: list[Tensor] = []
        for trunks, own in zip(self.trunks, new.split(self.sizes, dim=2), strict=True):
            parts += [*(trunk[:, :, its] for its in trunks), own]
        return torch.cat(parts, dim=2)


class _BranchLayer(DynamicLayer):  # type: ignore[misc]
    """Gives each branch the keys and values it looks at."""

    def __init__(self, kept: _KeptLayer, layout: Layout):
        super().__init__()
        self.keys, self.values = kept.keys, kept.values
        self.dtype, self.device = kept.dtype, kept.device
        self.is_initialized = True
        self.layout = layout

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        laid_out = self.layout.laid_out
        return laid_out(self.keys, key_states), laid_out(self.values, value_states)


@torch.no_grad()
def forward_branches(
    model: Any, kept: Cache, branches: Sequence[Placed], *, max_tokens: int | None = None
) -> list[Tensor]:
    """Last hidden states [|branch|, D] of every branch; the model's attention must be the packed
    one. Hidden state i predicts token i + 1 of the branch."""
    found: list[Tensor | None] = [None] * len(branches)
    with eval_mode(model):
        for portion in _portions(branches, model.device, max_tokens):
            its = [branches[i] for i in portion]
            parts = _read(model, kept, its).split([len(b.token_ids) for _, b in its])
            for i, part_ND in zip(portion, parts, strict=True):
                found[i] = part_ND
    return [part_ND for part_ND in found if part_ND is not None]


def _portions(
    branches: Sequence[Placed], device: torch.device, max_tokens: int | None
) -> list[list[int]]:
    """Which branches go into one pass, in order; one that is too large goes alone."""
    room, room_keys = max_tokens or default_pass_tokens(device), default_max_keys(device)
    portions: list[list[int]] = []
    used = used_keys = 0
    for i, (_, branch) in enumerate(branches):
        size = len(branch.token_ids)
        used, used_keys = used + size, used_keys + branch.splice + size
        if not portions or used > room or used_keys > room_keys:
            portions.append([])
            used, used_keys = size, branch.splice + size
        portions[-1].append(i)
    return portions


def _read(model: Any, kept: Cache, branches: Sequence[Placed]) -> Tensor:
    """One pass: hidden states of all of them, one behind the other."""
    trunk_size = kept.layers[0].keys.shape[2]
    assert all(b.token_ids for _, b in branches)
    assert all(its.stop <= trunk_size for place, b in branches for its in place.slices(b.splice))
    ids = [token for _, b in branches for token in b.token_ids]
    position = [b.splice + n for _, b in branches for n in range(len(b.token_ids))]
    packing = make_varlen_layout(
        [len(b.token_ids) for _, b in branches],
        [b.splice + len(b.token_ids) for _, b in branches],
        device=model.device,
    )
    layout = Layout(branches, device=model.device)
    lent = Cache(layers=[_BranchLayer(layer, layout) for layer in kept.layers])
    return forward_varlen(model, ids, position, packing, lent)


# ── requests ─────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def score_packed_branches(
    passes: ForwardPasses,
    requests: Sequence[BranchRequest],
    *,
    max_tokens: int,
    max_shared_tokens: int,
) -> Iterator[Read]:
    """By pass over packed trunks, samples of one prompt with one beginning. See `batch_by_prefix`
    for `max_shared_tokens`."""
    trunks = [request.token_ids[: request.num_read] for request in requests]
    for batch in passes.plan_batches(
        [[ids] for ids in trunks], max_tokens, max_shared_tokens=max_shared_tokens
    ):
        chosen = [requests[i] for i in batch]
        kept = make_trunk_cache()
        with eval_mode(passes.model), passes.patch_model():
            trunk_ND, places = passes.forward([trunks[i] for i in batch], cache=kept)
            asked = [
                (place, branch)
                for place, request in zip(places, chosen, strict=True)
                for branch in request.branches
            ]
            found = iter(forward_branches(passes.model, kept, asked, max_tokens=max_tokens))
        del kept  # the keys and values, before there are logits
        branches = [[next(found) for _ in request.branches] for request in chosen]
        yield read_together(batch, chosen, trunk_ND, places, branches)


# ── tried on a small example ─────────────────────────────────────────────────────────────────────


@torch.no_grad()
def probe_tree_scoring(model: Any) -> str | None:
    """Why branches of a model whose passes can be packed cannot be read off one; None: they can.

    Kernels count from the first or from the last key as they like, and models may do with a cache
    as they like: a tiny example is tried.
    """
    with eval_mode(model):
        return run_probe(model, lambda: _example_error(model))


def _example_error(model: Any) -> float:
    """How far branches off two packed sequences are from passes of their own."""
    vocab_size = model.get_input_embeddings().weight.shape[0]
    ids = [(7 * i * i + 3) % vocab_size for i in range(1, 61)]
    sequences = [ids[:9], ids[9:30]]
    asked = [
        (which, Branch(trajectory="", turn=0, splice=splice, token_ids=tuple(ids[-size:]),
                       scored=(False,) * size))
        for which, splice, size in ((0, 9, 5), (1, 21, 12), (1, 4, 3), (0, 0, 7))
    ]  # fmt: skip
    kept = make_trunk_cache()
    with use_varlen_attention(model):
        _, places = forward_packed(model, sequences, kept)
        found = forward_branches(model, kept, [(places[which], b) for which, b in asked])
    return max(
        distance_from_plain_forward(model, [*sequences[which][: b.splice], *b.token_ids], hidden_ND)
        for (which, b), hidden_ND in zip(asked, found, strict=True)
    )
