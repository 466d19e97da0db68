"""Norms and gates that keep less for the way back, by torch alone.

Torch keeps what each operation was given: of a norm its input and the input over its size, of a
gate the activation beside what that was made of, and the layer behind it keeps the product. One or
two operations make such a thing again, with the same numbers and so with the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def scale_rows(x: Tensor, scale: Tensor, weight_D: Tensor) -> Tensor:
    """x · scale · weight; a scale a row."""
    found: Tensor = _Scaled.apply(x, scale, weight_D)  # type: ignore[no-untyped-call]
    return found


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, weight_D: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale, weight_D)
        return weight_D * (x * scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, scale, weight_D = ctx.saved_tensors
        of_weight = None
        if ctx.needs_input_grad[2]:
            of_weight = (gradient * (x * scale)).sum_to_size(weight_D.shape)
        gradient = gradient * weight_D
        return gradient * scale, (gradient * x).sum(-1, keepdim=True), of_weight


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up."""
    found: Tensor = _Gated.apply(gate, up)  # type: ignore[no-untyped-call]
    return found


def swiglu_linear(layer: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    """`layer` of silu(gate) · up, which it does not keep."""
    product = swiglu(gate, up)
    gate, up, address, size = gate.detach(), up.detach(), product.data_ptr(), product.numel()

    def pack(kept: Tensor) -> Tensor | tuple[int, ...]:
        whole = kept.data_ptr() == address and kept.numel() == size and kept.is_contiguous()
        return tuple(kept.shape) if whole else kept

    def unpack(packed: Tensor | tuple[int, ...]) -> Tensor:
        return packed if isinstance(packed, Tensor) else (F.silu(gate) * up).view(packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return layer(product)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        of_gate = torch.ops.aten.silu_backward(gradient * up, gate)
        return of_gate, gradient * F.silu(gate)
