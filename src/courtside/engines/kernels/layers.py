# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton kernels for what lies between a layer's matmuls: RMSNorm, RoPE, SwiGLU, KV-cache append.

In torch each is three to ten kernel launches, and launches bound a decoding step of few rows. The
kernels take strided inputs of any float dtype, so that slices of a fused matmul need no copy;
compute in float32; and round where torch would. `patches/fused_layers.py` has the same in torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SWIGLU_BLOCK = 1024
MIN_TILED_ROWS = 8192
"""From here on a program takes several rows."""
PROGRAM_ELEMENTS = 1024
"""Elements of one program's tile."""


@triton.jit
def _rms_norm(x, weight, out, scales, eps, shift, outer_stride, inner_stride, num_inner, num_rows,
              SIZE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, ROUNDS: tl.constexpr,
              STORES_SCALES: tl.constexpr):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    mask = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    offset = row_offset(row, outer_stride, inner_stride, num_inner)
    y = tl.load(x + offset[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(y * y, 1) / SIZE + eps)
    if STORES_SCALES:
        tl.store(scales + row, scale, mask=row < num_rows)
    y = y * scale[:, None]
    if ROUNDS:
        y = y.to(x.dtype.element_ty).to(tl.float32)
    w = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32) + shift
    y = y * w[None, :]
    out_offset = row.to(tl.int64)[:, None] * SIZE + column[None, :]
    tl.store(out + out_offset, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def row_offset(row, outer_stride, inner_stride, num_inner):
    """Divides in 32 bits, because 64-bit division is slow."""
    outer, inner = (row // num_inner).to(tl.int64), (row % num_inner).to(tl.int64)
    return outer * outer_stride + inner * inner_stride


def rms_norm(
    x: Tensor,
    weight_D: Tensor,
    *,
    eps: float,
    dtype: torch.dtype,
    rounds: bool,
    shift: float = 0.0,
    scales: Tensor | None = None,
) -> Tensor:
    """`rounds`: to the dtype of `x` before the multiplication by the weight plus `shift`. `scales`
    [rows] receives each row's 1/rms."""
    D = x.shape[-1]
    x_NKD = as_rows(x)
    num_rows = x_NKD.shape[0] * x_NKD.shape[1]
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    padded = triton.next_power_of_2(D)
    rows = rows_per_program(num_rows, padded)
    _rms_norm[(triton.cdiv(num_rows, rows),)](
        x_NKD, weight_D, out, scales, eps, shift, x_NKD.stride(0), x_NKD.stride(1), x_NKD.shape[1],
        num_rows, SIZE=D, PADDED=padded, ROWS=rows, ROUNDS=rounds,
        STORES_SCALES=scales is not None, num_warps=warps_per_program(rows, padded),
    )  # fmt: skip
    return out


def as_rows(x: Tensor) -> Tensor:
    """[outer, inner, D] with contiguous rows, as a view where possible."""
    return with_dense_rows(x.reshape(-1, x.shape[-2] if x.dim() > 2 else 1, x.shape[-1]))


def rows_per_program(num_rows: int, padded: int, elements: int = PROGRAM_ELEMENTS) -> int:
    """One where rows are few and programs should be many; a tile of short rows otherwise."""
    return max(1, elements // padded) if num_rows > MIN_TILED_ROWS else 1


def warps_per_program(rows: int, padded: int) -> int:
    """Eight elements per thread: sixteen bytes of bfloat16 are one load."""
    return min(max(rows * padded // 256, 1), 8)


@triton.jit
def _rotate_heads(source, out, cos, sin, first_head, head_stride, COUNT: tl.constexpr,
                  SIZE: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr,
                  ROUNDS: tl.constexpr, BACKWARD: tl.constexpr):  # fmt: skip
    """Rotates `HEADS` heads from `first_head` on; `BACKWARD`: by the transposed rotation."""
    HALF: tl.constexpr = SIZE // 2
    head = first_head + tl.arange(0, HEADS)
    column = tl.arange(0, PADDED)
    half = column < HALF
    mask = (head < COUNT)[:, None] & half[None, :]
    source += head.to(tl.int64)[:, None] * head_stride + column[None, :]
    out += head[:, None] * SIZE + column[None, :]
    low = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    low_cos = _multiply(low, cos + column, out, half, ROUNDS)
    high_cos = _multiply(high, cos + HALF + column, out, half, ROUNDS)
    if BACKWARD:
        rotated_low = low_cos + _multiply(high, sin + HALF + column, out, half, ROUNDS)
        rotated_high = high_cos - _multiply(low, sin + column, out, half, ROUNDS)
    else:
        rotated_low = low_cos - _multiply(high, sin + column, out, half, ROUNDS)
        rotated_high = high_cos + _multiply(low, sin + HALF + column, out, half, ROUNDS)
    dtype = out.dtype.element_ty
    tl.store(out, rotated_low.to(dtype), mask=mask)
    tl.store(out + HALF, rotated_high.to(dtype), mask=mask)


@triton.jit
def _multiply(x, factor, out, half, ROUNDS: tl.constexpr):
    """All heads by cos or sin of their position, rounded where torch rounds before adding."""
    product = x * tl.load(factor, mask=half, other=0.0).to(tl.float32)[None, :]
    if ROUNDS:
        product = product.to(out.dtype.element_ty).to(tl.float32)
    return product


@triton.jit
def _apply_rotary(query, key, cos, sin, query_out, key_out, query_row, query_head, query_position,
                  key_row, key_head, key_position, cos_row, cos_position, sin_row, sin_position,
                  num_positions, QUERIES: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr,
                  PADDED: tl.constexpr, HEADS: tl.constexpr, ROUNDS: tl.constexpr,
                  BACKWARD: tl.constexpr):  # fmt: skip
    """`HEADS` heads at one position, query heads first. Programs of one position are neighbors, so
    that its cos and sin are loaded from memory once."""
    QUERY_TILES: tl.constexpr = (QUERIES + HEADS - 1) // HEADS
    TILES: tl.constexpr = QUERY_TILES + (KEYS + HEADS - 1) // HEADS
    index, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    row, position = (index // num_positions).to(tl.int64), (index % num_positions).to(tl.int64)
    cos += row * cos_row + position * cos_position
    sin += row * sin_row + position * sin_position
    out_offset = index.to(tl.int64) * SIZE
    if tile < QUERY_TILES:
        _rotate_heads(query + row * query_row + position * query_position,
                      query_out + out_offset * QUERIES, cos, sin, tile * HEADS, query_head, QUERIES,
                      SIZE, PADDED, HEADS, ROUNDS, BACKWARD)  # fmt: skip
    else:
        _rotate_heads(key + row * key_row + position * key_position, key_out + out_offset * KEYS,
                      cos, sin, (tile - QUERY_TILES) * HEADS, key_head, KEYS, SIZE, PADDED, HEADS,
                      ROUNDS, BACKWARD)  # fmt: skip


def apply_rotary(
    query_BHND: Tensor,
    key_BKND: Tensor,
    cos_BND: Tensor,
    sin_BND: Tensor,
    *,
    dtypes: tuple[torch.dtype, torch.dtype],
    backward: bool = False,
    heads_per_program: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Queries and keys rotated by their position, in `dtypes`, with memory laid out as [B, N,
    heads, D]. One row of cos and sin may serve all rows. `heads_per_program`: a power of two."""
    B, H, N, D = query_BHND.shape
    K = key_BKND.shape[1]
    device = query_BHND.device
    query_out = torch.empty(B, N, H, D, dtype=dtypes[0], device=device)
    key_out = torch.empty(B, N, K, D, dtype=dtypes[1], device=device)
    query, key, cos, sin = (with_dense_rows(x) for x in (query_BHND, key_BKND, cos_BND, sin_BND))
    row_strides = [0 if len(x) == 1 else x.stride(0) for x in (cos, sin)]
    # Torch multiplies in 16 bits where both are of those, and rounds each product.
    rounds = not backward and torch.promote_types(query.dtype, cos.dtype).itemsize == 2
    padded = triton.next_power_of_2(D // 2)
    max_heads = triton.next_power_of_2(max(H, K))
    heads = heads_per_program or min(rows_per_program(B * N * (H + K), 2 * padded), max_heads)
    _apply_rotary[(B * N * (triton.cdiv(H, heads) + triton.cdiv(K, heads)),)](
        query, key, cos, sin, query_out, key_out, query.stride(0), query.stride(1),
        query.stride(2), key.stride(0), key.stride(1), key.stride(2), row_strides[0],
        cos.stride(1), row_strides[1], sin.stride(1), N, QUERIES=H, KEYS=K, SIZE=D, PADDED=padded,
        HEADS=heads, ROUNDS=rounds, BACKWARD=backward,
        num_warps=warps_per_program(heads, 2 * padded),
    )  # fmt: skip
    return query_out.transpose(1, 2), key_out.transpose(1, 2)


@triton.jit
def _append_kv(key, value, keys, values, lengths, key_row, key_head, value_row, value_head,
               keys_row, keys_head, values_row, values_head, capacity, SIZE: tl.constexpr,
               PADDED: tl.constexpr, VALUE_SIZE: tl.constexpr,
               VALUE_PADDED: tl.constexpr):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(lengths + row)
    fits = position < capacity  # a full row would overwrite the next row's cache
    column = tl.arange(0, PADDED)
    mask = column < tl.where(fits, SIZE, 0)
    k = tl.load(key + row * key_row + head * key_head + column, mask=mask, other=0.0)
    target = keys + row * keys_row + head * keys_head + position * SIZE
    tl.store(target + column, k.to(keys.dtype.element_ty), mask=mask)
    column = tl.arange(0, VALUE_PADDED)
    mask = column < tl.where(fits, VALUE_SIZE, 0)
    v = tl.load(value + row * value_row + head * value_head + column, mask=mask, other=0.0)
    target = values + row * values_row + head * values_head + position * VALUE_SIZE
    tl.store(target + column, v.to(values.dtype.element_ty), mask=mask)


def append_kv(
    keys_BKLD: Tensor, values_BKLD: Tensor, key_BK1D: Tensor, value_BK1D: Tensor, length_B: Tensor
) -> None:
    """Store each row's new key and value at position `length_B` of its cache. Values may be shorter
    than keys."""
    B, K, L, D = keys_BKLD.shape
    value_size = values_BKLD.shape[3]
    assert keys_BKLD.stride()[2:] == (D, 1) and values_BKLD.stride()[2:] == (value_size, 1)
    key, value = with_dense_rows(key_BK1D), with_dense_rows(value_BK1D)
    _append_kv[(B, K)](
        key, value, keys_BKLD, values_BKLD, length_B, *key.stride()[:2], *value.stride()[:2],
        *keys_BKLD.stride()[:2], *values_BKLD.stride()[:2], L,
        SIZE=D, PADDED=triton.next_power_of_2(D),
        VALUE_SIZE=value_size, VALUE_PADDED=triton.next_power_of_2(value_size), num_warps=1,
    )  # fmt: skip


@triton.jit
def _swiglu(gate, up, out, gate_row, up_row, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    g = tl.load(gate + row * gate_row + column, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + column, mask=mask, other=0.0).to(tl.float32)
    silu = (g / (1.0 + tl.exp(-g))).to(gate.dtype.element_ty).to(tl.float32)
    tl.store(out + row * SIZE + column, (silu * u).to(out.dtype.element_ty), mask=mask)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up."""
    size = gate.shape[-1]
    dtype = torch.promote_types(gate.dtype, up.dtype)
    out = torch.empty(gate.shape, dtype=dtype, device=gate.device)
    gate_NI, up_NI = (with_dense_rows(x.reshape(-1, size)) for x in (gate, up))
    block = min(SWIGLU_BLOCK, triton.next_power_of_2(size))
    _swiglu[(gate_NI.shape[0], triton.cdiv(size, block))](
        gate_NI, up_NI, out, gate_NI.stride(0), up_NI.stride(0), SIZE=size, BLOCK=block,
        num_warps=4,
    )  # fmt: skip
    return out


def with_dense_rows(x: Tensor) -> Tensor:
    """The kernels take any stride but that of the last dimension, which must be 1."""
    return x if x.stride(-1) == 1 else x.contiguous()
