# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The k likeliest words of each row of logits, in two sweeps over it, exactly.

First sweep: the maximum of each lane, of which a row has several times k. The k-th largest of these
is below k words at least, and above nearly all others. Second sweep: the few words that are not
below it are written down; only those are sorted. A row with more of them than there is room for
(equal logits by the hundred, or all of the likeliest in a few lanes) narrows the bound down by
bisection, in a kernel of its own that other rows leave at once.

Words are ordered by logit and then by number, which makes all of them different: a key of 64 bits,
the logit's above, the number's complement below. NaN stands above everything, as in `torch.topk`.
Nothing here waits for the GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOWEST = tl.constexpr(-(2**31))
"""Below the upper half of any key."""
WORD = tl.constexpr(0xFFFFFFFF)
NO_KEY = -(2**63)
"""In places that no word took."""


def fits(num_words: int, k: int, *, num_warps: int, width: int) -> bool:
    """Whether lanes are many enough for k, and words for the lanes; else sorting is as good."""
    num_lanes = 32 * num_warps
    return 2 * k <= num_lanes and num_words >= 4 * num_lanes * width


def likeliest(values_NV: Tensor, k: int, *, num_warps: int = 8, room: int | None = None) -> Tensor:
    """Ids [N, k], likeliest first; of equal ones the lower number. `room`: places for candidates,
    a power of 2 above k."""
    num_rows, num_words = values_NV.shape
    width = 16 // values_NV.element_size()
    assert fits(num_words, k, num_warps=num_warps, width=width) and values_NV.stride(1) == 1
    room = room or 4 * triton.next_power_of_2(k)
    keys_NC = torch.full((num_rows, room), NO_KEY, dtype=torch.int64, device=values_NV.device)
    counts_2N = torch.zeros(2, num_rows, dtype=torch.int32, device=values_NV.device)
    bounds_N = torch.empty(num_rows, dtype=torch.int32, device=values_NV.device)
    for kernel in (select_kernel, crowded_kernel) if num_rows else ():
        kernel[(num_rows,)](
            values_NV, keys_NC, counts_2N, bounds_N, values_NV.stride(0), num_rows, k,
            NUM_WORDS=num_words, ROOM=room, LANES=32 * num_warps, WIDTH=width,
            num_warps=num_warps,
        )  # fmt: skip
    best_NK: Tensor = keys_NC.topk(k, dim=-1).values
    ids_NK: Tensor = WORD.value - (best_NK & WORD.value)
    return ids_NK


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
def _write_down(row, keys, count, bound, NUM_WORDS: tl.constexpr, ROOM: tl.constexpr,
                LANES: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """All keys that are not below `bound`, in any order; `count` has their number afterwards."""
    here = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    BLOCK: tl.constexpr = LANES * WIDTH
    WHOLE: tl.constexpr = NUM_WORDS // BLOCK * BLOCK
    for MASKED in tl.static_range(2):
        for start in range(MASKED * WHOLE, WHOLE + MASKED * (NUM_WORDS - WHOLE), BLOCK):
            at = start + here
            key = _whole(_keys(row, at, NUM_WORDS, MASKED), at)
            hit = key >= bound
            place = tl.atomic_add(count + tl.zeros_like(at), 1, mask=hit, sem="relaxed")
            tl.store(keys + place, key, mask=hit & (place < ROOM))


@triton.jit(do_not_specialize=["num_rows", "k"])
def select_kernel(
    values, keys, counts, bounds, stride, num_rows, k,
    NUM_WORDS: tl.constexpr, ROOM: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One row: its bound, and what is not below it as far as there is room."""
    n = tl.program_id(0)
    row = values + n.to(tl.int64) * stride
    here = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    BLOCK: tl.constexpr = LANES * WIDTH
    WHOLE: tl.constexpr = NUM_WORDS // BLOCK * BLOCK
    top = tl.full([LANES], LOWEST, tl.int32)
    for MASKED in tl.static_range(2):
        for start in range(MASKED * WHOLE, WHOLE + MASKED * (NUM_WORDS - WHOLE), BLOCK):
            top = tl.maximum(top, tl.max(_keys(row, start + here, NUM_WORDS, MASKED), 1))
    ordered = tl.sort(top, descending=True)
    bound = tl.max(tl.where(tl.arange(0, LANES) == k - 1, ordered, LOWEST), 0)
    tl.store(bounds + n, bound)
    _write_down(row, keys + n.to(tl.int64) * ROOM, counts + n, bound.to(tl.int64) << 32,
                NUM_WORDS, ROOM, LANES, WIDTH)  # fmt: skip


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


@triton.jit(do_not_specialize=["num_rows", "k"])
def crowded_kernel(
    values, keys, counts, bounds, stride, num_rows, k,
    NUM_WORDS: tl.constexpr, ROOM: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One row, where more than `ROOM` words are not below its bound: with a bound that fits."""
    n = tl.program_id(0)
    count = tl.load(counts + n)
    if count > ROOM:
        row = values + n.to(tl.int64) * stride
        own = keys + n.to(tl.int64) * ROOM
        low = tl.load(bounds + n).to(tl.int64) << 32
        high = low * 0 + 0x7FFFFFFFFFFFFFFF
        # Above `low` are k words or more, above `high` fewer. All keys differ, so the two cannot
        # meet before no more than fit are left.
        while count > ROOM:
            middle = (low >> 1) + (high >> 1) + (low & high & 1)
            found = _count(row, middle, NUM_WORDS, LANES, WIDTH)
            enough = found >= k
            low = tl.where(enough, middle, low)
            count = tl.where(enough, found, count)
            high = tl.where(enough, high, middle)
        place = tl.arange(0, ROOM)
        tl.store(own + place, tl.zeros_like(place).to(tl.int64) - 0x7FFFFFFFFFFFFFFF)
        tl.debug_barrier()
        _write_down(row, own, counts + num_rows + n, low, NUM_WORDS, ROOM, LANES, WIDTH)
