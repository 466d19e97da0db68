"""Host to device without waiting for what the device is doing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def tensor_on(values: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Values of the host as a tensor on the device, copied asynchronously."""
    return copy_to_device(torch.tensor(values, dtype=dtype), device)


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device, copied asynchronously from pinned memory."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
