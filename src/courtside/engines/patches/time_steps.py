"""The time steps of Mamba 2 layers that decode a token, within the limits of longer passes.

Layers with a `time_step_limit` (Nemotron-H, Zamba 2) clamp the time steps of a pass over several
tokens. transformers forgets it where a pass has one token and a state, so that a sampler's
log-probs would leave those of a forward pass over the same tokens.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from courtside.engines.patches.patch import Patch

UPDATE_FUNCTION = "mamba2_selective_state_update"
"""Of the Python modules that define these layers."""


def make_time_step_patches(model: Any) -> list[Patch]:
    """For single-token passes over a state; none where the layers have no limits."""
    patches: dict[str, Patch] = {}
    for layer in model.modules():
        limits = getattr(layer, "time_step_limit", None)
        module = sys.modules[type(layer).__module__]
        if limits is None or module.__name__ in patches or not hasattr(module, UPDATE_FUNCTION):
            continue
        low, high = limits
        if low > 0 or high < math.inf:
            update = getattr(module, UPDATE_FUNCTION)
            patches[module.__name__] = Patch(
                module, UPDATE_FUNCTION, clamp_time_steps(update, low, high), nests=True
            )
    return list(patches.values())


def clamp_time_steps(update: Callable[..., Any], low: float, high: float) -> Callable[..., Any]:
    """`update` with time steps between these limits."""

    def update_within_limits(
        state: Tensor,
        hidden_states: Tensor,
        dt: Tensor,
        *args: Any,
        dt_bias: Tensor,
        dt_softplus: bool,
        **kwargs: Any,
    ) -> Any:
        # All entries of a head are one number: [..., :1] keeps the stride of 0 that kernels expect.
        dt_BH1 = dt[..., :1] + dt_bias[..., :1].to(dt.dtype)
        dt_BH1 = (F.softplus(dt_BH1) if dt_softplus else dt_BH1).clamp(low, high)
        no_bias = torch.zeros_like(dt_bias[..., :1]).expand_as(dt_bias)
        return update(
            state, hidden_states, dt_BH1.expand_as(dt), *args,
            dt_bias=no_bias, dt_softplus=False, **kwargs,
        )  # fmt: skip

    return update_within_limits
