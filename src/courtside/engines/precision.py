"""The numbers that matrix products multiply in, and what a CPU is better at in others.

bfloat16 halves memory, and is two to three times as fast where the processor multiplies it itself:
any GPU of today, and CPUs with instructions for it. On other CPUs it would be emulated, and slow.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

X86_FLAGS = frozenset(["avx512_bf16", "amx_bf16"])
ARM_FLAGS = frozenset(["bf16"])


def resolve_dtype(choice: str, device: torch.device) -> torch.dtype:
    """Of the products of a student or teacher, by its `dtype`; auto and int8: what is fastest."""
    if choice == "float32":
        return torch.float32
    if choice == "bfloat16" or device.type == "cuda" or has_native_bf16():
        return torch.bfloat16
    return torch.float32


@cache
def has_native_bf16() -> bool:
    """Whether this CPU has instructions for it and torch's library of products uses them."""
    supported: Any = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    if not torch.backends.mkldnn.is_available() or supported is None or not supported():
        return False
    return has_bf16_flag(_cpu_info())


def has_bf16_flag(cpu_info: str) -> bool:
    """By what Linux says of its processors; not every torch has a public word for it.

    >>> has_instructions("flags : fpu avx512f avx512_bf16")
    True
    >>> has_instructions("flags : fpu avx512f")
    False
    """
    for line in cpu_info.splitlines():
        name, _, words = line.partition(":")
        wanted = {"flags": X86_FLAGS, "Features": ARM_FLAGS}.get(name.strip())
        if wanted is not None:
            return not wanted.isdisjoint(words.split())
    return False


def _cpu_info() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.is_file() else ""


def cast_attention_inputs(*states: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values in the numbers that attention is computed in.

    On a GPU what autocast does: rotated queries and keys may be float32. On a CPU never less than
    float32: its attention takes up to seven times as long in bfloat16.
    """
    device = states[0].device.type
    if device == "cpu":
        return tuple(state.to(torch.promote_types(state.dtype, torch.float32)) for state in states)
    if not torch.is_autocast_enabled(device):
        return states
    return tuple(state.to(torch.get_autocast_dtype(device)) for state in states)


def disable_cpu_autocast(device: torch.device) -> Any:
    """Around an operation on a CPU whose input autocast would round."""
    if device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
        return nullcontext()
    return torch.autocast("cpu", enabled=False)
