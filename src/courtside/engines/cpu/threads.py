"""As many threads as this process has cores, not as many as the machine has.

A matmul with more threads than cores waits for the slowest of them: in a container with a quota of
two cores, sixty-four threads take many times as long as two.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

ENVIRONMENT_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def limit_threads() -> None:
    """At most one per core, unless environment variables set the number."""
    if any(os.environ.get(name) for name in ENVIRONMENT_VARIABLES):
        return
    cores = usable_cores()
    if cores < torch.get_num_threads():  # setting it again breaks a forked process's pool
        torch.set_num_threads(cores)


def usable_cores(root: Path = Path("/")) -> int:
    """Physical cores that this process may run on, bounded by the quota of its control groups."""
    if hasattr(os, "sched_getaffinity"):
        processors = os.sched_getaffinity(0)
    else:
        processors = set(range(os.cpu_count() or 1))
    cores = {_siblings(root, number) for number in processors}
    quota = min(_quotas(root), default=math.inf)
    return max(1, min(len(cores), math.ceil(min(quota, len(cores)))))


def _siblings(root: Path, processor: int) -> str:
    """The logical processors of one core; without the kernel's topology each is a core."""
    topology = root / "sys/devices/system/cpu" / f"cpu{processor}" / "topology"
    for name in ("core_cpus_list", "thread_siblings_list"):
        if (topology / name).is_file():
            return (topology / name).read_text().strip()
    return str(processor)


def _quotas(root: Path) -> list[float]:
    """CPU quotas, in cores, of every control group of this process."""
    cgroups = root / "proc/self/cgroup"
    if not cgroups.is_file():
        return []
    quotas: list[float] = []
    for line in cgroups.read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        leaf = top / group.lstrip("/")
        # The group and its ancestors. In a container the leaf may not exist, but the top does.
        for folder in [leaf, *leaf.parents]:
            if folder.is_relative_to(top):
                quotas += _quota(folder)
    return quotas


def _quota(folder: Path) -> list[float]:
    if (folder / "cpu.max").is_file():
        limit, period = (folder / "cpu.max").read_text().split()
    elif (folder / "cpu.cfs_quota_us").is_file():
        limit = (folder / "cpu.cfs_quota_us").read_text().strip()
        period = (folder / "cpu.cfs_period_us").read_text()
    else:
        return []
    return [] if limit in ("max", "-1") else [int(limit) / int(period)]
