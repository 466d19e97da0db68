"""Linear layers that train in bfloat16 on a CPU: what autocast computes, with less in memory.

Autocast rounds a weight when a pass first comes by it, between activations, and its input once for
every layer that reads it; on the way back it widens each gradient of a weight before that is added.
Here the rounded weights of a step lie in one piece, layers that read the same input share one
rounded copy, and a gradient is widened while it is added. All numbers are the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from courtside.engines.patches.patch import Patch, apply_patches, has_class_forward
from courtside.training.cpu.gradient_buffers import GradientBuffers


@contextmanager
def use_bf16_linear(model: Any, head: nn.Module, rooms: GradientBuffers) -> Iterator[None]:
    """Around all passes of a step, inside autocast; the head has products of its own. What autocast
    would not round is left alone, and so are layers with a bias."""
    if model.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
        yield
        return
    own = set(head.modules())
    layers = [m for m in model.modules() if m not in own and _is_plain(m)]
    products = _Products(layers, rooms, torch.get_autocast_dtype("cpu"))
    with apply_patches(products.patches()):
        yield


def _is_plain(module: Any) -> bool:
    if type(module) is not nn.Linear or module.bias is not None or not has_class_forward(module):
        return False
    return module.weight.requires_grad and module.weight.dtype == torch.float32


class _Products:
    def __init__(self, layers: Sequence[nn.Linear], rooms: GradientBuffers, dtype: torch.dtype):
        self.layers, self.rooms, self.dtype = layers, rooms, dtype
        self.copies = rooms.rounded([layer.weight for layer in layers], dtype)
        self.read: tuple[weakref.ref[Tensor], int, Tensor] | None = None
        """The last input, which is not kept for this, its version, and what it is rounded."""

    def patches(self) -> Iterator[Patch]:
        for layer, copy in zip(self.layers, self.copies, strict=True):
            yield Patch(layer, "forward", self._product(layer.weight, copy))

    def _product(self, weight: Tensor, copy: Tensor) -> Any:
        def product(x: Tensor) -> Tensor:
            found: Tensor = _Product.apply(x, weight, self._rounded(x), copy, self.rooms)  # type: ignore[no-untyped-call]
            return found

        return product

    def _rounded(self, x: Tensor) -> Tensor:
        if self.read is None or self.read[0]() is not x or self.read[1] != x._version:
            self.read = weakref.ref(x), x._version, x.detach().to(self.dtype)
        return self.read[2]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, rounded: Tensor, copy: Tensor, rooms: GradientBuffers
    ) -> Tensor:
        ctx.weight, ctx.rooms, ctx.dtype = weight, rooms, x.dtype
        ctx.save_for_backward(rounded, copy)
        return F.linear(rounded, copy)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        rounded, copy = ctx.saved_tensors
        gradient_NO, rounded_NI = gradient.flatten(0, -2), rounded.flatten(0, -2)
        ctx.rooms.add(ctx.weight, gradient_NO.t() @ rounded_NI)
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        return (gradient_NO @ copy).view_as(rounded).to(ctx.dtype), None, None, None, None
