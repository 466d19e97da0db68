"""A model's norms, rotary embedding and gated MLPs in one launch each, while they are asked for.

Models are code of transformers and stay so: for the length of a `with` their layers' `forward` is
another one with the same numbers (`layer_parts`), and then their own again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from courtside.engines.base import LMHead
from courtside.engines.patches import layer_ops
from courtside.engines.patches.dataflow import Trace
from courtside.engines.patches.layer_ops import (
    ROTARY,
    gated_mlp_of,
    rms_norm_of,
    rotary,
    rotary_modules,
)

ABSENT: Any = object()

Patch = tuple[dict[str, Any], str, Any]
"""A namespace, a name in it, and what stands there for a while."""


class FusedLayers:
    """`dtype`: the numbers that passes multiply in, where those are not the weights' own."""

    @torch.no_grad()
    def __init__(self, model: Any, head: LMHead, dtype: torch.dtype | None):
        self.dtype = dtype
        own = set(head.module.modules())
        self.linear = [m for m in model.modules() if type(m) is nn.Linear and m not in own]
        norms = [n for m in model.modules() if (n := rms_norm_of(m, dtype)) is not None]
        self.norms = {norm.module: norm for norm in norms}
        self.trace = Trace(model, self.norms, self.linear)
        self.rounded_norms = self.trace.feeds_linear if dtype is not None else set()
        """Norms whose results nobody reads who would not round them."""
        self.mlps = {m: f for m in model.modules() if (f := gated_mlp_of(m)) is not None}
        self.rotary = rotary_modules(model)

    @contextmanager
    def used(self) -> Iterator[None]:
        with apply_patches(self.replacements()):
            yield

    def replacements(self) -> Iterator[Patch]:
        for module, norm in self.norms.items():
            dtype = self.dtype if module in self.rounded_norms else None
            yield vars(module), "forward", partial(norm.forward, dtype=dtype)
        for mlp, forward in self.mlps.items():
            yield vars(mlp), "forward", forward
        for module in self.rotary:
            yield vars(module), ROTARY, rotary(vars(module)[ROTARY])


def find_fused_layers(model: Any, head: LMHead, dtype: torch.dtype | None) -> FusedLayers | None:
    """Where there are kernels; elsewhere a model's own layers are as good."""
    if not layer_ops.runs_kernels(model.get_input_embeddings().weight):
        return None
    return FusedLayers(model, head, dtype)


@torch.no_grad()
def find_lean_layers(model: Any) -> list[Patch]:
    """Where there are no kernels: norms and gated MLPs that keep less for the way back."""
    modules = [m for m in model.modules() if has_class_forward(m)]
    norms = (norm for m in modules if (norm := rms_norm_of(m, None)) is not None)
    found: list[Patch] = [(vars(norm.module), "forward", norm.forward) for norm in norms]
    mlps = ((m, f) for m in modules if (f := gated_mlp_of(m)) is not None)
    return found + [(vars(mlp), "forward", forward) for mlp, forward in mlps]


def has_class_forward(module: nn.Module) -> bool:
    """Not one that somebody has given this object; nobody knows what that does."""
    return "forward" not in vars(module)


@contextmanager
def apply_patches(replacements: Iterable[Patch]) -> Iterator[None]:
    before: list[Patch] = []
    try:
        for namespace, name, value in replacements:
            before.append((namespace, name, namespace.get(name, ABSENT)))
            namespace[name] = value
        yield
    finally:
        for namespace, name, value in reversed(before):
            if value is ABSENT:
                del namespace[name]
            else:
                namespace[name] = value
