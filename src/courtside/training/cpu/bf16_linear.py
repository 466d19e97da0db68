"""Linear layers that train in bfloat16 on a CPU: autocast's results with less memory.

Autocast casts a weight in its first pass, between activations, casts an input once for each layer
that consumes it, and casts each weight gradient to float32 before adding it. Here the shadow
weights of a step share one buffer, layers with the same input share its cast, and the cast of a
gradient is part of its addition. Results are bit-identical.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from courtside.engines.patches.patch import Patch, apply_patches, has_class_forward
from courtside.training.cpu.gradient_buffers import GradientBuffers


@contextmanager
def use_bf16_linear(model: Any, head: nn.Module, buffers: GradientBuffers) -> Iterator[None]:
    """Around all passes of a step, inside autocast. The LM head has its own matmuls; layers with a
    bias and those that autocast would not cast are left alone."""
    if model.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
        yield
        return
    head_modules = set(head.modules())
    layers = [m for m in model.modules() if m not in head_modules and _is_plain(m)]
    with apply_patches(_Bf16Layers(layers, buffers, torch.get_autocast_dtype("cpu")).patches()):
        yield


def _is_plain(module: Any) -> bool:
    if type(module) is not nn.Linear or module.bias is not None or not has_class_forward(module):
        return False
    return module.weight.requires_grad and module.weight.dtype == torch.float32


class _Bf16Layers:
    def __init__(self, layers: Sequence[nn.Linear], buffers: GradientBuffers, dtype: torch.dtype):
        self.layers, self.buffers, self.dtype = layers, buffers, dtype
        self.shadow = buffers.shadow_weights([layer.weight for layer in layers], dtype)
        self.last_cast: tuple[weakref.ref[Tensor], int, Tensor] | None = None
        """The last input (not kept alive), its version, and its cast."""

    def patches(self) -> Iterator[Patch]:
        for layer, shadow in zip(self.layers, self.shadow, strict=True):
            yield Patch(layer, "forward", self._forward(layer.weight, shadow))

    def _forward(self, weight: Tensor, shadow: Tensor) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            y: Tensor = _Bf16Linear.apply(x, weight, self._cast(x), shadow, self.buffers)  # type: ignore[no-untyped-call]
            return y

        return forward

    def _cast(self, x: Tensor) -> Tensor:
        last = self.last_cast
        if last is None or last[0]() is not x or last[1] != x._version:
            last = self.last_cast = weakref.ref(x), x._version, x.detach().to(self.dtype)
        return last[2]


class _Bf16Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, cast: Tensor, shadow: Tensor, buffers: GradientBuffers
    ) -> Tensor:
        ctx.weight, ctx.buffers, ctx.dtype = weight, buffers, x.dtype
        ctx.save_for_backward(cast, shadow)
        return F.linear(cast, shadow)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        cast, shadow = ctx.saved_tensors
        gradient_NO, cast_NI = gradient.flatten(0, -2), cast.flatten(0, -2)
        ctx.buffers.accumulate(ctx.weight, gradient_NO.t() @ cast_NI)
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        return (gradient_NO @ shadow).view_as(cast).to(ctx.dtype), None, None, None, None
