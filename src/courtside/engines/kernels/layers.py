# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""What stands between the matrix products of a layer, a Triton kernel each.

Torch spells each of these as three to ten launches, and a step of decoding with few rows is as long
as its launches. All read their input where it lies, in whatever numbers it is, compute in float32
and round where torch would: so they read parts of a joined product without a copy.
`layer_ops` has the same in torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SWIGLU_BLOCK = 1024
MIN_TILED_ROWS = 8192
PROGRAM_ELEMENTS = 1024
"""Numbers of one program where rows are many."""


@triton.jit
def _rms_norm(x, weight, out, scales, eps, outer, inner, num_inner, num_rows, SIZE: tl.constexpr,
              PADDED: tl.constexpr, ROWS: tl.constexpr, ROUNDS: tl.constexpr,
              KEEPS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, PADDED)
    inside = (row < num_rows)[:, None] & (at < SIZE)[None, :]
    first = row_offset(row, outer, inner, num_inner)
    y = tl.load(x + first[:, None] + at[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(y * y, 1) / SIZE + eps)
    if KEEPS:
        tl.store(scales + row, scale, mask=row < num_rows)
    y = y * scale[:, None]
    if ROUNDS:
        y = y.to(x.dtype.element_ty).to(tl.float32)
    y = y * tl.load(weight + at, mask=at < SIZE, other=0.0).to(tl.float32)[None, :]
    where = row.to(tl.int64)[:, None] * SIZE + at[None, :]
    tl.store(out + where, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def row_offset(row, outer, inner, num_inner):
    """Where rows begin. Divided in 32 bits: in 64 that is long."""
    return (row // num_inner).to(tl.int64) * outer + (row % num_inner).to(tl.int64) * inner


def rms_norm(
    x: Tensor,
    weight_D: Tensor,
    *,
    eps: float,
    dtype: torch.dtype,
    rounds: bool,
    scales: Tensor | None = None,
) -> Tensor:
    """`rounds`: to the numbers of `x` before the weights are multiplied. `scales` [rows] gets what
    each row was multiplied by."""
    D = x.shape[-1]
    x_NKD = as_rows(x)
    num_rows = x_NKD.shape[0] * x_NKD.shape[1]
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    padded = triton.next_power_of_2(D)
    rows = rows_per_program(num_rows, padded)
    _rms_norm[(triton.cdiv(num_rows, rows),)](
        x_NKD, weight_D, out, scales, eps, x_NKD.stride(0), x_NKD.stride(1), x_NKD.shape[1],
        num_rows, SIZE=D, PADDED=padded, ROWS=rows, ROUNDS=rounds, KEEPS=scales is not None,
        num_warps=warps_per_program(rows, padded),
    )  # fmt: skip
    return out


def as_rows(x: Tensor) -> Tensor:
    """As [outer, inner, D] with the last dimension in one piece, without a copy where possible."""
    return with_dense_rows(x.reshape(-1, x.shape[-2] if x.dim() > 2 else 1, x.shape[-1]))


def rows_per_program(num_rows: int, padded: int, tile: int = PROGRAM_ELEMENTS) -> int:
    """Rows of one program: few rows want many programs, many short rows want fewer."""
    return max(1, tile // padded) if num_rows > MIN_TILED_ROWS else 1


def warps_per_program(rows: int, padded: int) -> int:
    """Eight numbers a thread: sixteen bytes of bfloat16 are one load."""
    return min(max(rows * padded // 256, 1), 8)


@triton.jit
def _turned(source, out, cos, sin, first, head_step, COUNT: tl.constexpr, SIZE: tl.constexpr,
            PADDED: tl.constexpr, HEADS: tl.constexpr, ROUNDS: tl.constexpr,
            BACK: tl.constexpr):  # fmt: skip
    """The halves of `HEADS` heads from `first` on turned against each other; `BACK`: what gradients
    go through."""
    HALF: tl.constexpr = SIZE // 2
    head = first + tl.arange(0, HEADS)
    at = tl.arange(0, PADDED)
    half = at < HALF
    inside = (head < COUNT)[:, None] & half[None, :]
    source += head.to(tl.int64)[:, None] * head_step + at[None, :]
    out += head[:, None] * SIZE + at[None, :]
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    low_cos = _times(low, cos + at, out, half, ROUNDS)
    high_cos = _times(high, cos + HALF + at, out, half, ROUNDS)
    if BACK:
        turned_low = low_cos + _times(high, sin + HALF + at, out, half, ROUNDS)
        turned_high = high_cos - _times(low, sin + at, out, half, ROUNDS)
    else:
        turned_low = low_cos - _times(high, sin + at, out, half, ROUNDS)
        turned_high = high_cos + _times(low, sin + HALF + at, out, half, ROUNDS)
    numbers = out.dtype.element_ty
    tl.store(out, turned_low.to(numbers), mask=inside)
    tl.store(out + HALF, turned_high.to(numbers), mask=inside)


@triton.jit
def _times(x, factor, out, half, ROUNDS: tl.constexpr):
    """All heads by the factor of their place, rounded where torch would before it adds two."""
    product = x * tl.load(factor, mask=half, other=0.0).to(tl.float32)[None, :]
    if ROUNDS:
        product = product.to(out.dtype.element_ty).to(tl.float32)
    return product


@triton.jit
def _rotate(query, key, cos, sin, query_out, key_out, query_row, query_head, query_place, key_row,
            key_head, key_place, cos_row, cos_place, sin_row, sin_place, num_places,
            QUERIES: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
            HEADS: tl.constexpr, ROUNDS: tl.constexpr, BACK: tl.constexpr):  # fmt: skip
    """`HEADS` heads at one place: those of the query first, then those of the key. Programs of a
    place are neighbours: memory gives its angles once."""
    QUERY_TILES: tl.constexpr = (QUERIES + HEADS - 1) // HEADS
    TILES: tl.constexpr = QUERY_TILES + (KEYS + HEADS - 1) // HEADS
    index, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    row, place = (index // num_places).to(tl.int64), (index % num_places).to(tl.int64)
    cos += row * cos_row + place * cos_place
    sin += row * sin_row + place * sin_place
    first_out = index.to(tl.int64) * SIZE
    if tile < QUERY_TILES:
        _turned(query + row * query_row + place * query_place, query_out + first_out * QUERIES,
                cos, sin, tile * HEADS, query_head, QUERIES, SIZE, PADDED, HEADS, ROUNDS,
                BACK)  # fmt: skip
    else:
        _turned(key + row * key_row + place * key_place, key_out + first_out * KEYS,
                cos, sin, (tile - QUERY_TILES) * HEADS, key_head, KEYS, SIZE, PADDED, HEADS, ROUNDS,
                BACK)  # fmt: skip


def apply_rotary(
    query_BHND: Tensor,
    key_BKND: Tensor,
    cos_BND: Tensor,
    sin_BND: Tensor,
    *,
    dtypes: tuple[torch.dtype, torch.dtype],
    back: bool = False,
    tile: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Both with position: halves turned against each other by each place's angles. `dtypes` of the
    results, which lie as [B, N, heads, D]. One row of angles may serve all rows. `tile`: heads of
    one program, a power of two."""
    B, H, N, D = query_BHND.shape
    K = key_BKND.shape[1]
    device = query_BHND.device
    query_out = torch.empty(B, N, H, D, dtype=dtypes[0], device=device)
    key_out = torch.empty(B, N, K, D, dtype=dtypes[1], device=device)
    query, key, cos, sin = (with_dense_rows(x) for x in (query_BHND, key_BKND, cos_BND, sin_BND))
    per_row = [0 if len(x) == 1 else x.stride(0) for x in (cos, sin)]
    # Torch multiplies in 16 bits where both are of those, and rounds each product.
    rounds = not back and torch.promote_types(query.dtype, cos.dtype).itemsize == 2
    padded = triton.next_power_of_2(D // 2)
    most = triton.next_power_of_2(max(H, K))
    heads = tile or min(rows_per_program(B * N * (H + K), 2 * padded), most)
    _rotate[(B * N * (triton.cdiv(H, heads) + triton.cdiv(K, heads)),)](
        query, key, cos, sin, query_out, key_out, query.stride(0), query.stride(1),
        query.stride(2), key.stride(0), key.stride(1), key.stride(2), per_row[0], cos.stride(1),
        per_row[1], sin.stride(1), N, QUERIES=H, KEYS=K, SIZE=D, PADDED=padded, HEADS=heads,
        ROUNDS=rounds, BACK=back, num_warps=warps_per_program(heads, 2 * padded),
    )  # fmt: skip
    return query_out.transpose(1, 2), key_out.transpose(1, 2)


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


def append_kv(
    keys_BKLD: Tensor, values_BKLD: Tensor, key_BK1D: Tensor, value_BK1D: Tensor, length_B: Tensor
) -> None:
    """Write each row's new key and value behind the `length_B` that it has."""
    B, K, L, D = keys_BKLD.shape
    assert keys_BKLD.stride() == values_BKLD.stride() and keys_BKLD.stride()[2:] == (D, 1)
    key, value = with_dense_rows(key_BK1D), with_dense_rows(value_BK1D)
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


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up."""
    size = gate.shape[-1]
    dtype = torch.promote_types(gate.dtype, up.dtype)
    out = torch.empty(gate.shape, dtype=dtype, device=gate.device)
    gate_NI, up_NI = with_dense_rows(gate.reshape(-1, size)), with_dense_rows(up.reshape(-1, size))
    block = min(SWIGLU_BLOCK, triton.next_power_of_2(size))
    _gated[(gate_NI.shape[0], triton.cdiv(size, block))](
        gate_NI, up_NI, out, gate_NI.stride(0), up_NI.stride(0), SIZE=size, BLOCK=block,
        num_warps=4,
    )  # fmt: skip
    return out


def with_dense_rows(x: Tensor) -> Tensor:
    """Its last dimension lies together; the kernels step over the others."""
    return x if x.stride(-1) == 1 else x.contiguous()
