# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The two parts of a decoding step that torch does badly, as Triton kernels.

Attention of one new token a row over keys and values of rows of different lengths: each row pays
for its own length, whatever room there is, and heads that share keys read them once. Rows that
began alike read their beginning where the first of them has it, so that it comes from memory once
and then from the cache. A long row is cut into SPLITS parts that are read side by side and joined
afterwards.

Drawing a token: two sweeps over the logits, one for the sums of blocks of words, one for the block
that was hit. No sort, no sums in memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_POSITIONS = 64
MAX_SPLITS = 16
TARGET_PROGRAMS = 512
"""So many at once keep a large GPU busy; rows are split until there are as many."""
BLOCK_VOCAB = 4096


@triton.jit
def _attend(query, keys, values, lengths, leaders, alike, parts, tops, totals, out, scale,
            row_places, head_places, LED: tl.constexpr, SHARING: tl.constexpr, SPLITS: tl.constexpr,
            SIZE: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr,
            PLACES: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """One part of one row, for the SHARING heads of one head of keys."""
    row, shared, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_shared = tl.num_programs(1)
    length = tl.load(lengths + row)
    span = tl.cdiv(tl.cdiv(length, SPLITS), PLACES) * PLACES
    begin, end = split * span, tl.minimum(split * span + span, length)
    at_q, at_d = tl.arange(0, QUERIES), tl.arange(0, PADDED)
    inside = (at_q[:, None] < SHARING) & (at_d[None, :] < SIZE)
    head = row * num_shared * SHARING + shared * SHARING + at_q
    q = tl.load(query + head[:, None] * SIZE + at_d[None, :], mask=inside, other=0.0)
    q = q.to(keys.dtype.element_ty)
    own = row.to(tl.int64) * row_places + shared * head_places
    led, num_alike = own, 0
    if LED:
        led = tl.load(leaders + row) * row_places + shared * head_places
        num_alike = tl.load(alike + row)
    top = tl.full([QUERIES], -1.0e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    found = tl.zeros([QUERIES, PADDED], tl.float32)
    for start in range(begin, end, PLACES):
        place = start + tl.arange(0, PLACES)
        seen = (place[:, None] < end) & (at_d[None, :] < SIZE)
        first = tl.where(start + PLACES <= num_alike, led, own)  # whole blocks only
        where = first + place[:, None] * SIZE + at_d[None, :]
        k = tl.load(keys + where, mask=seen, other=0.0)
        v = tl.load(values + where, mask=seen, other=0.0)
        if EXACT:
            score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        else:
            score = tl.dot(q, tl.trans(k)) * scale
        score = tl.where(place[None, :] < end, score, -1.0e30)
        new_top = tl.maximum(top, tl.max(score, 1))
        shrink = tl.exp(top - new_top)
        share = tl.where(place[None, :] < end, tl.exp(score - new_top[:, None]), 0.0)
        total = total * shrink + tl.sum(share, 1)
        if EXACT:
            found = found * shrink[:, None] + tl.dot(share, v, input_precision="ieee")
        else:
            found = found * shrink[:, None] + tl.dot(share.to(v.dtype), v)
        top = new_top
    if SPLITS == 1:
        found = found / total[:, None]
        tl.store(out + head[:, None] * SIZE + at_d[None, :], found.to(out.dtype.element_ty),
                 mask=inside)  # fmt: skip
    else:
        part = head * SPLITS + split
        tl.store(tops + part, top, mask=at_q < SHARING)
        tl.store(totals + part, total, mask=at_q < SHARING)
        tl.store(parts + part[:, None] * SIZE + at_d[None, :], found, mask=inside)


@triton.jit
def _join(parts, tops, totals, out, SPLITS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """The parts of one head of one row; a part without a place has a total of 0."""
    head = tl.program_id(0)
    at_s, at_d = tl.arange(0, SPLITS), tl.arange(0, PADDED)
    top = tl.load(tops + head * SPLITS + at_s)
    total = tl.load(totals + head * SPLITS + at_s)
    share = tl.where(total > 0, tl.exp(top - tl.max(top, 0)), 0.0)
    where = (head * SPLITS + at_s[:, None]) * SIZE + at_d[None, :]
    part = tl.load(parts + where, mask=at_d[None, :] < SIZE, other=0.0)
    found = tl.sum(part * share[:, None], 0) / tl.sum(total * share, 0)
    tl.store(out + head * SIZE + at_d, found.to(out.dtype.element_ty), mask=at_d < SIZE)


def decode_attention(
    query_BHD: Tensor,
    keys_BKLD: Tensor,
    values_BKLD: Tensor,
    length_B: Tensor,
    scale: float,
    leaders: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """softmax(scale · q·k)·v over the first `length_B` places of each row; lengths are above 0.

    `leaders`: of each row another that has the same keys and values, bit for bit, in its first
    places, and how many of those there are.
    The query is rounded to the numbers of the keys, as autocast would for torch's attention.
    """
    B, H, D = query_BHD.shape
    K = keys_BKLD.shape[1]
    assert keys_BKLD.stride() == values_BKLD.stride() and keys_BKLD.stride()[2:] == (D, 1)
    query_BHD = query_BHD.contiguous()
    out_BHD = torch.empty_like(query_BHD, dtype=keys_BKLD.dtype)
    splits = 1
    while splits < MAX_SPLITS and B * K * splits < TARGET_PROGRAMS:
        splits *= 2
    count = B * H * splits if splits > 1 else 1
    tops, totals = query_BHD.new_empty(2, count, dtype=torch.float32)
    parts = query_BHD.new_empty(count * D if splits > 1 else 1, dtype=torch.float32)
    leader_B, alike_B = leaders or (length_B, length_B)
    _attend[(B, K, splits)](
        query_BHD, keys_BKLD, values_BKLD, length_B, leader_B, alike_B, parts, tops, totals,
        out_BHD, scale, keys_BKLD.stride(0), keys_BKLD.stride(1), LED=leaders is not None,
        SHARING=H // K, SPLITS=splits, SIZE=D,
        PADDED=triton.next_power_of_2(max(D, 16)),
        QUERIES=triton.next_power_of_2(max(H // K, 16)), PLACES=BLOCK_POSITIONS,
        EXACT=keys_BKLD.dtype == torch.float32, num_warps=4,
    )  # fmt: skip
    if splits > 1:
        _join[(B * H,)](
            parts, tops, totals, out_BHD, SPLITS=splits, SIZE=D,
            PADDED=triton.next_power_of_2(D), num_warps=4,
        )  # fmt: skip
    return out_BHD


@triton.jit
def _block_sums(logits, tops, totals, scale, vocab_size, row_words, num_blocks,
                WORDS: tl.constexpr, OWN_SCALES: tl.constexpr):  # fmt: skip
    row, block = tl.program_id(0), tl.program_id(1)
    if OWN_SCALES:
        scale = tl.load(scale + row)
    at = block * WORDS + tl.arange(0, WORDS)
    x = tl.load(logits + row.to(tl.int64) * row_words + at, mask=at < vocab_size, other=-1.0e30)
    x = x.to(tl.float32) * scale
    top = tl.max(x, 0)
    total = tl.sum(tl.where(at < vocab_size, tl.exp(x - top), 0.0), 0)
    tl.store(tops + row * num_blocks + block, top)
    tl.store(totals + row * num_blocks + block, total)


@triton.jit
def _pick(logits, tops, totals, uniforms, ids, logps, scale, vocab_size, row_words, num_blocks,
          WORDS: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    """The word where the distribution function passes the row's random number."""
    row = tl.program_id(0)
    at_b = tl.arange(0, BLOCKS)
    exists = at_b < num_blocks
    top_b = tl.load(tops + row * num_blocks + at_b, mask=exists, other=-1.0e30)
    top = tl.max(top_b, 0)
    total_b = tl.load(totals + row * num_blocks + at_b, mask=exists, other=0.0)
    # Double precision from here on: many small terms would shift the far end by a rare word.
    mass_b = total_b.to(tl.float64) * tl.exp(top_b - top).to(tl.float64)
    mass_b = tl.where(exists, mass_b, 0.0)
    upto_b = tl.cumsum(mass_b, 0)
    total = tl.sum(mass_b, 0)
    threshold = tl.load(uniforms + row) * total
    block = tl.sum(((upto_b <= threshold) & exists).to(tl.int32), 0)
    block = tl.minimum(block, num_blocks - 1)
    before = tl.sum(tl.where(at_b < block, mass_b, 0.0), 0)
    at = block * WORDS + tl.arange(0, WORDS)
    x = tl.load(logits + row.to(tl.int64) * row_words + at, mask=at < vocab_size, other=-1.0e30)
    x = x.to(tl.float32) * scale
    upto = tl.cumsum(tl.where(at < vocab_size, tl.exp(x - top).to(tl.float64), 0.0), 0)
    hit = tl.sum(((before + upto <= threshold) & (at < vocab_size)).to(tl.int32), 0)
    # Rounding may leave the threshold a hair above a block's sum: its last word that can be drawn.
    last = tl.max(tl.where((at < vocab_size) & (x > top - 80.0), tl.arange(0, WORDS), 0), 0)
    hit = tl.minimum(hit, last)
    chosen = tl.sum(tl.where(tl.arange(0, WORDS) == hit, x, 0.0), 0)
    tl.store(ids + row, (block * WORDS + hit).to(tl.int64))
    tl.store(logps + row, chosen - top - tl.log(total.to(tl.float32)))


def sample_from_logits(
    logits_BV: Tensor, uniform_B: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """`sampling.draw` without truncation: ids and log-probs."""
    B, V = logits_BV.shape
    assert logits_BV.stride(1) == 1 and temperature > 0
    uniform_B = uniform_B.contiguous()  # a column of a table is none
    blocks = triton.cdiv(V, BLOCK_VOCAB)
    tops, totals = logits_BV.new_empty(2, B, blocks, dtype=torch.float32)
    ids_B = torch.empty(B, dtype=torch.long, device=logits_BV.device)
    logp_B = torch.empty(B, dtype=torch.float32, device=logits_BV.device)
    scale = 1.0 / temperature
    _block_sums[(B, blocks)](
        logits_BV, tops, totals, scale, V, logits_BV.stride(0), blocks, WORDS=BLOCK_VOCAB,
        OWN_SCALES=False,
    )  # fmt: skip
    _pick[(B,)](
        logits_BV, tops, totals, uniform_B, ids_B, logp_B, scale, V, logits_BV.stride(0), blocks,
        WORDS=BLOCK_VOCAB, BLOCKS=triton.next_power_of_2(max(blocks, 2)),
    )  # fmt: skip
    return ids_B, logp_B


def token_logps(logits_NV: Tensor, ids_N: Tensor, scale_N: Tensor) -> Tensor:
    """Log-probs of the ids under logits times each row's scale: logits are read once, as they are,
    where torch would copy them into float32 and sweep those several times."""
    N, V = logits_NV.shape
    assert logits_NV.stride(1) == 1 and scale_N.dtype == torch.float32
    blocks = triton.cdiv(V, BLOCK_VOCAB)
    tops, totals = logits_NV.new_empty(2, N, blocks, dtype=torch.float32)
    _block_sums[(N, blocks)](
        logits_NV, tops, totals, scale_N, V, logits_NV.stride(0), blocks, WORDS=BLOCK_VOCAB,
        OWN_SCALES=True,
    )  # fmt: skip
    chosen_N = logits_NV.gather(-1, ids_N[:, None])[:, 0].float() * scale_N
    logp_N: Tensor = chosen_N - (tops + totals.log()).logsumexp(-1)
    return logp_N
