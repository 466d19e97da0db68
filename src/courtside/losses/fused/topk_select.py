# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The k likeliest words of each row of logits, exactly, in one kernel that looks at few of them.

The sweep for the softmax (`fused_kernels`) leaves the largest logit of every WIDTH neighbouring
words, a group. Groups are dealt out to lanes, several times k of them; the k-th largest of what the
lanes have is above nearly all words, but not above k of them. The few groups that reach it are
looked up, and their words that reach it compared with each other. A row with more of them than
there is room for (equal logits by the hundred, or all of the likeliest in a few lanes) narrows the
bound down by bisection first, in sweeps over all of it.

Words are ordered by logit and then by number, which makes all of them different: a key of 64 bits,
the logit's above, the number's complement below. What comes out does not depend on the order in
which threads write. Among NaN any words come out. Nothing here waits for the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl
from torch import Tensor

LOWEST = tl.constexpr(-(2**31))
"""Below the upper half of any key."""
NO_KEY = tl.constexpr(-(2**63))
HIGHEST = tl.constexpr(2**63 - 1)
WORD = tl.constexpr(0xFFFFFFFF)
COMPARED = tl.constexpr(8)
"""Candidates that each is compared with at a time: what registers hold."""
MOST_WARPS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TopKBuffers:
    """The likeliest words of one side's rows, likeliest first, with what both sides say of them."""

    ids_NK: Tensor
    own_NK: Tensor
    """Logits of the side whose likeliest these are, as they come from the product; float32."""
    other_NK: Tensor
    scratch_N2C: Tensor
    """Room for candidates: groups, then words."""
    counts_N3: Tensor
    """Zeros, which are counted up: a row is filled once."""

    def rows(self, rows: slice) -> TopKBuffers:
        return TopKBuffers(
            **{field.name: getattr(self, field.name)[rows] for field in fields(self)}
        )


def allocate_top_k(
    num_rows: int, k: int, device: torch.device, *, room: int | None = None
) -> TopKBuffers:
    """For all parts of the rows at once. `room`: candidates a row, a power of 2 above k."""

    def empty(*width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_rows, *width, dtype=dtype, device=device)

    return TopKBuffers(
        ids_NK=empty(k, dtype=torch.int64),
        own_NK=empty(k, dtype=torch.float32),
        other_NK=empty(k, dtype=torch.float32),
        scratch_N2C=empty(2, room or 4 * triton.next_power_of_2(k), dtype=torch.int64),
        counts_N3=empty(3, dtype=torch.int32).zero_(),
    )


def allocate_group_maxima(values_NV: Tensor, *, lanes: int, width: int) -> Tensor:
    """[rows, groups], in the dtype of the logits: each is one of them."""
    block = lanes * width
    return values_NV.new_empty(len(values_NV), -(-values_NV.shape[1] // block) * lanes)


def num_select_warps(vocab_size: int, k: int, *, least: int, width: int) -> int | None:
    """So many that there are lanes enough for k; None: not words enough for the lanes, or lanes for
    the words, and sorting is as good."""
    warps = max(least, triton.next_power_of_2(2 * k) // 32)
    return warps if warps <= MOST_WARPS and vocab_size >= 128 * warps * width else None


def select_top_k(
    values_NV: Tensor,
    other_NV: Tensor,
    tops_NG: Tensor,
    out: TopKBuffers,
    *,
    lanes: int,
    width: int,
    num_warps: int,
) -> None:
    """Fill `out`; of equally likely words the lower number. `tops_NG`: the largest of every `width`
    words, padded to whole tiles of so many lanes."""
    num_rows, vocab_size = values_NV.shape
    if not num_rows:
        return
    assert values_NV.stride(1) == other_NV.stride(1) == out.ids_NK.stride(1) == 1
    select_kernel[(num_rows,)](
        values_NV, other_NV, tops_NG, out.ids_NK, out.own_NK, out.other_NK, out.scratch_N2C,
        out.counts_N3, values_NV.stride(0), other_NV.stride(0), out.ids_NK.shape[1],
        NUM_WORDS=vocab_size, ROOM=out.scratch_N2C.shape[2], LANES=lanes, WIDTH=width,
        num_warps=num_warps,
    )  # fmt: skip


def select_top_k_by_sorting(values_NV: Tensor, other_NV: Tensor, out: TopKBuffers) -> None:
    """The same where there are no lanes enough."""
    own_NK, ids_NK = values_NV.topk(out.ids_NK.shape[1], dim=-1)
    out.ids_NK.copy_(ids_NK)
    out.own_NK.copy_(own_NK)
    out.other_NK.copy_(other_NV.gather(-1, ids_NK))


@triton.jit
def _key(x):
    """The upper halves of keys: integers in the order of these logits."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # −0 + 0 = 0: one zero only
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _keys(row, at, NUM_WORDS: tl.constexpr):
    """Those of the words `at`; LOWEST past the end of the row."""
    inside = at < NUM_WORDS
    return tl.where(inside, _key(tl.load(row + at, inside, 0.0).to(tl.float32)), LOWEST)


@triton.jit
def _whole(key, at):
    return (key.to(tl.int64) << 32) | (WORD - at.to(tl.int64))


@triton.jit
def _write_down(row, keys, count, bound, NUM_WORDS: tl.constexpr, ROOM: tl.constexpr,
                LANES: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """All keys that are not below `bound`, in any order; `count` has their number afterwards."""
    here = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    for start in range(0, NUM_WORDS, LANES * WIDTH):
        at = start + here
        key = _whole(_keys(row, at, NUM_WORDS), at)
        hit = key >= bound
        place = tl.atomic_add(count + tl.zeros_like(at), 1, mask=hit, sem="relaxed")
        tl.store(keys + place, key, mask=hit & (place < ROOM))


@triton.jit
def _count(row, bound, NUM_WORDS: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """How many keys are not below `bound`."""
    here = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    count = tl.zeros([LANES], tl.int32)
    for start in range(0, NUM_WORDS, LANES * WIDTH):
        key = _whole(_keys(row, start + here, NUM_WORDS), start + here)
        count += tl.sum((key >= bound).to(tl.int32), 1)
    return tl.sum(count, 0)


@triton.jit(do_not_specialize=["k"])
def select_kernel(
    values, others, tops, ids, own_logits, other_logits, scratch, counts, stride, other_stride, k,
    NUM_WORDS: tl.constexpr, ROOM: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One row."""
    n = tl.program_id(0).to(tl.int64)
    row = values + n * stride
    groups = scratch + 2 * n * ROOM
    keys = groups + ROOM
    counts += 3 * n
    lane = tl.arange(0, LANES)
    TILES: tl.constexpr = (NUM_WORDS + LANES * WIDTH - 1) // (LANES * WIDTH)
    tops += n * (TILES * LANES)
    top = tl.full([LANES], LOWEST, tl.int32)
    for tile in range(TILES):
        top = tl.maximum(top, _key(tl.load(tops + tile * LANES + lane).to(tl.float32)))
    ordered = tl.sort(top, descending=True)
    bound = tl.max(tl.where(lane == k - 1, ordered, LOWEST), 0)
    for tile in range(TILES):
        group = tile * LANES + lane
        hit = _key(tl.load(tops + group).to(tl.float32)) >= bound
        place = tl.atomic_add(counts + tl.zeros_like(group), 1, mask=hit, sem="relaxed")
        tl.store(groups + place, group.to(tl.int64), mask=hit & (place < ROOM))
    tl.debug_barrier()
    num_groups = tl.load(counts, volatile=True)
    count = num_groups
    if num_groups <= ROOM:
        place = tl.arange(0, ROOM)
        group = tl.load(groups + place, mask=place < num_groups, other=TILES * LANES)
        at = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        upper = _keys(row, at, NUM_WORDS)
        hit = upper >= bound  # past the end of a row keys are LOWEST, which no bound is
        spot = tl.atomic_add(counts + 1 + tl.zeros_like(at), 1, mask=hit, sem="relaxed")
        tl.store(keys + spot, _whole(upper, at), mask=hit & (spot < ROOM))
        tl.debug_barrier()
        count = tl.load(counts + 1, volatile=True)
    # Fewer than k: NaN, which the maxima of groups may pass over or stand for.
    if (count > ROOM) | (count < k):
        low, high = tl.full([], NO_KEY, tl.int64), tl.full([], HIGHEST, tl.int64)
        count = tl.full([], ROOM + 1, tl.int32)
        # Not below `low` are k words or more, not below `high` one at most. All keys differ, so the
        # two cannot meet before no more than fit are left.
        while count > ROOM:
            middle = (low >> 1) + (high >> 1) + (low & high & 1)
            found = _count(row, middle, NUM_WORDS, LANES, WIDTH)
            enough = found >= k
            low = tl.where(enough, middle, low)
            count = tl.where(enough, found, count)
            high = tl.where(enough, high, middle)
        _write_down(row, keys, counts + 2, low, NUM_WORDS, ROOM, LANES, WIDTH)
        tl.debug_barrier()
    # A candidate's place is the number of those above it.
    place = tl.arange(0, ROOM)
    mine = tl.load(keys + place, mask=place < count, other=NO_KEY)
    rank = tl.zeros([ROOM], tl.int32)
    first = count * 0
    while first < count:
        against = first + tl.arange(0, COMPARED)
        theirs = tl.load(keys + against, mask=against < count, other=NO_KEY)
        rank += tl.sum((theirs[None, :] > mine[:, None]).to(tl.int32), 1)
        first += COMPARED
    kept = (place < count) & (rank < k)
    word = WORD - (mine & WORD)
    to = n * k + rank
    tl.store(ids + to, word, mask=kept)
    own = tl.load(row + word, mask=kept, other=0.0)
    tl.store(own_logits + to, own.to(tl.float32), mask=kept)
    other = tl.load(others + n * other_stride + word, mask=kept, other=0.0)
    tl.store(other_logits + to, other.to(tl.float32), mask=kept)
