# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The mass of all tokens outside a top-k support, as a Triton kernel: one program per row.

A log-sum-exp over the tokens outside S, where 1 − Σ_S p would be rounding noise. S differs from row
to row, so its logits are NaN while the kernel runs: it leaves NaN out, and they are put back.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from courtside.losses.fused.kernels import (
    LN2,
    LOG2E,
    LOWEST,
    OUTPUTS,
    PADDING,
    load_logits,
    over_temperature,
)
from courtside.losses.fused.types import RawLogits


def store_tails(
    side: RawLogits,
    support: list[tuple[Tensor, Tensor]],
    temperature_N: Tensor,
    outputs: Tensor,
    *,
    prefix: str,
    lanes: int,
    width: int,
    num_warps: int,
) -> None:
    """Fill the output `{prefix}tail` of these rows, whose statistics are there already. `support`:
    ids and raw logits of the tokens of S, in one or two lists."""
    values_NV = side.values_NV
    num_rows, vocab_size = values_NV.shape
    if not num_rows:
        return
    for ids_NK, _ in support:
        values_NV.scatter_(-1, ids_NK, float("nan"))
    tail_kernel[(num_rows,)](
        values_NV, temperature_N, outputs, values_NV.stride(0), outputs.stride(0),
        float(side.scale), float(side.softcap or 1.0), FIRST=OUTPUTS.index(f"{prefix}shift"),
        TAIL=OUTPUTS.index(f"{prefix}tail"), CAPPED=side.softcap is not None,
        VOCAB_SIZE=vocab_size, LANES=lanes, WIDTH=width, num_warps=num_warps,
    )  # fmt: skip
    for ids_NK, logits_NK in support:
        values_NV.scatter_(-1, ids_NK, logits_NK.to(values_NV.dtype))


@triton.jit(
    do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["temperatures", "outputs"]
)
def tail_kernel(
    values, temperatures, outputs, stride, num_rows, scale, cap, FIRST: tl.constexpr,
    TAIL: tl.constexpr, CAPPED: tl.constexpr, VOCAB_SIZE: tl.constexpr, LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """One row. FIRST: of the three outputs that its log-sum-exp over all tokens is in."""
    n = tl.program_id(0)
    row = values + n.to(tl.int64) * stride
    out = outputs + n
    temperature = tl.load(temperatures + n)
    shift = tl.load(out + FIRST * num_rows)
    offsets = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    BLOCK: tl.constexpr = LANES * WIDTH
    WHOLE: tl.constexpr = VOCAB_SIZE // BLOCK * BLOCK
    top = tl.full([LANES], LOWEST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    for MASKED in tl.static_range(2):
        for start in range(MASKED * WHOLE, WHOLE + MASKED * (VOCAB_SIZE - WHOLE), BLOCK):
            raw = load_logits(row, start + offsets, VOCAB_SIZE, MASKED)
            x = over_temperature(raw, shift, scale, cap, temperature, CAPPED)
            x = tl.where(raw == raw, x, PADDING)
            if MASKED:
                x = tl.where(start + offsets < VOCAB_SIZE, x, PADDING)
            new_top = tl.maximum(top, tl.max(x, 1))
            total = total * tl.exp2((top - new_top) * LOG2E)
            total += tl.sum(tl.exp2((x - new_top[:, None]) * LOG2E), 1)
            top = new_top
    row_top = tl.max(top, 0)
    row_total = tl.sum(total * tl.exp2((top - row_top) * LOG2E), 0)
    norm = tl.load(out + (FIRST + 1) * num_rows) + tl.load(out + (FIRST + 2) * num_rows) * LN2
    tl.store(out + TAIL * num_rows, row_top + tl.log2(row_total) * LN2 - norm)
