"""Experts under autocast: torch's `grouped_mm` does not know it, and would compute in the dtype of
the trained weights. In float32 it is a loop over the experts on the host, which is slow and which a
CUDA graph cannot capture.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

GROUPED_MM = "grouped_mm"
AUTOCAST_EXPERTS = "courtside_autocast_grouped_mm"
DECODE_COPIES = "_courtside_decode_copies"
"""Attribute of a module of experts while decoding: parameters that are cast already, by name."""


class _CastExperts:
    """A module of experts with its parameters in another dtype."""

    def __init__(self, module: Any, dtype: torch.dtype):
        self._module, self._dtype = module, dtype
        self._copies = vars(module).get(DECODE_COPIES, {})

    def __getattr__(self, name: str) -> Any:
        if name in self._copies:
            return self._copies[name]
        value = getattr(self._module, name)
        is_weight = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self._dtype) if is_weight else value


def autocast_experts(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    device_type = hidden_states.device.type
    if torch.is_autocast_enabled(device_type):
        module = _CastExperts(module, torch.get_autocast_dtype(device_type))
    out: Tensor = grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    return out


ALL_EXPERTS_FUNCTIONS.register(AUTOCAST_EXPERTS, autocast_experts)


def apply_autocast_to_experts(model: Any) -> None:
    """For good: outside autocast it computes as before."""
    for module in find_experts(model):
        if module.config._experts_implementation == GROUPED_MM:
            module.config._experts_implementation = AUTOCAST_EXPERTS


def find_experts(model: Any) -> Iterator[Any]:
    """Modules whose implementation transformers selects by the config."""
    for module in model.modules():
        if hasattr(module, "is_concatenated") and hasattr(module, "_apply_gate"):
            yield module


def list_copied_parameters(model: Any) -> list[tuple[Any, str, Tensor]]:
    """(module, name, parameter) of the experts whose matmuls `AUTOCAST_EXPERTS` runs. Not of those
    with an adapter, which PEFT adds to the parameter in each forward pass."""
    adapted = {id(m.get_base_layer()) for m in model.modules() if hasattr(m, "get_base_layer")}
    return [
        (module, name, parameter)
        for module in find_experts(model)
        if module.config._experts_implementation == AUTOCAST_EXPERTS and id(module) not in adapted
        for name, parameter in module.named_parameters(recurse=False)
    ]


def find_capture_problem(model: Any, autocast: torch.dtype | None) -> str | None:
    """Why a CUDA graph cannot capture the experts' matmuls; None: it can, or there are none."""
    for module in find_experts(model):
        implementation = module.config._experts_implementation
        cast_to = autocast if implementation == AUTOCAST_EXPERTS else None
        dtype = cast_to or next(module.parameters()).dtype
        if implementation in (GROUPED_MM, AUTOCAST_EXPERTS) and dtype.itemsize > 2:
            return f"its experts compute in {str(dtype).removeprefix('torch.')}, one after another"
    return None
