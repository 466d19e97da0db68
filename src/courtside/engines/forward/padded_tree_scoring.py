"""All hints of a trajectory in one pass, over keys and values that exist already.

A trajectory is a trunk; each hint makes a branch that leaves it after `splice` ids. The trunk is
read once, causally and without a mask. Then all branches, one behind the other in one row, are read
against its keys and values: a token sees the trunk before its own splice and what precedes it in
its own branch, at the positions that it would have in a sequence of its own. n hints cost
Σ(|hint| + |turn|) tokens instead of n · |trajectory|, and the numbers are those of n passes.

Here trunks are padded rows, and branches have a mask: any model with plain attention can be read
so. Where a model's passes can be packed, `kept.py` reads both without.

Memory beside the weights, for a model of 16 layers, 32 heads of 64, 8 of them with keys and values,
in 16 bits; a trunk of 32768 ids and 20 branches of 300 (Q = 6000):
  keys and values   2 · 16 · 8 · 64 · 2 B = 32 KiB an id                 1.0 GiB
  the mask          Q · (32768 + Q) = 233M entries of one byte          0.2 GiB
  one layer at a time: the mask in 16 bits, keys and values of
  trunk and branches repeated for all heads                             0.4 + 0.3 GiB
A mask over the trunk itself would take L² = 1 GiB and as much again for every 16-bit copy. Where Q
is so large that a mask would pass `mask_entries`, the branches take several passes over the same
keys and values: the same numbers, for little more time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from courtside.engines.attention_masks import format_mask
from courtside.engines.base import BranchRequest, ScoreRequest
from courtside.engines.forward.batching import batch_by_length, default_pass_tokens, pad_right
from courtside.engines.forward.prefix_sharing import SequenceSpan
from courtside.engines.patches.gqa_cpu import use_gqa_attention
from courtside.engines.probes import (
    attn_implementation,
    distance_from_plain_forward,
    eval_mode,
    find_unsupported_attention,
    refuse_special_attention,
    run_probe,
    windows_of,
)
from courtside.errors import ModelError
from courtside.types import Branch

Layers: TypeAlias = Sequence[tuple[Tensor, Tensor]]
"""Keys and values of each layer, [rows, heads, positions, size]."""


def mask_entries(device: torch.device) -> int:
    """The largest mask of one pass; attention makes a copy of it in the width of its numbers."""
    return 2**28 if device.type == "cuda" else 2**26


# ── the trunk ────────────────────────────────────────────────────────────────────────────────────


def trunk_cache() -> DynamicCache:
    """To be filled by the pass over the trunk. It keeps every position, also for layers that look
    through a window: a branch may leave the trunk anywhere."""
    return DynamicCache()


def trunk_layers(cache: Cache) -> tuple[tuple[Tensor, Tensor], ...]:
    """Its keys and values without their graph, which lives no longer for being read here."""
    layers = []
    for layer in cache.layers:
        if not isinstance(layer, DynamicLayer) or layer.is_sliding or not layer.is_initialized:
            raise ModelError(
                f"a cache with {layer!r} does not hold all keys and values of a trunk. Give the "
                "trunk's pass past_key_values=trunk_cache(), or score the branches separately"
            )
        layers.append((layer.keys.detach(), layer.values.detach()))
    if not layers:
        raise ModelError(
            "the pass over the trunk kept no keys and values, as under gradient checkpointing. "
            "Read the trunk again without it: TransformersEngine.score_branches does"
        )
    return tuple(layers)


class _LentLayer(DynamicLayer):  # type: ignore[misc]
    """The trunk's keys and values. What a pass adds is handed on and forgotten, so that nothing is
    written into them and one layer at a time is as long as trunk and branches together."""

    def __init__(self, keys: Tensor, values: Tensor):
        super().__init__()
        self.keys, self.values = keys, values
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return (
            torch.cat([self.keys, key_states], dim=-2),
            torch.cat([self.values, value_states], dim=-2),
        )


# ── the branches ─────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def branch_hidden(
    model: Any,
    trunk: Cache | Layers,
    lengths: Sequence[int],
    branches: Sequence[Sequence[Branch]],
    *,
    max_tokens: int | None = None,
) -> list[list[Tensor]]:
    """Last hidden states [|branch|, D] of every branch, by row of the trunk and in order.

    `trunk` is what a pass over right-padded rows of `lengths` ids left behind, with or without a
    graph; neither it nor its tensors are changed, and a backward pass through it may follow. The
    branches are read without a graph and without dropout. Hidden state i predicts token i + 1 of
    the branch; its first token is predicted by the trunk, at splice − 1.
    """
    refuse_special_attention(model)
    layers = trunk_layers(trunk) if isinstance(trunk, Cache) else trunk
    for length, its in zip(lengths, branches, strict=True):
        assert length <= layers[0][0].shape[2]
        assert all(0 <= b.splice <= length and b.token_ids for b in its)
    found: list[list[Tensor | None]] = [[None] * len(its) for its in branches]
    with eval_mode(model):
        for portion in _portions(model, branches, max_tokens=max_tokens):
            packed = {row: [branches[row][i] for i in which] for row, which in portion.items()}
            hidden_RQD = _read_packed(model, layers, packed)
            for (row, which), hidden_QD in zip(portion.items(), hidden_RQD, strict=True):
                sizes = [len(branches[row][i].token_ids) for i in which]
                parts = hidden_QD[: sum(sizes)].split(sizes)
                for i, part_ND in zip(which, parts, strict=True):
                    found[row][i] = part_ND
    return [[part for part in parts if part is not None] for parts in found]


def _portions(
    model: Any, branches: Sequence[Sequence[Branch]], *, max_tokens: int | None
) -> list[dict[int, list[int]]]:
    """Which branches of each row go into one pass: all, unless that would take too much memory."""
    device = model.device
    rows = max(1, sum(bool(row) for row in branches))
    longest = max((b.splice for row in branches for b in row), default=0)
    entries = mask_entries(device)
    if attn_implementation(model) == "eager":  # which has all scores of all heads at once
        entries //= model.config.get_text_config().num_attention_heads
    room = min(
        (max_tokens or default_pass_tokens(device)) // rows,
        # The largest q with rows · q · (longest + q) <= entries.
        int((math.sqrt(longest**2 + 4 * entries / rows) - longest) / 2),
    )
    portions: list[dict[int, list[int]]] = []
    for row, its in enumerate(branches):
        number, used = -1, 0
        # By splice, so that each pass reads no more of the trunk than its own branches see.
        for i in sorted(range(len(its)), key=lambda i: (its[i].splice, i)):
            size = len(its[i].token_ids)
            if number < 0 or used + size > room:
                number, used = number + 1, 0
            if number == len(portions):
                portions.append({})
            portions[number].setdefault(row, []).append(i)
            used += size
    return portions


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Branches one behind the other, by row; padded on the right."""

    ids_BQ: Tensor
    position_BQ: Tensor
    """Where each token would stand in a sequence of its own."""
    splice_BQ: Tensor
    """How much of the trunk it sees; 0 for padding."""
    owner_BQ: Tensor
    """Which branch it belongs to; −1 for padding."""


def pack(rows: Sequence[Sequence[Branch]], *, num_tokens: int, device: torch.device) -> Packed:
    """Each row's branches in `num_tokens` places."""
    columns: list[list[list[int]]] = [[], [], [], []]
    for row in rows:
        ids = [i for b in row for i in b.token_ids]
        position = [b.splice + n for b in row for n in range(len(b.token_ids))]
        splice = [b.splice for b in row for _ in b.token_ids]
        owner = [number for number, b in enumerate(row) for _ in b.token_ids]
        rest = num_tokens - len(ids)
        for column, values, fill in zip(
            columns, (ids, position, splice, owner), (0, 0, 0, -1), strict=True
        ):
            column.append(values + [fill] * rest)
    ids_BQ, position_BQ, splice_BQ, owner_BQ = (torch.tensor(c, device=device) for c in columns)
    return Packed(ids_BQ=ids_BQ, position_BQ=position_BQ, splice_BQ=splice_BQ, owner_BQ=owner_BQ)


def branch_mask(packed: Packed, num_trunk: int, *, window: int | None = None) -> Tensor:
    """[B, 1, Q, num_trunk + Q], True where a token may look; never a row without any True."""
    key_L = torch.arange(num_trunk, device=packed.ids_BQ.device)
    step_Q = torch.arange(packed.ids_BQ.shape[1], device=packed.ids_BQ.device)
    trunk_BQL = key_L < packed.splice_BQ[:, :, None]
    own_BQQ = packed.owner_BQ[:, :, None] == packed.owner_BQ[:, None, :]
    own_BQQ &= step_Q <= step_Q[:, None]
    if window is not None:
        trunk_BQL &= key_L > packed.position_BQ[:, :, None] - window
        own_BQQ &= step_Q > step_Q[:, None] - window
    return torch.cat([trunk_BQL, own_BQQ], dim=-1)[:, None]


def _read_packed(model: Any, layers: Layers, rows: Mapping[int, Sequence[Branch]]) -> Tensor:
    """One pass: hidden states [rows, Q, D]."""
    device = layers[0][0].device
    num_trunk = max(b.splice for row in rows.values() for b in row)
    num_tokens = max(sum(len(b.token_ids) for b in row) for row in rows.values())
    # Attention kernels copy a mask whose rows are no multiple of 8 long.
    num_tokens += -(num_trunk + num_tokens) % 8
    packed = pack(list(rows.values()), num_tokens=num_tokens, device=device)
    everyone = len(rows) == layers[0][0].shape[0]
    which: Any = slice(None) if everyone else torch.tensor(list(rows), device=device)
    cache = Cache(
        layers=[_LentLayer(k[which, :, :num_trunk], v[which, :, :num_trunk]) for k, v in layers]
    )
    masks = {
        kind: format_mask(model, branch_mask(packed, num_trunk, window=window))
        for kind, window in windows_of(model).items()
    }
    with use_gqa_attention(model):
        out = model.base_model(
            input_ids=packed.ids_BQ,
            # Models with several kinds of layers take a mask for each.
            attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
            position_ids=packed.position_BQ,
            past_key_values=cache,
            use_cache=True,
        )
    hidden: Tensor = out.last_hidden_state
    return hidden


# ── tried on a small example ─────────────────────────────────────────────────────────────────────


@torch.no_grad()
def branching_problem(model: Any) -> str | None:
    """Why branches of this model take a pass each; None: they can share one trunk.

    Beside the settings a tiny example is tried, because a model may do as it likes with a mask.
    """
    why = find_unsupported_attention(model)
    if why is not None:
        return why
    ids = [1 + i % (model.get_input_embeddings().weight.shape[0] - 1) for i in range(60)]
    trunk = tuple(ids[:8])
    branches = [
        Branch(trajectory="", turn=0, splice=s, token_ids=tuple(ids[-n:]), scored=(False,) * n)
        for s, n in ((8, 5), (3, 6), (0, 40))
    ]
    with eval_mode(model):
        return run_probe(model, lambda: max(_example_errors(model, trunk, branches)))


def _example_errors(
    model: Any, trunk: tuple[int, ...], branches: Sequence[Branch]
) -> Iterator[float]:
    """Of each branch, how far its hidden states are from those of a pass of its own."""
    cache = trunk_cache()
    model.base_model(
        input_ids=torch.tensor([trunk], device=model.device), past_key_values=cache, use_cache=True
    )
    (shared,) = branch_hidden(model, cache, [len(trunk)], [branches])
    for branch, shared_ND in zip(branches, shared, strict=True):
        yield distance_from_plain_forward(
            model, [*trunk[: branch.splice], *branch.token_ids], shared_ND
        )


# ── requests ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Of requests that shared a pass."""

    indices: Sequence[int]
    hidden_ND: Tensor
    """Of their trunks, then of all branches."""
    trunks: tuple[Sequence[SequenceSpan], Sequence[ScoreRequest]]
    """Where each lies and what it predicts; of requests whose trunks are scored."""
    branches: tuple[Sequence[SequenceSpan], Sequence[ScoreRequest]]
    """The same of all branches, request by request."""


def read_together(
    indices: Sequence[int],
    requests: Sequence[BranchRequest],
    trunk_ND: Tensor,
    places: Sequence[SequenceSpan],
    branches: Sequence[Sequence[Tensor]],
) -> Read:
    """`places`: where each request's trunk lies; `branches`: hidden states of each of its own."""
    scored = [
        (place, request.trunk())
        for request, place in zip(requests, places, strict=True)
        if request.scored is not None
    ]
    lying: list[SequenceSpan] = []
    asked: list[ScoreRequest] = []
    start = len(trunk_ND)
    for request, place, parts in zip(requests, places, branches, strict=True):
        for branch, part_ND in zip(request.branches, parts, strict=True):
            own = SequenceSpan(start=start)
            if branch.splice:  # the trunk predicts its first token
                (before,) = place.of([branch.splice - 1])
                own = SequenceSpan(start=start, prefix_start=before, num_prefix=1)
            lying.append(own)
            asked.append(request.sequence(branch, start=branch.splice - own.num_prefix))
            start += len(part_ND)
    hidden_ND = torch.cat([trunk_ND, *(part_ND for parts in branches for part_ND in parts)])
    return Read(
        indices=indices,
        hidden_ND=hidden_ND,
        trunks=([place for place, _ in scored], [request for _, request in scored]),
        branches=(lying, asked),
    )


def read_padded(
    model: Any, requests: Sequence[BranchRequest], *, pad_id: int, max_tokens: int
) -> Iterator[Read]:
    """By pass over padded trunks: for models that `kept.score_packed_branches` cannot read."""
    sizes = [r.num_read + sum(len(b.token_ids) for b in r.branches) for r in requests]
    for batch in batch_by_length(sizes, max_tokens):
        chosen = [requests[i] for i in batch]
        ids_BL = pad_right([r.token_ids[: r.num_read] for r in chosen], pad_id, model.device)
        cache = trunk_cache()
        with eval_mode(model), use_gqa_attention(model):
            out = model.base_model(input_ids=ids_BL, past_key_values=cache, use_cache=True)
        trunk_ND = out.last_hidden_state.flatten(0, 1)
        found = branch_hidden(
            model,
            cache,
            [r.num_read for r in chosen],
            [r.branches for r in chosen],
            max_tokens=max_tokens,
        )
        del out, cache  # the keys and values, before there are logits
        places = [SequenceSpan(start=row * ids_BL.shape[1]) for row in range(len(batch))]
        yield read_together(batch, chosen, trunk_ND, places, found)
