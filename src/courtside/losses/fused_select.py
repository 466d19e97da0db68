# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The k likeliest words of each row of logits, in two sweeps over it, exactly, in one kernel.

First sweep: the maximum of each lane, of which a row has several times k. The k-th largest of these
is below k words at least, and above nearly all others. Second sweep: the few words that are not
below it are written down; only those are compared with each other. A row with more of them than
there is room for (equal logits by the hundred, or all of the likeliest in a few lanes) narrows the
bound down by bisection first.

Words are ordered by logit and then by number, which makes all of them different: a key of 64 bits,
the logit's above, the number's complement below. NaN stands above everything, as in `torch.topk`.
What comes out does not depend on the order in which threads write. Nothing here waits for the GPU.
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
WORD = tl.constexpr(0xFFFFFFFF)
COMPARED = tl.constexpr(8)
"""Candidates that each is compared with at a time: what registers hold."""
MOST_WARPS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Picked:
    """The likeliest words of one side's rows, likeliest first, with what both sides say of them."""

    ids_NK: Tensor
    own_NK: Tensor
    """Logits of the side whose likeliest these are, as they come from the product; float32."""
    other_NK: Tensor
    keys_NC: Tensor
    """Room for candidates."""
    counts_N2: Tensor
    """Zeros, which are counted up: a row is filled once."""

    def rows(self, rows: slice) -> Picked:
        return Picked(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


def room_for(num_rows: int, k: int, device: torch.device, *, room: int | None = None) -> Picked:
    """For all parts of the rows at once. `room`: candidates a row, a power of 2 above k."""

    def empty(width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_rows, width, dtype=dtype, device=device)

    return Picked(
        ids_NK=empty(k, torch.int64),
        own_NK=empty(k, torch.float32),
        other_NK=empty(k, torch.float32),
        keys_NC=empty(room or 4 * triton.next_power_of_2(k), torch.int64),
        counts_N2=empty(2, torch.int32).zero_(),
    )


def warps_for(num_words: int, k: int, *, least: int, width: int) -> int | None:
    """So many that there are lanes enough for k; None: not words enough for the lanes, or lanes for
    the words, and sorting is as good."""
    warps = max(least, triton.next_power_of_2(2 * k) // 32)
    return warps if warps <= MOST_WARPS and num_words >= 128 * warps * width else None


def pick(
    values_NV: Tensor,
    other_NV: Tensor,
    out: Picked,
    *,
    num_warps: int = 8,
    tiles: int = 4,
) -> None:
    """Fill `out`; of equally likely words the lower number. `tiles`: loads of a thread that are
    under way at once."""
    num_rows, num_words = values_NV.shape
    k = out.ids_NK.shape[1]
    width = 16 // values_NV.element_size()
    warps = warps_for(num_words, k, least=num_warps, width=width)
    if warps is None:
        _pick_by_sorting(values_NV, other_NV, out)
        return
    if not num_rows:
        return
    assert values_NV.stride(1) == other_NV.stride(1) == out.ids_NK.stride(1) == 1
    select_kernel[(num_rows,)](
        values_NV, other_NV, out.ids_NK, out.own_NK, out.other_NK, out.keys_NC, out.counts_N2,
        values_NV.stride(0), other_NV.stride(0), k,
        NUM_WORDS=num_words, ROOM=out.keys_NC.shape[1], LANES=32 * warps, WIDTH=width, TILES=tiles,
        num_warps=warps,
    )  # fmt: skip


def _pick_by_sorting(values_NV: Tensor, other_NV: Tensor, out: Picked) -> None:
    own_NK, ids_NK = values_NV.topk(out.ids_NK.shape[1], dim=-1)
    out.ids_NK.copy_(ids_NK)
    out.own_NK.copy_(own_NK)
    out.other_NK.copy_(other_NV.gather(-1, ids_NK))


@triton.jit
def _keys(row, at, NUM_WORDS: tl.constexpr, MASKED: tl.constexpr):
    """The upper halves of the keys of the words `at`: integers in the order of their logits."""
    if MASKED:
        x = tl.load(row + at, mask=at < NUM_WORDS, other=0.0).to(tl.float32)
    else:
        x = tl.load(row + at).to(tl.float32)
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # −0 + 0 = 0: one zero only
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    if MASKED:
        key = tl.where(at < NUM_WORDS, key, LOWEST)
    return key


@triton.jit
def _whole(key, at):
    return (key.to(tl.int64) << 32) | (WORD - at.to(tl.int64))


@triton.jit
def _write_down(row, keys, count, bound, WHOLE_KEYS: tl.constexpr, NUM_WORDS: tl.constexpr,
                ROOM: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """All keys that are not below `bound`, in any order; `count` has their number afterwards.
    `WHOLE_KEYS` = False: a bound for their upper halves."""
    here = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    BLOCK: tl.constexpr = LANES * WIDTH
    WHOLE: tl.constexpr = NUM_WORDS // BLOCK * BLOCK
    for MASKED in tl.static_range(2):
        for start in range(MASKED * WHOLE, WHOLE + MASKED * (NUM_WORDS - WHOLE), BLOCK):
            at = start + here
            upper = _keys(row, at, NUM_WORDS, MASKED)
            key = _whole(upper, at)
            if WHOLE_KEYS:  # noqa: SIM108 - decided while compiling
                hit = key >= bound
            else:
                hit = upper >= bound
            place = tl.atomic_add(count + tl.zeros_like(at), 1, mask=hit, sem="relaxed")
            tl.store(keys + place, key, mask=hit & (place < ROOM))


@triton.jit
def _count(row, bound, NUM_WORDS: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """How many keys are not below `bound`."""
    here = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    BLOCK: tl.constexpr = LANES * WIDTH
    WHOLE: tl.constexpr = NUM_WORDS // BLOCK * BLOCK
    count = tl.zeros([LANES], tl.int32)
    for MASKED in tl.static_range(2):
        for start in range(MASKED * WHOLE, WHOLE + MASKED * (NUM_WORDS - WHOLE), BLOCK):
            at = start + here
            key = _whole(_keys(row, at, NUM_WORDS, MASKED), at)
            count += tl.sum((key >= bound).to(tl.int32), 1)
    return tl.sum(count, 0)


@triton.jit(do_not_specialize=["k"])
def select_kernel(
    values, others, ids, own_logits, other_logits, scratch, counts, stride, other_stride, k,
    NUM_WORDS: tl.constexpr, ROOM: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """One row."""
    n = tl.program_id(0).to(tl.int64)
    row = values + n * stride
    keys = scratch + n * ROOM
    here = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    TILE: tl.constexpr = LANES * WIDTH
    BLOCK: tl.constexpr = TILES * TILE
    WHOLE: tl.constexpr = NUM_WORDS // BLOCK * BLOCK
    top = tl.full([LANES], LOWEST, tl.int32)
    for MASKED in tl.static_range(2):
        for start in range(MASKED * WHOLE, WHOLE + MASKED * (NUM_WORDS - WHOLE), BLOCK):
            for tile in tl.static_range(TILES):
                key = _keys(row, start + tile * TILE + here, NUM_WORDS, MASKED)
                top = tl.maximum(top, tl.max(key, 1))
    ordered = tl.sort(top, descending=True)
    bound = tl.max(tl.where(tl.arange(0, LANES) == k - 1, ordered, LOWEST), 0)
    _write_down(row, keys, counts + 2 * n, bound, False, NUM_WORDS, ROOM, LANES, WIDTH)
    tl.debug_barrier()
    count = tl.load(counts + 2 * n, volatile=True)
    if count > ROOM:
        low = bound.to(tl.int64) << 32
        high = (tl.max(top, 0).to(tl.int64) << 32) | WORD
        # Not below `low` are k words or more, not below `high` one at most. All keys differ, so the
        # two cannot meet before no more than fit are left.
        while count > ROOM:
            middle = (low >> 1) + (high >> 1) + (low & high & 1)
            found = _count(row, middle, NUM_WORDS, LANES, WIDTH)
            enough = found >= k
            low = tl.where(enough, middle, low)
            count = tl.where(enough, found, count)
            high = tl.where(enough, high, middle)
        _write_down(row, keys, counts + 2 * n + 1, low, True, NUM_WORDS, ROOM, LANES, WIDTH)
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
