"""The dtype of matmuls.

bfloat16 halves memory and is two to three times as fast where the processor has instructions for
it: any current GPU, and some CPUs. Other CPUs emulate it slowly.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

X86_FLAGS = frozenset(["avx512_bf16", "amx_bf16"])
ARM_FLAGS = frozenset(["bf16"])


def resolve_dtype(choice: str, device: torch.device) -> torch.dtype:
    """For the `dtype` of a student or teacher; auto and int8: the fastest on this device."""
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
