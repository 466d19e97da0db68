"""The dtype of matmuls, and int8 weights.

bfloat16 halves memory and is two to three times as fast where the processor has instructions for
it: any current GPU, and some CPUs. Other CPUs emulate it slowly.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

X86_FLAGS = frozenset(["avx512_bf16", "amx_bf16"])
ARM_FLAGS = frozenset(["bf16"])


def resolve_dtype(choice: str, device: torch.device) -> torch.dtype:
    """For the `dtype` of a student or teacher; others: the fastest on this device."""
    if choice == "float32":
        return torch.float32
    if choice == "bfloat16" or device.type == "cuda" or has_native_bf16():
        return torch.bfloat16
    return torch.float32


@cache
def has_native_bf16() -> bool:
    """Whether this CPU has bf16 instructions and oneDNN uses them."""
    supported: Any = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    if not torch.backends.mkldnn.is_available() or supported is None or not supported():
        return False
    path = Path("/proc/cpuinfo")
    return path.is_file() and has_bf16_flag(path.read_text())


def has_bf16_flag(cpu_info: str) -> bool:
    """By Linux's /proc/cpuinfo; not every version of torch has a public function for it.

    >>> has_bf16_flag("flags : fpu avx512f avx512_bf16")
    True
    >>> has_bf16_flag("flags : fpu avx512f")
    False
    """
    for line in cpu_info.splitlines():
        name, _, flags = line.partition(":")
        bf16_flags = {"flags": X86_FLAGS, "Features": ARM_FLAGS}.get(name.strip())
        if bf16_flags is not None:
            return not bf16_flags.isdisjoint(flags.split())
    return False


def average_in_place(tensor: Tensor, other: Tensor, share: float) -> None:
    """(1 − share)·tensor + share·other. An LM head's bias may be −inf in both, and stays so."""
    excluded = tensor == -math.inf if tensor.ndim == 1 else None
    tensor.lerp_(other, share)
    if excluded is not None:
        tensor.masked_fill_(excluded & (other == -math.inf), -math.inf)


class Int8Linear(nn.Module):
    """Weight-only and symmetric, with one float32 scale per output channel: half the memory of
    bfloat16, for teachers."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight_OI = linear.weight.detach().float()
        scale_O1 = weight_OI.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
        quantized_OI = (weight_OI / scale_O1).round().to(torch.int8)
        # Parameters, so that memory budgets and parameter counts include them.
        self.weight_OI = nn.Parameter(quantized_OI, requires_grad=False)
        self.scale_O = nn.Parameter(scale_O1.squeeze(1), requires_grad=False)
        self.bias = linear.bias

    def forward(self, input_ND: Tensor) -> Tensor:
        # Integers up to 127 are exact in bfloat16; scaling the output instead of the weight leaves
        # the matmul as the only rounding.
        output_NO = F.linear(input_ND, self.weight_OI.to(input_ND.dtype))
        output_NO = output_NO * self.scale_O.to(input_ND.dtype)
        return output_NO if self.bias is None else output_NO + self.bias


def quantize_linear_layers(model: Any) -> Any:
    """Replace every linear layer but the LM head, in place: losses are functions of its logits."""
    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child is not head:
                setattr(parent, name, Int8Linear(child))
    return model
