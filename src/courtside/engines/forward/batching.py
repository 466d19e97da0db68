"""How token sequences form batches: padded by length, or packed with shared prefixes.

Prefix sharing: a prefix that several sequences have in common is computed once per batch. Samples
of one prompt are the usual case. Each then has only its suffix in the batch, which attends to the
keys of the prefix and to its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

MIN_PREFIX_TOKENS = 16
"""A shorter prefix does not repay gathering its keys for every suffix."""
MIN_PREFIX_FRACTION = 1 / 16
"""Of a sequence: gathering all of its keys costs about as much as computing a fiftieth of its
tokens (docs/performance.md)."""
MAX_SUFFIX_TOKENS = 1024
"""Tokens that a batch may have in addition to a shared prefix: four answers of 256, where batches
of 512 on a CPU would each compute the prompt again. Activations of a training step take memory that
a short prefix does not repay, so there it is twice the prefix at most."""

Ids = Sequence[int]


def default_pass_tokens(device: torch.device) -> int:
    """Tokens of one forward pass that keep the device busy. A CPU would gain a little from more,
    at the price of more activations in a training step."""
    return 16384 if device.type == "cuda" else 512


def batch_by_length(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices in padded batches of similar length, each of at most `max_tokens` with padding.

    Longest first, so that a run that does not fit in memory fails at once. A sequence longer than
    the budget gets a batch of its own.
    """
    batches: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batches and longest * (len(batches[-1]) + 1) <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
            longest = lengths[index]
    return batches


def batch_by_size(sizes: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices in batches whose sizes add up to at most `max_tokens`: first-fit decreasing.

    An item larger than the budget gets a batch of its own.
    """
    batches: list[list[int]] = []
    free_tokens: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        size = sizes[index]
        target = next((b for b, free in enumerate(free_tokens) if size <= free), None)
        if target is None:
            batches.append([])
            free_tokens.append(max_tokens)
            target = len(batches) - 1
        batches[target].append(index)
        free_tokens[target] -= size
    return batches


def split_prefill(
    lengths: Sequence[int], rows: Sequence[int], max_tokens: int
) -> Iterator[Sequence[int]]:
    """Neighboring rows in batches of at most `max_tokens`, padding included.

    A row less than half as long as the longest of its batch starts another: its padding would cost
    as much as a forward pass of its own.
    """
    first, longest = 0, 0
    for index, length in enumerate(lengths):
        longest = max(longest, length)
        is_full = longest * (index - first + 1) > max_tokens
        if index > first and (is_full or 2 * length < longest):
            yield rows[first:index]
            first, longest = index, length
    if rows:
        yield rows[first:]


def batch_by_prefix(
    units: Sequence[Sequence[Ids]],
    max_tokens: int,
    *,
    max_shared_tokens: int | None,
    for_backward: bool = False,
) -> list[list[int]]:
    """Indices of units (sequences that must share a batch) by batch; largest first.

    A batch has at most `max_tokens`, a shared prefix counted once. A batch with a shared prefix may
    be larger by `MAX_SUFFIX_TOKENS`, up to `max_shared_tokens`: otherwise long sequences could
    never share a prefix. A group that does not fit is split, each part with the prefix.
    """
    unit_of = [number for number, unit in enumerate(units) for _ in unit]
    sequences = [ids for unit in units for ids in unit]
    unit_tokens = [sum(len(ids) for ids in unit) for unit in units]
    bundles: list[list[int]] = []
    bundle_tokens: list[int] = []
    remaining = dict.fromkeys(range(len(units)))
    for group in find_prefix_groups(sequences):
        # A unit goes with the first group that has one of its sequences.
        members = [u for u in dict.fromkeys(unit_of[i] for i in group.members) if u in remaining]
        suffix_tokens = {u: unit_tokens[u] for u in members}
        for i in group.members:
            if unit_of[i] in suffix_tokens:
                suffix_tokens[unit_of[i]] -= group.num_tokens
        extra = min(MAX_SUFFIX_TOKENS, 2 * group.num_tokens) if for_backward else MAX_SUFFIX_TOKENS
        limit = group.num_tokens + extra
        if max_shared_tokens is not None:
            limit = min(limit, max_shared_tokens)
        capacity = max(max_tokens, limit) - group.num_tokens
        for part in batch_by_size([suffix_tokens[u] for u in members], capacity):
            bundles.append([members[k] for k in part])
            bundle_tokens.append(group.num_tokens + sum(suffix_tokens[members[k]] for k in part))
        for u in members:
            del remaining[u]
    bundles += [[u] for u in remaining]
    bundle_tokens += [unit_tokens[u] for u in remaining]
    batches = batch_by_size(bundle_tokens, max_tokens)
    return [[u for b in batch for u in bundles[b]] for batch in batches]


# ── shared prefixes ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixGroup:
    """Sequences that share their first `num_tokens` ids."""

    members: tuple[int, ...]
    """Their indices, at least two."""
    num_tokens: int

    @property
    def saved_tokens(self) -> int:
        return (len(self.members) - 1) * self.num_tokens


@dataclass(slots=True)
class _OpenPrefix:
    """Neighbors in sorted order, from index `first` on, that share `num_tokens` ids."""

    num_tokens: int
    first: int
    inner_groups: list[PrefixGroup] = field(default_factory=list)
    """The best groups among those that share a longer prefix."""


def find_prefix_groups(
    sequences: Sequence[Ids],
    *,
    min_tokens: int = MIN_PREFIX_TOKENS,
    min_fraction: float = MIN_PREFIX_FRACTION,
) -> list[PrefixGroup]:
    """Disjoint groups; a sequence may be in none.

    Sharing has one level: where all sequences share a system prompt, and those of a group a
    question too, the one that saves more tokens is shared. Every subset of the sequences can share
    at least as much, so that a pass over a part never computes more than was planned.
    """
    rows = [tuple(ids) for ids in sequences]
    order = sorted(range(len(rows)), key=rows.__getitem__)
    stack = [_OpenPrefix(0, 0)]
    for end in range(1, len(order) + 1):
        common = 0
        if end < len(order):
            common = common_length(rows[order[end - 1]], rows[order[end]])
        first, groups = end - 1, list[PrefixGroup]()
        while stack[-1].num_tokens > common:
            closed = stack.pop()
            first, num_tokens = closed.first, closed.num_tokens
            members = [i for i in order[first:end] if num_tokens >= min_fraction * len(rows[i])]
            outer = PrefixGroup(members=tuple(sorted(members)), num_tokens=num_tokens)
            groups = closed.inner_groups + groups
            if num_tokens >= min_tokens and len(members) > 1:
                # One group of all members or the groups among them, whichever saves more tokens.
                saved_inside = sum(group.saved_tokens for group in groups)
                groups = [outer] if outer.saved_tokens > saved_inside else groups
        if stack[-1].num_tokens < common:
            stack.append(_OpenPrefix(common, first))
        stack[-1].inner_groups += groups
    return stack[0].inner_groups


def common_length(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Length of the common prefix, by bisection: slices are compared at C speed."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


# ── packing ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpan:
    """Where the positions of one sequence are in a batch."""

    start: int
    """Of its suffix, or of all of it."""
    prefix_start: int = 0
    num_prefix: int = 0
    """How many of its first positions are in a shared prefix."""

    def indices(self, positions: Iterable[int]) -> list[int]:
        prefix_offset, suffix_offset = self.prefix_start, self.start - self.num_prefix
        return [i + (prefix_offset if i < self.num_prefix else suffix_offset) for i in positions]

    def slices(self, count: int) -> list[slice]:
        """Its first `count` positions in order, as non-empty slices."""
        in_prefix = min(count, self.num_prefix)
        slices = [
            slice(self.prefix_start, self.prefix_start + in_prefix),
            slice(self.start, self.start + count - in_prefix),
        ]
        return [s for s in slices if s.start < s.stop]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSegment:
    """Consecutive ids of a packed batch: a shared prefix, a suffix or a whole sequence."""

    ids: tuple[int, ...]
    first_position: int = 0
    """Position id of its first token."""
    prefix: int | None = None
    """Index of the segment whose keys it attends to before its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    segments: tuple[PackedSegment, ...]
    spans: tuple[SequenceSpan, ...]
    """One per sequence."""

    @property
    def num_tokens(self) -> int:
        return sum(len(segment.ids) for segment in self.segments)


def pack_sequences(
    sequences: Sequence[Ids], *, share_prefixes: bool, sharing_keys: Sequence[Ids] | None = None
) -> PackedBatch:
    """Sequences concatenated in one row, shared prefixes only once. No segment is empty.

    `sharing_keys`: a number for each token, by which prefixes are compared; None: its id.
    """
    keys = sequences if sharing_keys is None else sharing_keys
    groups = find_prefix_groups(keys) if share_prefixes else []
    segments: list[PackedSegment] = []
    spans: dict[int, SequenceSpan] = {}
    num_tokens = 0

    def append(ids: Ids, **settings: int) -> None:
        nonlocal num_tokens
        segments.append(PackedSegment(ids=tuple(ids), **settings))
        num_tokens += len(ids)

    for group in groups:
        prefix, prefix_start, num_prefix = len(segments), num_tokens, group.num_tokens
        append(sequences[group.members[0]][:num_prefix])
        for i in group.members:
            spans[i] = SequenceSpan(
                start=num_tokens, prefix_start=prefix_start, num_prefix=num_prefix
            )
            if len(sequences[i]) > num_prefix:
                append(sequences[i][num_prefix:], first_position=num_prefix, prefix=prefix)
    for i, ids in enumerate(sequences):
        if i not in spans:
            spans[i] = SequenceSpan(start=num_tokens)
            append(ids)
    return PackedBatch(
        segments=tuple(segments), spans=tuple(spans[i] for i in range(len(sequences)))
    )


# ── tensors ──────────────────────────────────────────────────────────────────────────────────────


def tensor_on(values: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Values of the host as a tensor on the device, without waiting for what the device does."""
    return copy_to_device(torch.tensor(values, dtype=dtype), device)


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device, copied asynchronously from pinned memory."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def pad_right(sequences: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> Tensor:
    """Causal attention never attends to padding on the right, so no mask is needed."""
    longest = max(len(ids) for ids in sequences)
    rows = [list(ids) + [pad_id] * (longest - len(ids)) for ids in sequences]
    return tensor_on(rows, dtype=torch.long, device=device)


def pad_left(
    sequences: Sequence[Sequence[int]], pad_id: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Ids and attention mask, aligned at the end, where decoding continues."""
    longest = max(len(ids) for ids in sequences)
    rows = [[pad_id] * (longest - len(ids)) + list(ids) for ids in sequences]
    mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in sequences]
    return (
        torch.tensor(rows, dtype=torch.long, device=device),
        torch.tensor(mask, dtype=torch.long, device=device),
    )
