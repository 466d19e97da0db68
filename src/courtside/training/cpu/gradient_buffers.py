"""Gradient buffers for training on a CPU: contiguous, and reused from step to step.

A backward pass allocates gradients between activations that it frees, and they live until the
optimizer has stepped: the heap fragments, and the next pass, of other lengths, cannot reuse it. So
a gradient is moved into a preallocated buffer as soon as it exists.

The gradient of an embedding would be allocated for the whole vocabulary in every pass; here the
rows of the pass are added to the existing gradient. Results are bit-identical.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from courtside.engines.patches.patch import Patch, apply_patches, has_class_forward

MMAP_BYTES = 2**25
"""Larger tensors do not fragment the heap: it is the largest value of glibc's mmap threshold."""
ALIGNMENT = 64
"""Bytes: a cache line."""


class GradientBuffers:
    """Buffers for the gradients of parameters below `MMAP_BYTES`, and for shadow weights."""

    def __init__(self, parameters: Iterable[nn.Parameter]):
        small = [p for p in parameters if p.nbytes < MMAP_BYTES]
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
    buffer = torch.empty(sum(map(_align, sizes)), dtype=torch.uint8)
    parts = buffer.split([_align(size) for size in sizes])
    return [
        part[:size].view(d).view(tensor.shape)
        for part, size, d, tensor in zip(parts, sizes, dtypes, like, strict=True)
    ]


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@contextmanager
def use_gradient_buffers(
    model: Any, buffers: GradientBuffers, trained: Iterable[nn.Parameter]
) -> Iterator[None]:
    """Around all passes of a step. The gradients stay in the buffers afterwards."""
    with ExitStack() as stack:
        stack.enter_context(apply_patches(_embedding_patches(model)))
        for parameter in trained:
            hook = parameter.register_post_accumulate_grad_hook(buffers.move)
            stack.callback(hook.remove)
        yield


# ── embeddings ───────────────────────────────────────────────────────────────────────────────────


def _embedding_patches(model: Any) -> Iterator[Patch]:
    module = model.get_input_embeddings()
    if type(module) is not nn.Embedding or not has_class_forward(module):
        return
    plain = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
    if plain and module.weight.requires_grad:
        yield Patch(module, "forward", partial(_embed, module))


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
