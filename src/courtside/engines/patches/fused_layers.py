"""RMSNorm, RoPE and SwiGLU layers of a model by fused kernels, as patches of their `forward`.

Each replacement computes what the layer computes (`layer_ops` compares them on an example).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from courtside.engines.lm_head import LMHead
from courtside.engines.patches import layer_ops
from courtside.engines.patches.dataflow import Trace
from courtside.engines.patches.layer_ops import (
    ROTARY,
    find_rotary_modules,
    match_rms_norm,
    match_swiglu_mlp,
    wrap_rotary,
)
from courtside.engines.patches.patch import Patch


class FusedLayers:
    """`dtype`: that of the matmuls under autocast; None: that of the weights."""

    @torch.no_grad()
    def __init__(self, model: Any, head: LMHead, dtype: torch.dtype | None):
        self.dtype = dtype
        head_modules = set(head.module.modules())
        self.linear = [m for m in model.modules() if type(m) is nn.Linear and m not in head_modules]
        norms = [n for m in model.modules() if (n := match_rms_norm(m, dtype)) is not None]
        self.norms = {norm.module: norm for norm in norms}
        self.trace = Trace(model, self.norms, self.linear)
        self.autocast_norms = self.trace.linear_only_norms if dtype is not None else set()
        """Norms that may output `dtype`: every consumer would cast the output to it."""
        self.mlps = {m: f for m in model.modules() if (f := match_swiglu_mlp(m)) is not None}
        self.rotary = find_rotary_modules(model)

    def patches(self) -> Iterator[Patch]:
        """They nest: student and engine may each patch the same layers, to the same effect."""
        for module, norm in self.norms.items():
            dtype = self.dtype if module in self.autocast_norms else None
            yield Patch(module, "forward", partial(norm.forward, dtype=dtype), nests=True)
        for mlp, forward in self.mlps.items():
            yield Patch(mlp, "forward", forward, nests=True)
        for module in self.rotary:  # Python modules, which models of one kind share
            yield Patch(module, ROTARY, wrap_rotary(vars(module)[ROTARY]), nests=True)


def find_fused_layers(model: Any, head: LMHead, dtype: torch.dtype | None) -> FusedLayers | None:
    """None where no kernels run; the model's layers are as fast there."""
    if not layer_ops.can_run_kernels(model.get_input_embeddings().weight):
        return None
    return FusedLayers(model, head, dtype)
