# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Top-k supports in kernels: exact selection of the k most likely tokens, and reverse KL on them.

Selection: the softmax pass (`kernels.py`) leaves the largest logit of every WIDTH neighboring
tokens, a group. Groups are dealt out to lanes, several times k of them; the k-th largest of the
lanes' maxima is above nearly all logits, but not above k of them. The few groups that reach this
bound are loaded, and their tokens that reach it are compared with each other. A row with more
candidates than CAPACITY (hundreds of equal logits, or all of the most likely tokens in a few lanes)
first narrows the bound by bisection, in passes over the whole row. Tokens are ordered by logit and
then by id, which makes all of them different: a key of 64 bits, the logit's above, the id's
complement below. The result does not depend on the order in which threads store. Among NaN any
tokens are selected.

Reverse KL: in torch (`support_gradient.py`, which has every divergence in every form) this is some
seventy small operations, each of which costs a kernel launch. With π the student and q the teacher
h = ∂L/∂log π = π·log(π/q), of the tokens of S and of the tail; without a tail this is the form with
a stopped gradient. Nothing here synchronizes with the GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl
from torch import Tensor

from courtside.losses.fused.kernels import LN2, OUTPUTS, over_temperature
from courtside.losses.fused.types import DivergenceSpec, DivergenceStats, RawLogits

LOWEST = tl.constexpr(-(2**31))
"""Below the upper half of any key."""
NO_KEY = tl.constexpr(-(2**63))
HIGHEST = tl.constexpr(2**63 - 1)
TOKEN_MASK = tl.constexpr(0xFFFFFFFF)
COMPARED = tl.constexpr(8)
"""Candidates that each is compared with at a time: what fits into registers."""
MOST_WARPS = 32
TEACHER = tl.constexpr(0)
STUDENT = tl.constexpr(1)
JOINT = tl.constexpr(2)
SUPPORTS = {"teacher": TEACHER, "student": STUDENT, "joint": JOINT}
TAIL_ROW = tl.constexpr(OUTPUTS.index("tail"))
TEACHER_TAIL_ROW = tl.constexpr(OUTPUTS.index("teacher_tail"))
SUPPORT_OUTPUTS = ("value", "student_mass", "teacher_mass", "overlap", "pull")
"""Of each row; the last is for tokens outside S, whose gradient is −π·(pull + coefficient)."""
EMPTY_TAIL = tl.constexpr(math.log(torch.finfo(torch.float32).tiny))
"""In place of −inf: `top_k.fill_empty_tails`."""


# ── selection ─────────────────────────────────────────────────────────────────────────────────────


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
    """For all parts of the rows at once. `capacity`: candidates per row, a power of 2 above k."""

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
    """Fill `out`; of equally likely tokens the lower id. `maxima_NG`: the largest of every
    `width` logits, padded to whole tiles of so many lanes."""
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


# ── reverse KL ────────────────────────────────────────────────────────────────────────────────────


def has_support_kernel(divergence: DivergenceSpec) -> bool:
    support = divergence.support
    assert support is not None
    has_form = support.form in ("tail", "stop_gradient") and divergence.clip is None
    return has_form and divergence.name == "reverse_kl"


def reverse_kl_on_support(
    sides: tuple[RawLogits, RawLogits],
    selected: tuple[TopKBuffers, TopKBuffers],
    divergence: DivergenceSpec,
    per_row: tuple[Tensor, ...],
) -> tuple[DivergenceStats, Tensor, Tensor]:
    """(statistics, the pull on tokens outside S, the gradient by the logits of the tokens of S).

    `sides`: the student's and the teacher's logits, for their scales and softcaps only; `selected`:
    the most likely tokens of each. `per_row`: sampled tokens, temperatures, weights, ∂L/∂log π of
    the sampled tokens, and the `OUTPUTS` of `vocabulary_kernel`.
    """
    support, (student, teacher) = divergence.support, selected
    assert support is not None and len(per_row) == 5 and len(per_row[-1]) == len(OUTPUTS)
    num_rows, k = student.ids_NK.shape
    width = k * (2 if support.of == "joint" else 1)
    support_outputs = per_row[-1].new_empty(len(SUPPORT_OUTPUTS), num_rows)
    values_NK = sides[0].values_NV.new_empty(num_rows, width)
    if num_rows:
        support_kernel[(num_rows,)](
            student.ids_NK, student.logits_NK, student.other_logits_NK,
            teacher.ids_NK, teacher.logits_NK, teacher.other_logits_NK,
            *per_row, support_outputs, values_NK, num_rows, per_row[-1].stride(0), k, width,
            *(float(side.scale) for side in sides), *(float(side.softcap or 1) for side in sides),
            OF=SUPPORTS[support.of].value, TAIL=support.form == "tail",
            STUDENT_CAPPED=sides[0].softcap is not None,
            TEACHER_CAPPED=sides[1].softcap is not None,
            PADDED=triton.next_power_of_2(k), num_warps=1 if k <= 128 else 4,
        )  # fmt: skip
    by_name = {f"{name}_N": support_outputs[i] for i, name in enumerate(SUPPORT_OUTPUTS)}
    pull_N = by_name.pop("pull_N")
    return DivergenceStats(**by_name), pull_N, values_NK


@triton.jit
def _support_terms(
    student_raw, teacher_raw, at, inside, keep, on, out, stride, temperature, student_scale,
    teacher_scale, student_cap, teacher_cap, STUDENT_CAPPED: tl.constexpr,
    TEACHER_CAPPED: tl.constexpr,
):  # fmt: skip
    """Of these tokens: (π; π and q of those that count; log(π/q); the slope of the student's
    softcap)."""
    shift = tl.load(out)
    raw = tl.load(student_raw + at, mask=inside, other=0.0)
    x = over_temperature(raw, shift, student_scale, student_cap, temperature, STUDENT_CAPPED)
    slope = tl.full(x.shape, 1.0, tl.float32)
    if STUDENT_CAPPED:
        tanh = (x + shift) * (temperature / student_cap)
        slope = 1.0 - tanh * tanh
    logp = x - tl.load(out + stride) - tl.load(out + 2 * stride) * LN2
    raw = tl.load(teacher_raw + at, mask=inside, other=0.0)
    y = over_temperature(raw, tl.load(out + 3 * stride), teacher_scale, teacher_cap, temperature,
                         TEACHER_CAPPED)  # fmt: skip
    logq = y - tl.load(out + 4 * stride) - tl.load(out + 5 * stride) * LN2
    # A row without weight may have a teacher of NaN; the student itself takes its place.
    trained = tl.where(on, logq, logp)
    everywhere = tl.exp(logp)
    p = tl.where(keep, everywhere, 0.0)
    q = tl.where(keep, tl.exp(logq), 0.0)
    gap = tl.where(p == 0, 0.0, logp - trained)
    return everywhere, p, q, gap, slope


@triton.jit
def _tail(place, mass):
    """A tail's log-prob, finite, from the sum over the smaller part: the tail or S."""
    tail = tl.load(place)
    tail = tl.where(tail == -float("inf"), EMPTY_TAIL, tail)
    return tl.where(mass < 0.5, tl.log(1.0 - mass), tail)


@triton.jit(do_not_specialize=["num_rows", "stride", "k", "width"])
def support_kernel(
    ids, student_raw, teacher_raw, teacher_ids, teacher_top_raw, teacher_top_student_raw,
    sampled_ids, temperatures, weights, coefficients, outputs, support_outputs, values, num_rows,
    stride, k, width, student_scale, teacher_scale, student_cap, teacher_cap,
    OF: tl.constexpr, TAIL: tl.constexpr, STUDENT_CAPPED: tl.constexpr,
    TEACHER_CAPPED: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """One row. The tokens of a joint support are the teacher's, then the student's, of which those
    that the teacher has too do not count."""
    n = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PADDED)
    inside = place < k
    at = n * k + place
    student_id = tl.load(ids + at, mask=inside, other=-1)
    teacher_top_id = tl.load(teacher_ids + at, mask=inside, other=-1)
    shared = tl.zeros([PADDED], tl.int32)
    first = k * 0
    while first < k:
        against = first + tl.arange(0, COMPARED)
        teacher_id = tl.load(teacher_ids + n * k + against, mask=against < k, other=-2)
        is_shared = student_id[:, None] == teacher_id[None, :]
        shared = tl.maximum(shared, tl.max(is_shared.to(tl.int32), 1))
        first += COMPARED
    temperature, weight = tl.load(temperatures + n), tl.load(weights + n)
    on, out = weight != 0, outputs + n
    student_mass, teacher_mass, value = 0.0, 0.0, 0.0
    if OF != STUDENT:
        first_all, first_p, q, first_gap, first_slope = _support_terms(
            teacher_top_student_raw, teacher_top_raw, at, inside, inside, on, out, stride,
            temperature, student_scale, teacher_scale, student_cap, teacher_cap, STUDENT_CAPPED,
            TEACHER_CAPPED,
        )  # fmt: skip
        student_mass += tl.sum(first_p, 0)
        teacher_mass += tl.sum(q, 0)
        value += tl.sum(first_p * first_gap, 0)
    if OF != TEACHER:
        keep = inside & ((shared == 0) | (OF == STUDENT))
        p_all, p, q, gap, slope = _support_terms(
            student_raw, teacher_raw, at, inside, keep, on, out, stride, temperature,
            student_scale, teacher_scale, student_cap, teacher_cap, STUDENT_CAPPED, TEACHER_CAPPED,
        )  # fmt: skip
        student_mass += tl.sum(p, 0)
        teacher_mass += tl.sum(q, 0)
        value += tl.sum(p * gap, 0)
    tail_gap = 0.0
    if TAIL:
        tail = _tail(out + TAIL_ROW * stride, student_mass)
        tail_gap = tail - _tail(out + TEACHER_TAIL_ROW * stride, teacher_mass)
        tail_gap = tl.where(on, tail_gap, 0.0)
        value += tl.exp(tail) * tail_gap
    # Σ h; of each token of S the gradient is h − π·(Σ h + c), and c more where it was sampled.
    total = value * weight
    coefficient = tl.load(coefficients + n)
    pull = total + coefficient
    factor = student_scale / temperature
    sampled = tl.load(sampled_ids + n)
    to = values + n * width + place
    if OF != STUDENT:
        g = first_p * first_gap * weight - pull * first_all
        g += tl.where(teacher_top_id == sampled, coefficient, 0.0)
        g *= first_slope * factor
        tl.store(to, g.to(values.dtype.element_ty), mask=inside)
        to += k
    if OF != TEACHER:
        g = p * gap * weight - pull * p_all
        g += tl.where(student_id == sampled, coefficient, 0.0)
        g *= slope * factor
        tl.store(to, g.to(values.dtype.element_ty), mask=inside)
    out = support_outputs + n
    tl.store(out, tl.where(on, value, 0.0))
    tl.store(out + num_rows, student_mass)
    tl.store(out + 2 * num_rows, teacher_mass)
    tl.store(out + 3 * num_rows, tl.sum(shared, 0).to(tl.float32) / k)
    tl.store(out + 4 * num_rows, total - tail_gap * weight)
