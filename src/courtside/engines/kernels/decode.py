# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton kernels of a decode step: attention over the KV cache, and sampling from logits.

Decode attention of one new token per row: each row costs its own length, whatever the capacity, and
query heads that share a KV head load it once. Rows with the same prompt load its keys and values
from the first of them: once from memory, then from the L2 cache. A long row is split into parts
that run in parallel and are merged afterwards (flash-decoding). A row with a sliding window costs
the window.

Sampling: one pass over the logits for the sums of vocabulary blocks, one over the block that is
hit. No sort, and no cumulative sums in memory.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_POSITIONS = 64
MAX_BLOCK_BYTES = 2**15
SHARED_BLOCKS = 5.1
"""Shared memory that a program takes, in blocks of keys; larger heads have fewer positions in one.
Compiled for Hopper: 4.3 to 5.03, whatever the size of the heads."""
MAX_SPLITS = 16
TARGET_PROGRAMS = 512
"""Enough to keep a large GPU busy; rows are split until there are as many."""
BLOCK_VOCAB = 4096


@triton.jit
def _attend(query, keys, values, lengths, prefix_rows, prefix_lengths, sinks, parts, maxima, totals,
            out, scale, window, softcap, key_row, key_head, value_row, value_head,
            KEY_POSITION: tl.constexpr, VALUE_POSITION: tl.constexpr,
            SHARES_PREFIXES: tl.constexpr, HAS_WINDOW: tl.constexpr,
            HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, GROUP: tl.constexpr,
            SPLITS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
            VALUE_SIZE: tl.constexpr, VALUE_PADDED: tl.constexpr, QUERIES: tl.constexpr,
            POSITIONS: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """One part of one row, for the GROUP query heads of one KV head."""
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_kv_heads = tl.num_programs(1)
    length = tl.load(lengths + row)
    first, first_block = 0, 0
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
        first_block = first // POSITIONS * POSITIONS  # blocks of rows with one prefix coincide
    span = tl.cdiv(tl.cdiv(length - first_block, SPLITS), POSITIONS) * POSITIONS
    begin = first_block + split * span
    end = tl.minimum(begin + span, length)
    at_q, at_d = tl.arange(0, QUERIES), tl.arange(0, PADDED)
    at_v = tl.arange(0, VALUE_PADDED)
    head = row * num_kv_heads * GROUP + kv_head * GROUP + at_q
    inside = (at_q[:, None] < GROUP) & (at_d[None, :] < SIZE)
    q = tl.load(query + head[:, None] * SIZE + at_d[None, :], mask=inside, other=0.0)
    q = q.to(keys.dtype.element_ty)
    inside = (at_q[:, None] < GROUP) & (at_v[None, :] < VALUE_SIZE)
    cache_row = row.to(tl.int64)
    prefix_row, prefix_length = cache_row, 0
    if SHARES_PREFIXES:
        prefix_row = tl.load(prefix_rows + row)
        prefix_length = tl.load(prefix_lengths + row)
    maximum = tl.full([QUERIES], -1.0e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    context = tl.zeros([QUERIES, VALUE_PADDED], tl.float32)
    for start in range(begin, end, POSITIONS):
        position = start + tl.arange(0, POSITIONS)
        is_cached = position < end
        if HAS_WINDOW:
            is_cached = is_cached & (position >= first)
        is_visible = is_cached[None, :]
        # Whole blocks only.
        source = tl.where(start + POSITIONS <= prefix_length, prefix_row, cache_row)
        index = source * key_row + kv_head * key_head + position[:, None] * KEY_POSITION
        index = index + at_d[None, :]
        k = tl.load(keys + index, mask=is_cached[:, None] & (at_d[None, :] < SIZE), other=0.0)
        index = source * value_row + kv_head * value_head + position[:, None] * VALUE_POSITION
        index = index + at_v[None, :]
        v = tl.load(
            values + index, mask=is_cached[:, None] & (at_v[None, :] < VALUE_SIZE), other=0.0
        )
        if EXACT:
            score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        else:
            score = tl.dot(q, tl.trans(k)) * scale
        if HAS_SOFTCAP:
            score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)  # tanh
        score = tl.where(is_visible, score, -1.0e30)
        new_maximum = tl.maximum(maximum, tl.max(score, 1))
        shrink = tl.exp(maximum - new_maximum)
        weight = tl.where(is_visible, tl.exp(score - new_maximum[:, None]), 0.0)
        total = total * shrink + tl.sum(weight, 1)
        if EXACT:
            context = context * shrink[:, None] + tl.dot(weight, v, input_precision="ieee")
        else:
            context = context * shrink[:, None] + tl.dot(weight.to(v.dtype), v)
        maximum = new_maximum
    if SPLITS == 1:
        if HAS_SINKS:
            at_h = kv_head * GROUP + at_q
            sink = tl.load(sinks + at_h, mask=at_q < GROUP, other=-1.0e30)
            new_maximum = tl.maximum(maximum, sink)
            shrink = tl.exp(maximum - new_maximum)
            total = total * shrink + tl.exp(sink - new_maximum)
            context = context * shrink[:, None]
        context = context / total[:, None]
        tl.store(out + head[:, None] * VALUE_SIZE + at_v[None, :],
                 context.to(out.dtype.element_ty), mask=inside)  # fmt: skip
    else:
        part = head * SPLITS + split
        tl.store(maxima + part, maximum, mask=at_q < GROUP)
        tl.store(totals + part, total, mask=at_q < GROUP)
        tl.store(parts + part[:, None] * VALUE_SIZE + at_v[None, :], context, mask=inside)


@triton.jit
def _merge(parts, maxima, totals, sinks, out, num_heads, HAS_SINKS: tl.constexpr,
           SPLITS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr):  # fmt: skip
    """The parts of one head of one row; a part without positions has a total of 0."""
    head = tl.program_id(0)
    at_s, at_d = tl.arange(0, SPLITS), tl.arange(0, PADDED)
    maximum = tl.load(maxima + head * SPLITS + at_s)
    total = tl.load(totals + head * SPLITS + at_s)
    largest = tl.max(maximum, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head % num_heads)
        largest = tl.maximum(largest, sink)
    weight = tl.where(total > 0, tl.exp(maximum - largest), 0.0)
    index = (head * SPLITS + at_s[:, None]) * SIZE + at_d[None, :]
    part = tl.load(parts + index, mask=at_d[None, :] < SIZE, other=0.0)
    denominator = tl.sum(total * weight, 0)
    if HAS_SINKS:
        denominator += tl.exp(sink - largest)
    context = tl.sum(part * weight[:, None], 0) / denominator
    tl.store(out + head * SIZE + at_d, context.to(out.dtype.element_ty), mask=at_d < SIZE)


@cache
def max_block_bytes(device: torch.device) -> int:
    """Of a block of keys: small GPUs have 99 KiB of shared memory for it, large ones 163 or 227."""
    size = MAX_BLOCK_BYTES
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)
        shared = properties.shared_memory_per_block_optin
        while size * SHARED_BLOCKS > shared:
            size //= 2
    return size


def decode_attention(
    query_BHD: Tensor,
    keys_BKLD: Tensor,
    values_BKLD: Tensor,
    length_B: Tensor,
    scale: float,
    prefixes: tuple[Tensor, Tensor] | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    target_programs: int = TARGET_PROGRAMS,
) -> Tensor:
    """softmax(scale · q·k)·v over the first `length_B` positions of each row; lengths are positive.
    Values may be shorter than keys, and lie between them (multi-head latent attention).

    `prefixes`: for each row another with the same keys and values, bit for bit, in its first
    positions, and their number.
    `window`: over the last `window` of these positions only. `softcap` and `sinks_H`: see
    `patches/attention_variants.py`.
    The query is rounded to the dtype of the keys, as autocast would for torch's attention.
    """
    B, H, D = query_BHD.shape
    K = keys_BKLD.shape[1]
    value_size = values_BKLD.shape[3]
    assert keys_BKLD.stride(3) == values_BKLD.stride(3) == 1
    query_BHD = query_BHD.contiguous()
    out_BHD = query_BHD.new_empty(B, H, value_size, dtype=keys_BKLD.dtype)
    padded, value_padded = (triton.next_power_of_2(max(size, 16)) for size in (D, value_size))
    size = max_block_bytes(keys_BKLD.device)
    block_bytes = max(padded, value_padded) * keys_BKLD.element_size()
    positions = min(BLOCK_POSITIONS, size // block_bytes)
    # A window lies in one block more than it fills.
    max_splits = (
        MAX_SPLITS if window is None else min(MAX_SPLITS, triton.cdiv(window, positions) + 1)
    )
    splits = 1
    while splits < max_splits and B * K * splits < target_programs:
        splits *= 2
    count = B * H * splits if splits > 1 else 1
    maxima, totals = query_BHD.new_empty(2, count, dtype=torch.float32)
    parts = query_BHD.new_empty(count * value_size if splits > 1 else 1, dtype=torch.float32)
    prefix_row_B, prefix_length_B = prefixes or (length_B, length_B)
    sinks = maxima if sinks_H is None else sinks_H.float().contiguous()
    _attend[(B, K, splits)](
        query_BHD, keys_BKLD, values_BKLD, length_B, prefix_row_B, prefix_length_B, sinks, parts,
        maxima, totals, out_BHD, scale, window or 0, softcap or 1.0, *keys_BKLD.stride()[:2],
        *values_BKLD.stride()[:2], KEY_POSITION=keys_BKLD.stride(2),
        VALUE_POSITION=values_BKLD.stride(2), SHARES_PREFIXES=prefixes is not None,
        HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks_H is not None, GROUP=H // K, SPLITS=splits, SIZE=D, PADDED=padded,
        VALUE_SIZE=value_size, VALUE_PADDED=value_padded,
        QUERIES=triton.next_power_of_2(max(H // K, 16)), POSITIONS=positions,
        EXACT=keys_BKLD.dtype == torch.float32, num_warps=4,
    )  # fmt: skip
    if splits > 1:
        _merge[(B * H,)](
            parts, maxima, totals, sinks, out_BHD, H, HAS_SINKS=sinks_H is not None, SPLITS=splits,
            SIZE=value_size, PADDED=triton.next_power_of_2(value_size), num_warps=4,
        )  # fmt: skip
    return out_BHD


@triton.jit
def _sum_blocks(logits, maxima, totals, scale, vocab_size, row_stride, num_blocks,
                BLOCK: tl.constexpr, SCALE_PER_ROW: tl.constexpr):  # fmt: skip
    row, block = tl.program_id(0), tl.program_id(1)
    if SCALE_PER_ROW:
        scale = tl.load(scale + row)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * row_stride + at, mask=at < vocab_size, other=-1.0e30)
    x = x.to(tl.float32) * scale
    maximum = tl.maximum(tl.max(x, 0), -1.0e30)  # all of the block may be excluded, by −inf
    total = tl.sum(tl.where(at < vocab_size, tl.exp(x - maximum), 0.0), 0)
    tl.store(maxima + row * num_blocks + block, maximum)
    tl.store(totals + row * num_blocks + block, total)


@triton.jit
def _sample(logits, maxima, totals, uniforms, ids, logps, scale, vocab_size, row_stride, num_blocks,
            BLOCK: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    """The token at which the cumulative distribution exceeds the row's random number."""
    row = tl.program_id(0)
    at_b = tl.arange(0, BLOCKS)
    exists = at_b < num_blocks
    maximum_b = tl.load(maxima + row * num_blocks + at_b, mask=exists, other=-1.0e30)
    maximum = tl.max(maximum_b, 0)
    total_b = tl.load(totals + row * num_blocks + at_b, mask=exists, other=0.0)
    # Double precision from here on: many small terms would shift the end of the vocabulary by a
    # rare token.
    mass_b = total_b.to(tl.float64) * tl.exp(maximum_b - maximum).to(tl.float64)
    mass_b = tl.where(exists, mass_b, 0.0)
    cdf_b = tl.cumsum(mass_b, 0)
    total = tl.sum(mass_b, 0)
    threshold = tl.load(uniforms + row) * total
    block = tl.sum(((cdf_b <= threshold) & exists).to(tl.int32), 0)
    block = tl.minimum(block, num_blocks - 1)
    before = tl.sum(tl.where(at_b < block, mass_b, 0.0), 0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * row_stride + at, mask=at < vocab_size, other=-1.0e30)
    x = x.to(tl.float32) * scale
    cdf = tl.cumsum(tl.where(at < vocab_size, tl.exp(x - maximum).to(tl.float64), 0.0), 0)
    index = tl.sum(((before + cdf <= threshold) & (at < vocab_size)).to(tl.int32), 0)
    # Rounding may leave the threshold just above the block's sum: then its last possible token.
    possible = (at < vocab_size) & (x > maximum - 80.0)
    index = tl.minimum(index, tl.max(tl.where(possible, tl.arange(0, BLOCK), 0), 0))
    logit = tl.sum(tl.where(tl.arange(0, BLOCK) == index, x, 0.0), 0)
    tl.store(ids + row, (block * BLOCK + index).to(tl.int64))
    tl.store(logps + row, logit - maximum - tl.log(total.to(tl.float32)))


def sample_from_logits(
    logits_BV: Tensor, uniform_B: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """`sampler.sample_tokens` without truncation: ids and log-probs."""
    B, V = logits_BV.shape
    assert logits_BV.stride(1) == 1 and temperature > 0
    uniform_B = uniform_B.contiguous()  # a column of a matrix is not
    blocks = triton.cdiv(V, BLOCK_VOCAB)
    maxima, totals = logits_BV.new_empty(2, B, blocks, dtype=torch.float32)
    ids_B = torch.empty(B, dtype=torch.long, device=logits_BV.device)
    logp_B = torch.empty(B, dtype=torch.float32, device=logits_BV.device)
    scale = 1.0 / temperature
    _sum_blocks[(B, blocks)](
        logits_BV, maxima, totals, scale, V, logits_BV.stride(0), blocks, BLOCK=BLOCK_VOCAB,
        SCALE_PER_ROW=False,
    )  # fmt: skip
    _sample[(B,)](
        logits_BV, maxima, totals, uniform_B, ids_B, logp_B, scale, V, logits_BV.stride(0), blocks,
        BLOCK=BLOCK_VOCAB, BLOCKS=triton.next_power_of_2(max(blocks, 2)),
    )  # fmt: skip
    return ids_B, logp_B


def token_logps(logits_NV: Tensor, ids_N: Tensor, scale_N: Tensor) -> Tensor:
    """Log-probs of the ids under logits times each row's scale. One pass over the logits in their
    own dtype, where torch would make a float32 copy and pass over it several times."""
    N, V = logits_NV.shape
    assert logits_NV.stride(1) == 1 and scale_N.dtype == torch.float32
    blocks = triton.cdiv(V, BLOCK_VOCAB)
    maxima, totals = logits_NV.new_empty(2, N, blocks, dtype=torch.float32)
    _sum_blocks[(N, blocks)](
        logits_NV, maxima, totals, scale_N, V, logits_NV.stride(0), blocks, BLOCK=BLOCK_VOCAB,
        SCALE_PER_ROW=True,
    )  # fmt: skip
    logit_N = logits_NV.gather(-1, ids_N[:, None])[:, 0].float() * scale_N
    logp_N: Tensor = logit_N - (maxima + totals.log()).logsumexp(-1)
    return logp_N
