# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""What stands between the matrix products of a layer, a Triton kernel each.

Torch spells each of these as three to ten launches, and a step of decoding with few rows is as long
as its launches. All read their input where it lies, in whatever numbers it is, compute in float32
and round where torch would: so they read parts of a joined product without a copy.
`layer_parts` has the same in torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_GATED = 1024


@triton.jit
def _rms_norm(x, weight, out, eps, outer, inner, num_inner, SIZE: tl.constexpr,
              PADDED: tl.constexpr, ROUNDS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    first = (row // num_inner) * outer + (row % num_inner) * inner
    y = tl.load(x + first + at, mask=at < SIZE, other=0.0).to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / SIZE + eps)
    if ROUNDS:
        y = y.to(x.dtype.element_ty).to(tl.float32)
    y = y * tl.load(weight + at, mask=at < SIZE, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + at, y.to(out.dtype.element_ty), mask=at < SIZE)


def rms_norm(
    x: Tensor, weight_D: Tensor, *, eps: float, dtype: torch.dtype, rounds: bool
) -> Tensor:
    """`rounds`: to the numbers of `x` before the weights are multiplied."""
    D = x.shape[-1]
    x_NKD = x.reshape(-1, x.shape[-2] if x.dim() > 2 else 1, D)
    if x_NKD.stride(2) != 1:
        x_NKD = x_NKD.contiguous()
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    padded = triton.next_power_of_2(D)
    _rms_norm[(x_NKD.shape[0] * x_NKD.shape[1],)](
        x_NKD, weight_D, out, eps, x_NKD.stride(0), x_NKD.stride(1), x_NKD.shape[1],
        SIZE=D, PADDED=padded, ROUNDS=rounds, num_warps=min(max(padded // 256, 1), 8),
    )  # fmt: skip
    return out


@triton.jit
def _turned(source, out, cos, sin, HALF: tl.constexpr, PADDED: tl.constexpr):
    at = tl.arange(0, PADDED)
    inside = at < HALF
    low = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF + at, mask=inside, other=0.0).to(tl.float32)
    low_cos = _times(low, cos + at, out, inside)
    high_sin = _times(high, sin + at, out, inside)
    high_cos = _times(high, cos + HALF + at, out, inside)
    low_sin = _times(low, sin + HALF + at, out, inside)
    numbers = out.dtype.element_ty
    tl.store(out + at, (low_cos - high_sin).to(numbers), mask=inside)
    tl.store(out + HALF + at, (high_cos + low_sin).to(numbers), mask=inside)


@triton.jit
def _times(x, factor, out, inside):
    """A product, rounded as torch rounds it before it adds two."""
    product = x * tl.load(factor, mask=inside, other=0.0).to(tl.float32)
    return product.to(out.dtype.element_ty).to(tl.float32)


@triton.jit
def _rotate(query, key, cos, sin, query_out, key_out, query_row, query_head, key_row, key_head,
            cos_row, sin_row, QUERIES: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr,
            PADDED: tl.constexpr):  # fmt: skip
    """One head of one row: the heads of the query first, then those of the key."""
    row, head = tl.program_id(0), tl.program_id(1)
    cos += row * cos_row
    sin += row * sin_row
    if head < QUERIES:
        query += row * query_row + head * query_head
        _turned(query, query_out + (row * QUERIES + head) * SIZE, cos, sin, SIZE // 2, PADDED)
    else:
        key += row * key_row + (head - QUERIES) * key_head
        out = key_out + (row * KEYS + head - QUERIES) * SIZE
        _turned(key, out, cos, sin, SIZE // 2, PADDED)


def rotate(
    query_BH1D: Tensor, key_BK1D: Tensor, cos_B1D: Tensor, sin_B1D: Tensor
) -> tuple[Tensor, Tensor]:
    """Both with position: halves turned against each other by the row's angles."""
    B, H, _, D = query_BH1D.shape
    K = key_BK1D.shape[1]
    dtype = torch.promote_types(query_BH1D.dtype, cos_B1D.dtype)
    query_out = torch.empty(B, H, 1, D, dtype=dtype, device=query_BH1D.device)
    key_out = torch.empty(B, K, 1, D, dtype=dtype, device=query_BH1D.device)
    query, key, cos, sin = (_dense(x) for x in (query_BH1D, key_BK1D, cos_B1D, sin_B1D))
    _rotate[(B, H + K)](
        query, key, cos, sin, query_out, key_out, query.stride(0), query.stride(1), key.stride(0),
        key.stride(1), cos.stride(0), sin.stride(0), QUERIES=H, KEYS=K, SIZE=D,
        PADDED=triton.next_power_of_2(D // 2), num_warps=1,
    )  # fmt: skip
    return query_out, key_out


@triton.jit
def _append(key, value, keys, values, lengths, key_row, key_head, value_row, value_head,
            row_places, head_places, num_places, SIZE: tl.constexpr,
            PADDED: tl.constexpr):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, PADDED)
    place = tl.load(lengths + row)
    # A row without room would write into its neighbour's.
    inside = at < tl.where(place < num_places, SIZE, 0)
    k = tl.load(key + row * key_row + head * key_head + at, mask=inside, other=0.0)
    v = tl.load(value + row * value_row + head * value_head + at, mask=inside, other=0.0)
    where = row * row_places + head * head_places + place * SIZE + at
    tl.store(keys + where, k.to(keys.dtype.element_ty), mask=inside)
    tl.store(values + where, v.to(values.dtype.element_ty), mask=inside)


def append(
    keys_BKLD: Tensor, values_BKLD: Tensor, key_BK1D: Tensor, value_BK1D: Tensor, length_B: Tensor
) -> None:
    """Write each row's new key and value behind the `length_B` that it has."""
    B, K, L, D = keys_BKLD.shape
    assert keys_BKLD.stride() == values_BKLD.stride() and keys_BKLD.stride()[2:] == (D, 1)
    key, value = _dense(key_BK1D), _dense(value_BK1D)
    _append[(B, K)](
        key, value, keys_BKLD, values_BKLD, length_B, key.stride(0), key.stride(1),
        value.stride(0), value.stride(1), keys_BKLD.stride(0), keys_BKLD.stride(1), L,
        SIZE=D, PADDED=triton.next_power_of_2(D), num_warps=1,
    )  # fmt: skip


@triton.jit
def _gated(gate, up, out, gate_row, up_row, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + row * gate_row + at, mask=at < SIZE, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + at, mask=at < SIZE, other=0.0).to(tl.float32)
    open_ = (g / (1.0 + tl.exp(-g))).to(gate.dtype.element_ty).to(tl.float32)
    tl.store(out + row * SIZE + at, (open_ * u).to(out.dtype.element_ty), mask=at < SIZE)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up."""
    size = gate.shape[-1]
    dtype = torch.promote_types(gate.dtype, up.dtype)
    out = torch.empty(gate.shape, dtype=dtype, device=gate.device)
    gate_NI, up_NI = _dense(gate.reshape(-1, size)), _dense(up.reshape(-1, size))
    block = min(BLOCK_GATED, triton.next_power_of_2(size))
    _gated[(gate_NI.shape[0], triton.cdiv(size, block))](
        gate_NI, up_NI, out, gate_NI.stride(0), up_NI.stride(0), SIZE=size, BLOCK=block,
        num_warps=4,
    )  # fmt: skip
    return out


def _dense(x: Tensor) -> Tensor:
    """Its last dimension lies together; the kernels step over the others."""
    return x if x.stride(-1) == 1 else x.contiguous()
