"""Devices to plan for: dense bf16 rate, memory bandwidth and size, by their public datasheets.

Memory is what a program can have, as torch reports it: a little below the datasheet's number.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from courtside.errors import PlanError

GIB = 2**30
MAX_GPUS = 4096
CPU_CORE_FLOPS = 250e9
"""bf16 FLOP/s of one core with avx512_bf16: the rate of large matmuls, measured on an EPYC."""
CPU_CORE_BANDWIDTH = 12e9
"""Bytes/s of main memory by one core, on the same machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU, or the CPU of this machine."""

    name: str
    flops: float
    """Dense bf16 FLOP/s, without sparsity."""
    bandwidth: float
    """Bytes/s of its memory."""
    memory: float
    """Bytes that a program can have."""
    link: float
    """Bytes/s from one GPU to the others of a machine, in one direction."""
    host_link: float
    """Bytes/s between host and device, in one direction: PCIe."""

    @property
    def is_gpu(self) -> bool:
        return self.name != "cpu"


def _gpu(
    name: str, teraflops: float, terabytes: float, gib: float, /, *, link: float, pcie: float
) -> tuple[str, Device]:
    device = Device(
        name=name, flops=teraflops * 1e12, bandwidth=terabytes * 1e12, memory=gib * GIB,
        link=link * 1e9, host_link=pcie * 1e9,
    )  # fmt: skip
    return name, device


GPUS: Mapping[str, Device] = dict(
    [
        _gpu("h200", 989, 4.8, 139.8, link=450, pcie=64),
        _gpu("h100", 989, 3.35, 79.1, link=450, pcie=64),
        _gpu("a100-80", 312, 2.039, 79.1, link=300, pcie=32),
        _gpu("a100-40", 312, 1.555, 39.4, link=300, pcie=32),
        _gpu("l40s", 362, 0.864, 44.4, link=32, pcie=32),
        _gpu("rtx4090", 165, 1.008, 23.5, link=32, pcie=32),
        _gpu("b200", 2250, 8.0, 178.0, link=900, pcie=64),
    ]
)
"""SXM parts where there are several; NVLink or PCIe as `link`."""


def find_device(name: str, num_gpus: int) -> Device:
    """Checks both: what can be planned for is one CPU, or one or more GPUs of a known kind."""
    key = name.lower().removeprefix("nvidia-").replace(" ", "").replace("_", "-")
    if key not in GPUS and key != "cpu":
        raise PlanError(f"--gpu {name!r} is not known. Known: {', '.join([*GPUS, 'cpu'])}")
    if not 1 <= num_gpus <= MAX_GPUS:
        raise PlanError(f"--gpus {num_gpus}: give a number from 1 to {MAX_GPUS:,}")
    if key != "cpu":
        return GPUS[key]
    if num_gpus > 1:
        raise PlanError(
            f"--gpus {num_gpus} with --gpu cpu: a run uses one machine's CPU. Remove it"
        )
    return this_cpu()


def this_cpu() -> Device:
    cores = os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device(
        name="cpu", flops=cores * CPU_CORE_FLOPS, bandwidth=cores * CPU_CORE_BANDWIDTH,
        memory=memory, link=0.0, host_link=0.0,
    )  # fmt: skip
