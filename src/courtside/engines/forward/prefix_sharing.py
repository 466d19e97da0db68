"""Sequences that begin alike, as the samples of one prompt do: the beginning lies in a row once.

Each of them then has only its own rest there, which looks at the beginning's keys and at its own.
This module knows ids and places, no tensors: which sequences share what, where each of their
positions lies, and which of them go into one pass so that they can share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from courtside.engines.forward.batching import batch_by_size

MIN_PREFIX_TOKENS = 16
"""A shorter beginning is not worth laying out keys for."""
MIN_PREFIX_FRACTION = 1 / 16
"""Of a sequence, that its beginning must be: laying out all of its keys costs about as much as
computing a fiftieth of its tokens (docs/performance.md)."""
MAX_SUFFIX_TOKENS = 1024
"""Tokens that a pass may have beside a shared beginning: four answers of 256, which a CPU's passes
of 512 would each read with a prompt of their own. Where a pass is kept for its way back it takes
more memory, which a short beginning does not repay: then twice the beginning at most."""

Ids = Sequence[int]


# ── which ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixGroup:
    """Sequences that share their first `size` ids."""

    members: tuple[int, ...]
    """Their indices, at least two."""
    size: int

    @property
    def saved(self) -> int:
        return (len(self.members) - 1) * self.size


@dataclass(slots=True)
class _Open:
    """Neighbours in sorted order that have `size` ids in common, from the `first` on."""

    size: int
    first: int
    inside: list[PrefixGroup] = field(default_factory=list)
    """The best for those that have more in common."""


def find_prefix_groups(sequences: Sequence[Ids]) -> list[PrefixGroup]:
    """Disjoint groups; a sequence may be in none.

    A beginning has one level: where all sequences share some instructions, and those of a group a
    question too, either is shared, whichever saves more tokens. Some of the sequences alone can
    always do what they do here, so that a pass over them never computes more than was planned.
    """
    rows = [tuple(ids) for ids in sequences]
    order = sorted(range(len(rows)), key=rows.__getitem__)
    open_ = [_Open(0, 0)]
    for end in range(1, len(order) + 1):
        common = 0
        if end < len(order):
            common = _common(rows[order[end - 1]], rows[order[end]])
        first, best = end - 1, list[PrefixGroup]()
        while open_[-1].size > common:
            closed = open_.pop()
            closed.inside += best
            first = closed.first
            best = _better(rows, order[first:end], closed)
        if open_[-1].size < common:
            open_.append(_Open(common, first))
        open_[-1].inside += best
    return open_[0].inside


def _better(sequences: Sequence[Ids], indices: Sequence[int], closed: _Open) -> list[PrefixGroup]:
    """One group of all whom it pays for, or the groups among them."""
    size = closed.size
    members = [i for i in indices if size >= MIN_PREFIX_FRACTION * len(sequences[i])]
    if size < MIN_PREFIX_TOKENS or len(members) < 2:
        return closed.inside
    whole = PrefixGroup(members=tuple(sorted(members)), size=size)
    return [whole] if whole.saved > sum(g.saved for g in closed.inside) else closed.inside


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many ids they have in common from the first on; by halves, compared at C's speed."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


# ── where ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpan:
    """Where in a row the positions of one sequence lie."""

    start: int
    """Of its own ids."""
    prefix_start: int = 0
    num_prefix: int = 0
    """How many of its positions lie in a beginning that it shares; they come first."""

    def of(self, positions: Iterable[int]) -> list[int]:
        shared, own = self.prefix_start, self.start - self.num_prefix
        return [i + (shared if i < self.num_prefix else own) for i in positions]

    def slices(self, count: int) -> list[slice]:
        """Its first `count` positions, in order; none of the slices is empty."""
        shared = min(count, self.num_prefix)
        found = [
            slice(self.prefix_start, self.prefix_start + shared),
            slice(self.start, self.start + count - shared),
        ]
        return [its for its in found if its.start < its.stop]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSegment:
    """Ids that lie together in a row: a beginning, a rest or a whole sequence."""

    ids: tuple[int, ...]
    first: int = 0
    """The position of its first id."""
    prefix: int | None = None
    """Index of the part whose keys it looks at before its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    parts: tuple[PackedSegment, ...]
    places: tuple[SequenceSpan, ...]
    """One a sequence."""

    @property
    def num_tokens(self) -> int:
        return sum(len(part.ids) for part in self.parts)


def pack_sequences(sequences: Sequence[Ids], *, shared: bool) -> PackedBatch:
    """The sequences one behind the other; `shared`: what a group has in common only once."""
    groups = find_prefix_groups(sequences) if shared else []
    parts: list[PackedSegment] = []
    # Of each sequence: the parts that hold its beginning and its own ids, None where it has none.
    held: dict[int, tuple[int | None, int | None]] = {}
    for group in groups:
        prefix = len(parts)
        parts.append(PackedSegment(ids=tuple(sequences[group.members[0]][: group.size])))
        for i in group.members:
            rest = tuple(sequences[i][group.size :])
            held[i] = prefix, len(parts) if rest else None
            if rest:
                parts.append(PackedSegment(ids=rest, first=group.size, prefix=prefix))
    for i, ids in enumerate(sequences):
        if i not in held:
            held[i] = None, len(parts)
            parts.append(PackedSegment(ids=tuple(ids)))
    starts = [0, *accumulate(len(part.ids) for part in parts)]
    places = []
    for i in range(len(sequences)):
        before, own = held[i]
        start = 0 if own is None else starts[own]
        if before is None:
            places.append(SequenceSpan(start=start))
        else:
            size = len(parts[before].ids)
            places.append(SequenceSpan(start=start, prefix_start=starts[before], num_prefix=size))
    return PackedBatch(parts=tuple(parts), places=tuple(places))


# ── together ─────────────────────────────────────────────────────────────────────────────────────


def batch_by_prefix(
    units: Sequence[Sequence[Ids]],
    max_tokens: int,
    *,
    max_shared_tokens: int | None,
    for_backward: bool = False,
) -> list[list[int]]:
    """Indices of units (sequences that must share a pass) by pass; largest first.

    A pass has at most `max_tokens`, a shared beginning counted once; one with a shared beginning
    may be larger (`MAX_SUFFIX_TOKENS`), up to `max_shared_tokens`: else no two long
    sequences would ever share theirs. A group that does not fit is cut, each with its prefix.
    `for_backward`: its activations are kept.
    """
    owner = [number for number, unit in enumerate(units) for _ in unit]
    sequences = [ids for unit in units for ids in unit]
    own = [sum(len(ids) for ids in unit) for unit in units]
    bundles: list[list[int]] = []
    sizes: list[int] = []
    left = dict.fromkeys(range(len(units)))
    for group in find_prefix_groups(sequences):
        # A unit goes with the first group that has a sequence of it.
        its = [u for u in dict.fromkeys(owner[i] for i in group.members) if u in left]
        rest = {u: own[u] for u in its}
        for i in group.members:
            if owner[i] in rest:
                rest[owner[i]] -= group.size
        room = group.size + (
            min(MAX_SUFFIX_TOKENS, 2 * group.size) if for_backward else MAX_SUFFIX_TOKENS
        )
        room = max(max_tokens, room if max_shared_tokens is None else min(room, max_shared_tokens))
        for piece in batch_by_size([rest[u] for u in its], room - group.size):
            bundles.append([its[k] for k in piece])
            sizes.append(group.size + sum(rest[its[k]] for k in piece))
        for u in its:
            del left[u]
    bundles += [[u] for u in left]
    sizes += [own[u] for u in left]
    return [[u for b in batch for u in bundles[b]] for batch in batch_by_size(sizes, max_tokens)]
