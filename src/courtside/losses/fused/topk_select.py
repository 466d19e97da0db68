# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Top-k selection kernel: the k most likely tokens of each row of logits, exactly.

The softmax pass (`kernels.py`) leaves the largest logit of every WIDTH neighboring tokens, a group.
Groups are dealt out to lanes, several times k of them; the k-th largest of the lanes' maxima is
above nearly all logits, but not above k of them. The few groups that reach this bound are loaded,
and their tokens that reach it are compared with each other. A row with more candidates than
CAPACITY (hundreds of equal logits, or all of the most likely tokens in a few lanes) first narrows
the bound by bisection, in passes over the whole row.

Tokens are ordered by logit and then by id, which makes all of them different: a key of 64 bits, the
logit's above, the id's complement below. The result does not depend on the order in which threads
write. Among NaN any tokens are selected. Nothing here synchronizes with the GPU.
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
TOKEN_MASK = tl.constexpr(0xFFFFFFFF)
COMPARED = tl.constexpr(8)
"""Candidates that each is compared with at a time: what fits into registers."""
MOST_WARPS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TopKBuffers:
    """The most likely tokens of one side's rows, most likely first, with both sides' logits."""

    ids_NK: Tensor
    logits_NK: Tensor
    """Raw logits of the side whose top k these are; float32."""
    other_logits_NK: Tensor
    scratch_N2C: Tensor
    """For candidates: groups, then tokens."""
    counts_N3: Tensor
    """Zeros, which the kernel counts up: a row is filled once."""

    def rows(self, rows: slice) -> TopKBuffers:
        return TopKBuffers(
            **{field.name: getattr(self, field.name)[rows] for field in fields(self)}
        )


def allocate_top_k(
    num_rows: int, k: int, device: torch.device, *, capacity: int | None = None
) -> TopKBuffers:
    """For all parts of the rows at once. `room`: candidates per row, a power of 2 above k."""

    def empty(*width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_rows, *width, dtype=dtype, device=device)

    return TopKBuffers(
        ids_NK=empty(k, dtype=torch.int64),
        logits_NK=empty(k, dtype=torch.float32),
        other_logits_NK=empty(k, dtype=torch.float32),
        scratch_N2C=empty(2, capacity or 4 * triton.next_power_of_2(k), dtype=torch.int64),
        counts_N3=empty(3, dtype=torch.int32).zero_(),
    )


def allocate_group_maxima(values_NV: Tensor, *, lanes: int, width: int) -> Tensor:
    """[rows, groups], in the dtype of the logits."""
    block = lanes * width
    return values_NV.new_empty(len(values_NV), -(-values_NV.shape[1] // block) * lanes)


def num_select_warps(vocab_size: int, k: int, *, least: int, width: int) -> int | None:
    """As many as give enough lanes for k; None: the vocabulary is too small for the lanes, or k too
    large, and sorting is as good."""
    warps = max(least, triton.next_power_of_2(2 * k) // 32)
    return warps if warps <= MOST_WARPS and vocab_size >= 128 * warps * width else None


def select_top_k(
    values_NV: Tensor,
    other_NV: Tensor,
    maxima_NG: Tensor,
    out: TopKBuffers,
    *,
    lanes: int,
    width: int,
    num_warps: int,
) -> None:
    """Fill `out`; of equally likely tokens the lower id. `tops_NG`: the largest of every `width`
    logits, padded to whole tiles of so many lanes."""
    num_rows, vocab_size = values_NV.shape
    if not num_rows:
        return
    assert values_NV.stride(1) == other_NV.stride(1) == out.ids_NK.stride(1) == 1
    select_kernel[(num_rows,)](
        values_NV, other_NV, maxima_NG, out.ids_NK, out.logits_NK, out.other_logits_NK,
        out.scratch_N2C, out.counts_N3, values_NV.stride(0), other_NV.stride(0),
        out.ids_NK.shape[1], VOCAB_SIZE=vocab_size, CAPACITY=out.scratch_N2C.shape[2],
        LANES=lanes, WIDTH=width, num_warps=num_warps,
    )  # fmt: skip


def select_top_k_by_sorting(values_NV: Tensor, other_NV: Tensor, out: TopKBuffers) -> None:
    """The same by `torch.topk`."""
    top_NK, ids_NK = values_NV.topk(out.ids_NK.shape[1], dim=-1)
    out.ids_NK.copy_(ids_NK)
    out.logits_NK.copy_(top_NK)
    out.other_logits_NK.copy_(other_NV.gather(-1, ids_NK))


@triton.jit
def _key(x):
    """The upper halves of keys: integers in the order of these logits."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # −0 + 0 = 0: one zero only
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _keys(row, at, VOCAB_SIZE: tl.constexpr):
    """Those of the tokens `at`; LOWEST past the end of the row."""
    inside = at < VOCAB_SIZE
    return tl.where(inside, _key(tl.load(row + at, inside, 0.0).to(tl.float32)), LOWEST)


@triton.jit
def _full_key(key, at):
    return (key.to(tl.int64) << 32) | (TOKEN_MASK - at.to(tl.int64))


@triton.jit
def _store_above(row, keys, count, bound, VOCAB_SIZE: tl.constexpr, CAPACITY: tl.constexpr,
                LANES: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Store all keys that are not below `bound`, in any order, and count them in `count`."""
    offsets = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    for start in range(0, VOCAB_SIZE, LANES * WIDTH):
        at = start + offsets
        key = _full_key(_keys(row, at, VOCAB_SIZE), at)
        hit = key >= bound
        place = tl.atomic_add(count + tl.zeros_like(at), 1, mask=hit, sem="relaxed")
        tl.store(keys + place, key, mask=hit & (place < CAPACITY))


@triton.jit
def _count(row, bound, VOCAB_SIZE: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """How many keys are not below `bound`."""
    offsets = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    count = tl.zeros([LANES], tl.int32)
    for start in range(0, VOCAB_SIZE, LANES * WIDTH):
        key = _full_key(_keys(row, start + offsets, VOCAB_SIZE), start + offsets)
        count += tl.sum((key >= bound).to(tl.int32), 1)
    return tl.sum(count, 0)


@triton.jit(do_not_specialize=["k"])
def select_kernel(
    values, other_values, maxima, ids, logits, other_logits, scratch, counts, stride,
    other_stride, k, VOCAB_SIZE: tl.constexpr, CAPACITY: tl.constexpr, LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """One row."""
    n = tl.program_id(0).to(tl.int64)
    row = values + n * stride
    groups = scratch + 2 * n * CAPACITY
    keys = groups + CAPACITY
    counts += 3 * n
    lane = tl.arange(0, LANES)
    TILES: tl.constexpr = (VOCAB_SIZE + LANES * WIDTH - 1) // (LANES * WIDTH)
    maxima += n * (TILES * LANES)
    top = tl.full([LANES], LOWEST, tl.int32)
    for tile in range(TILES):
        top = tl.maximum(top, _key(tl.load(maxima + tile * LANES + lane).to(tl.float32)))
    ordered = tl.sort(top, descending=True)
    bound = tl.max(tl.where(lane == k - 1, ordered, LOWEST), 0)
    for tile in range(TILES):
        group = tile * LANES + lane
        hit = _key(tl.load(maxima + group).to(tl.float32)) >= bound
        place = tl.atomic_add(counts + tl.zeros_like(group), 1, mask=hit, sem="relaxed")
        tl.store(groups + place, group.to(tl.int64), mask=hit & (place < CAPACITY))
    tl.debug_barrier()
    num_groups = tl.load(counts, volatile=True)
    count = num_groups
    if num_groups <= CAPACITY:
        place = tl.arange(0, CAPACITY)
        group = tl.load(groups + place, mask=place < num_groups, other=TILES * LANES)
        at = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        upper = _keys(row, at, VOCAB_SIZE)
        hit = upper >= bound  # past the end of a row keys are LOWEST, which no bound is
        spot = tl.atomic_add(counts + 1 + tl.zeros_like(at), 1, mask=hit, sem="relaxed")
        tl.store(keys + spot, _full_key(upper, at), mask=hit & (spot < CAPACITY))
        tl.debug_barrier()
        count = tl.load(counts + 1, volatile=True)
    # Fewer than k: NaN, which a group's maximum may skip or propagate.
    if (count > CAPACITY) | (count < k):
        low, high = tl.full([], NO_KEY, tl.int64), tl.full([], HIGHEST, tl.int64)
        count = tl.full([], CAPACITY + 1, tl.int32)
        # k tokens or more are not below `low`, one at most is not below `high`. All keys differ, so
        # the two cannot meet before no more than CAPACITY are left.
        while count > CAPACITY:
            middle = (low >> 1) + (high >> 1) + (low & high & 1)
            num_above = _count(row, middle, VOCAB_SIZE, LANES, WIDTH)
            enough = num_above >= k
            low = tl.where(enough, middle, low)
            count = tl.where(enough, num_above, count)
            high = tl.where(enough, high, middle)
        _store_above(row, keys, counts + 2, low, VOCAB_SIZE, CAPACITY, LANES, WIDTH)
        tl.debug_barrier()
    # A candidate's rank is the number of those above it.
    place = tl.arange(0, CAPACITY)
    key = tl.load(keys + place, mask=place < count, other=NO_KEY)
    rank = tl.zeros([CAPACITY], tl.int32)
    first = count * 0
    while first < count:
        against = first + tl.arange(0, COMPARED)
        compared = tl.load(keys + against, mask=against < count, other=NO_KEY)
        rank += tl.sum((compared[None, :] > key[:, None]).to(tl.int32), 1)
        first += COMPARED
    selected = (place < count) & (rank < k)
    token = TOKEN_MASK - (key & TOKEN_MASK)
    to = n * k + rank
    tl.store(ids + to, token, mask=selected)
    side_logit = tl.load(row + token, mask=selected, other=0.0)
    tl.store(logits + to, side_logit.to(tl.float32), mask=selected)
    other_logit = tl.load(other_values + n * other_stride + token, mask=selected, other=0.0)
    tl.store(other_logits + to, other_logit.to(tl.float32), mask=selected)
