"""Where the gradients of a step lie on a CPU, while its passes add to them.

A backward pass makes gradients between activations that it frees, and they stay until the optimiser
has stepped. So the C library is left with holes that the next pass, of other lengths, fills badly.
Gradients are therefore moved into one piece of memory when they are first made. It is kept for the
next step, which would otherwise get it from the system anew, page by page: a tenth of an update.

A word embedding would make a gradient of all words in every pass, to be added to the one there is.
Here the few rows that a pass has looked at are added to it. All numbers are as without.
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
"""Tensors from here on have memory of their own from the system anyway: it is the largest of
glibc's thresholds for that."""
ALIGNMENT = 64
"""Bytes, a multiple of which each tensor of a piece begins at: a line of the cache."""


class GradientBuffers:
    """For the gradients of parameters, and for what weights are while they are rounded. Large
    gradients have none here."""

    def __init__(self, parameters: Iterable[nn.Parameter]):
        small = [p for p in parameters if p.nbytes < MMAP_BYTES]
        self._of = dict(zip(map(id, small), allocate_contiguous(small), strict=True))
        self._rounded: tuple[list[int], list[Tensor]] = ([], [])

    def rounded(self, weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Copies of these weights, which the next step's overwrite."""
        whose = [id(weight) for weight in weights]
        if self._rounded[0] != whose:
            self._rounded = whose, allocate_contiguous(weights, dtype)
        copies = self._rounded[1]
        for copy, weight in zip(copies, weights, strict=True):
            copy.copy_(weight.detach())
        return copies

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        """To the parameter's; it is widened on the way."""
        if parameter.grad is not None:
            parameter.grad.add_(gradient)
        elif id(parameter) in self._of:
            parameter.grad = self._of[id(parameter)].copy_(gradient)
        else:
            parameter.grad = gradient.to(parameter.dtype)

    def move(self, parameter: Tensor) -> None:
        """The gradient that autograd has just made; from then on it adds to what lies here."""
        room = self._of.get(id(parameter))
        if room is not None and parameter.grad is not None and parameter.grad is not room:
            parameter.grad = room.copy_(parameter.grad)


def allocate_contiguous(like: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Uninitialised tensors of these shapes, one behind the other. Pages of memory exist from when
    they are first written to: what is never filled costs nothing."""
    dtypes = [dtype or tensor.dtype for tensor in like]
    sizes = [tensor.numel() * its.itemsize for tensor, its in zip(like, dtypes, strict=True)]
    piece = torch.empty(sum(map(_padded, sizes)), dtype=torch.uint8)
    parts = piece.split([_padded(size) for size in sizes])
    return [
        part[:size].view(its).view(tensor.shape)
        for part, size, its, tensor in zip(parts, sizes, dtypes, like, strict=True)
    ]


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@contextmanager
def use_gradient_buffers(
    model: Any, rooms: GradientBuffers, trained: Iterable[nn.Parameter]
) -> Iterator[None]:
    """Around all passes of a step. The gradients stay when it ends."""
    with ExitStack() as stack:
        stack.enter_context(apply_patches(_embeddings(model)))
        for parameter in trained:
            hook = parameter.register_post_accumulate_grad_hook(rooms.move)
            stack.callback(hook.remove)
        yield


# ── word embeddings ──────────────────────────────────────────────────────────────────────────────


def _embeddings(model: Any) -> Iterator[Patch]:
    module = model.get_input_embeddings()
    if type(module) is not nn.Embedding or not has_class_forward(module):
        return
    plain = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
    if plain and module.weight.requires_grad:
        yield Patch(module, "forward", partial(_looked_up, module))


def _looked_up(module: nn.Embedding, ids: Tensor) -> Tensor:
    found: Tensor = _LookedUp.apply(module.weight, ids, module.padding_idx)  # type: ignore[no-untyped-call]
    return found


class _LookedUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_VD: Tensor, ids: Tensor, padding_id: int | None) -> Tensor:
        ctx.weight_VD, ctx.padding_id = weight_VD, padding_id
        ctx.save_for_backward(ids)
        return F.embedding(ids, weight_VD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        (ids,) = ctx.saved_tensors
        add_embedding_gradient(
            ctx.weight_VD, ids.flatten(), gradient.flatten(0, -2), ctx.padding_id
        )
        return None, None, None


@torch.no_grad()
def add_embedding_gradient(
    weight_VD: Tensor, ids_N: Tensor, gradient_ND: Tensor, padding_id: int | None
) -> None:
    """To the gradient of `weight_VD`; rows of one word are summed first, as torch does it."""
    if padding_id is not None:
        on_N = ids_N != padding_id
        ids_N, gradient_ND = ids_N[on_N], gradient_ND[on_N]
    if weight_VD.grad is None:
        weight_VD.grad = torch.zeros_like(weight_VD)
    words_U, which_N = ids_N.unique(return_inverse=True)
    sums_UD = gradient_ND.new_zeros(len(words_U), gradient_ND.shape[-1])
    sums_UD.index_add_(0, which_N, gradient_ND)
    weight_VD.grad.index_add_(0, words_U, sums_UD.to(weight_VD.grad.dtype))
