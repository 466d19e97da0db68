"""Reference models in float64, and the distance to them."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from torch import Tensor


def double(model: Any) -> Any:
    """The model itself, in float64 throughout: norms would compute in float32 otherwise."""
    model.double()
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = partial(_rms_norm, module)
    return model


def in_float64(model: Any) -> Any:
    """A copy on the CPU, in float64 throughout."""
    return double(copy.deepcopy(model).cpu())


def _rms_norm(layer: Any, hidden: Tensor) -> Tensor:
    mean_square = hidden.square().mean(-1, keepdim=True) + layer.variance_epsilon
    return layer.weight * hidden * mean_square.rsqrt()


def relative_error(value: Tensor, expected: Tensor) -> float:
    """‖value − expected‖ / ‖expected‖; inf where something is not finite."""
    value, expected = (t.detach().cpu().double() for t in (value, expected))
    error = (value - expected).norm() / expected.norm()
    return float(error) if bool(error.isfinite()) else float("inf")
