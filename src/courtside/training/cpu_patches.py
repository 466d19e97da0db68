"""Training on a CPU with less memory: reused gradient buffers, bf16 linear layers, and norms and
gated products that save their inputs alone.

A backward pass allocates gradients between activations that it frees, and they live until the
optimizer has stepped: the heap fragments, and the next pass, of other lengths, cannot reuse it. So
a gradient is moved into a preallocated buffer as soon as it exists. The gradient of an embedding
would be allocated for the whole vocabulary in every pass; here the rows of the pass are added.

Autocast casts a weight in its first pass, between activations, casts an input once for each layer
that consumes it, and casts each weight gradient to float32 before adding it. Here the shadow
weights of a step share one buffer, layers with the same input share its cast, and the cast of a
gradient is part of its addition. Results are bit-identical.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from courtside.engines.patches.fused_layers import match_swiglu_mlp, takes_one_input
from courtside.engines.patches.patch import Patch

MMAP_BYTES = 2**25
"""Larger tensors do not fragment the heap: it is the largest value of glibc's mmap threshold."""
ALIGNMENT = 64
"""Bytes: a cache line."""


def make_cpu_patches(
    model: Any, head: nn.Module, buffers: GradientBuffers, recomputed: RecomputedLayers
) -> list[Patch]:
    """For all passes of a step, inside autocast; the LM head has its own matmuls."""
    patches = [*_embedding_patches(model), *_linear_patches(model, head, buffers)]
    patches += [Patch(m, "forward", partial(_normalize, m)) for m in recomputed.norms]
    return patches + [Patch(m, "forward", partial(_run_gated_mlp, m)) for m in recomputed.mlps]


class GradientBuffers:
    """Buffers for the gradients of parameters below `MMAP_BYTES`, and for shadow weights."""

    def __init__(self, parameters: Iterable[nn.Parameter]):
        self.parameters = tuple(parameters)
        small = [p for p in self.parameters if p.nbytes < MMAP_BYTES]
        self._gradients = dict(zip(map(id, small), allocate_contiguous(small), strict=True))
        self._shadow: tuple[list[int], list[Tensor]] = ([], [])

    def shadow_weights(self, weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Copies of the weights in `dtype`; the next call overwrites them."""
        ids = [id(weight) for weight in weights]
        if self._shadow[0] != ids:
            self._shadow = ids, allocate_contiguous(weights, dtype)
        copies = self._shadow[1]
        for copy, weight in zip(copies, weights, strict=True):
            copy.copy_(weight.detach())
        return copies

    def accumulate(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add to the parameter's gradient; the cast to its dtype is part of the addition."""
        if parameter.grad is not None:
            parameter.grad.add_(gradient)
        elif id(parameter) in self._gradients:
            parameter.grad = self._gradients[id(parameter)].copy_(gradient)
        else:
            parameter.grad = gradient.to(parameter.dtype)

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Around the passes of a step. The gradients stay in the buffers afterwards."""
        hooks = [p.register_post_accumulate_grad_hook(self.move) for p in self.parameters]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def move(self, parameter: Tensor) -> None:
        """Move a gradient that autograd allocated; from then on autograd adds to the buffer."""
        buffer = self._gradients.get(id(parameter))
        if buffer is not None and parameter.grad is not None and parameter.grad is not buffer:
            parameter.grad = buffer.copy_(parameter.grad)


def allocate_contiguous(like: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Uninitialized tensors of these shapes in one allocation. Pages that are never written take
    no memory."""
    dtypes = [dtype or tensor.dtype for tensor in like]
    sizes = [tensor.numel() * d.itemsize for tensor, d in zip(like, dtypes, strict=True)]
    aligned = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    parts = torch.empty(sum(aligned), dtype=torch.uint8).split(aligned)
    return [
        part[:size].view(d).view(tensor.shape)
        for part, size, d, tensor in zip(parts, sizes, dtypes, like, strict=True)
    ]


# ── norms and gated products ─────────────────────────────────────────────────────────────────────


class RecomputedLayers:
    """RMSNorms and SwiGLU MLPs, of which less is saved: it costs little to compute it again."""

    @torch.no_grad()
    def __init__(self, model: Any):
        modules = [m for m in model.modules() if "forward" not in vars(m)]
        mlps = [m for m in modules if hasattr(m, "gate_proj") and hasattr(m, "up_proj")]
        self.mlps = [m for m in mlps if match_swiglu_mlp(m) is not None]
        self.norms = [m for m in modules if _is_plain_norm(m)]


def _is_plain_norm(module: Any) -> bool:
    """Whether `_rms_norm` computes what the module does, bit for bit."""
    weight = getattr(module, "weight", None)
    if "RMSNorm" not in type(module).__name__ or not hasattr(module, "variance_epsilon"):
        return False
    if weight is None or weight.dtype != torch.float32 or weight.dim() != 1:
        return False
    if not takes_one_input(module):
        return False
    x = torch.linspace(-2, 3, 3 * len(weight)).sin().view(3, -1)
    return torch.equal(_rms_norm(x, x, weight, module.variance_epsilon), module(x))


def _rms_norm(x: Tensor, same_x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`same_x` is `x`, with a gradient of its own."""
    return weight * (x * torch.rsqrt(same_x.pow(2).mean(-1, keepdim=True) + eps))


def _normalize(module: Any, x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        y: Tensor = type(module).forward(module, x)
        return y
    y = _RMSNorm.apply(x, x, module.weight, module.variance_epsilon)  # type: ignore[no-untyped-call]
    return y


class _RMSNorm(torch.autograd.Function):
    """Saves its input alone, where autograd also saves the normalized one. The input comes twice,
    so that its two gradients are added in autograd's order: the sums are the same bit for bit."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, same_x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.eps = eps
        ctx.save_for_backward(x, weight)
        return _rms_norm(x, same_x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        with torch.enable_grad():
            leaves = [
                v.detach().requires_grad_(n) for v, n in zip((x, x, weight), needs, strict=True)
            ]
            y = _rms_norm(leaves[0], leaves[1], leaves[2], ctx.eps)
        gradients = iter(torch.autograd.grad(y, [*compress(leaves, needs)], gradient))
        return *(next(gradients) if need else None for need in needs), None


def _run_gated_mlp(module: Any, x: Tensor) -> Tensor:
    product = _GatedProduct.apply(module.gate_proj(x), module.up_proj(x))  # type: ignore[no-untyped-call]
    y: Tensor = module.down_proj(product)
    return y


class _GatedProduct(torch.autograd.Function):
    """silu(gate) · up by the operations of autograd, which would also save silu(gate)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        gate_gradient = torch.ops.aten.silu_backward(gradient * up, gate)
        return gate_gradient, F.silu(gate).mul_(gradient)


# ── embeddings ───────────────────────────────────────────────────────────────────────────────────


def _embedding_patches(model: Any) -> list[Patch]:
    module = model.get_input_embeddings()
    if type(module) is not nn.Embedding or "forward" in vars(module):  # patched already
        return []
    is_plain = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
    if not is_plain or not module.weight.requires_grad:
        return []
    return [Patch(module, "forward", partial(_embed, module))]


def _embed(module: nn.Embedding, ids: Tensor) -> Tensor:
    embedded: Tensor = _Embedding.apply(module.weight, ids, module.padding_idx)  # type: ignore[no-untyped-call]
    return embedded


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_VD: Tensor, ids: Tensor, padding_id: int | None) -> Tensor:
        ctx.weight_VD, ctx.padding_id = weight_VD, padding_id
        ctx.save_for_backward(ids)
        return F.embedding(ids, weight_VD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        (ids,) = ctx.saved_tensors
        gradient_ND = gradient.flatten(0, -2)
        add_embedding_gradient(ctx.weight_VD, ids.flatten(), gradient_ND, ctx.padding_id)
        return None, None, None


@torch.no_grad()
def add_embedding_gradient(
    weight_VD: Tensor, ids_N: Tensor, gradient_ND: Tensor, padding_id: int | None
) -> None:
    """Rows of one token are summed before they are added to the gradient, as torch does it."""
    if padding_id is not None:
        keep_N = ids_N != padding_id
        ids_N, gradient_ND = ids_N[keep_N], gradient_ND[keep_N]
    if weight_VD.grad is None:
        weight_VD.grad = torch.zeros_like(weight_VD)
    unique_U, index_N = ids_N.unique(return_inverse=True)
    sums_UD = gradient_ND.new_zeros(len(unique_U), gradient_ND.shape[-1])
    sums_UD.index_add_(0, index_N, gradient_ND)
    weight_VD.grad.index_add_(0, unique_U, sums_UD.to(weight_VD.grad.dtype))


# ── linear layers ────────────────────────────────────────────────────────────────────────────────


def _linear_patches(model: Any, head: nn.Module, buffers: GradientBuffers) -> list[Patch]:
    """Layers with a bias and those that autocast would not cast are left alone."""
    if not torch.is_autocast_enabled("cpu"):
        return []
    head_modules = set(head.modules())
    layers = [m for m in model.modules() if m not in head_modules and _is_plain_linear(m)]
    cast_input = _InputCast(torch.get_autocast_dtype("cpu"))
    shadow = buffers.shadow_weights([layer.weight for layer in layers], cast_input.dtype)
    return [
        Patch(layer, "forward", partial(_bf16_linear, layer.weight, copy, cast_input, buffers))
        for layer, copy in zip(layers, shadow, strict=True)
    ]


def _is_plain_linear(module: Any) -> bool:
    if type(module) is not nn.Linear or module.bias is not None or "forward" in vars(module):
        return False
    return module.weight.requires_grad and module.weight.dtype == torch.float32


class _InputCast:
    """Casts an input once for the consecutive layers that consume it."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self.last: tuple[weakref.ref[Tensor], int, Tensor] | None = None
        """The last input (a weak reference), its version, and its cast."""

    def __call__(self, x: Tensor) -> Tensor:
        if self.last is None or self.last[0]() is not x or self.last[1] != x._version:
            self.last = weakref.ref(x), x._version, x.detach().to(self.dtype)
        return self.last[2]


def _bf16_linear(
    weight: Tensor, shadow: Tensor, cast_input: _InputCast, buffers: GradientBuffers, x: Tensor
) -> Tensor:
    y: Tensor = _Bf16Linear.apply(x, weight, cast_input(x), shadow, buffers)  # type: ignore[no-untyped-call]
    return y


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
