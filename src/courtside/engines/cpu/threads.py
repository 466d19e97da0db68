"""As many threads as there are cores for this process, not as many as the machine has.

A product with more threads than cores waits for the slowest of them, again and again: in a
container with a quota of two cores, sixty-four threads take many times as long as two.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

ENVIRONMENT_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def limit_threads() -> None:
    """Never more than cores; what the environment or the program asked for stays."""
    if any(os.environ.get(name) for name in ENVIRONMENT_VARIABLES):
        return
    cores = usable_cores()
    if cores < torch.get_num_threads():  # setting it again breaks the pool of a forked process
        torch.set_num_threads(cores)


def usable_cores(root: Path = Path("/")) -> int:
    """Physical ones that this process may run on, bounded by the quota of its control groups."""
    if hasattr(os, "sched_getaffinity"):
        processors = os.sched_getaffinity(0)
    else:
        processors = set(range(os.cpu_count() or 1))
    cores = {_siblings(root, number) for number in processors}
    quota = min(_quotas(root), default=math.inf)
    return max(1, min(len(cores), math.ceil(min(quota, len(cores)))))


def _siblings(root: Path, processor: int) -> str:
    """The processors of one core, as the kernel lists them; where it does not, each is a core."""
    topology = root / "sys/devices/system/cpu" / f"cpu{processor}" / "topology"
    for name in ("core_cpus_list", "thread_siblings_list"):
        if (topology / name).is_file():
            return (topology / name).read_text().strip()
    return str(processor)


def _quotas(root: Path) -> list[float]:
    """Cores' worth of time, of every control group that this process is in."""
    listed = root / "proc/self/cgroup"
    if not listed.is_file():
        return []
    found = []
    for line in listed.read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        here = top / group.lstrip("/")
        # Its own and those around it. In a container the listed path may not be there: its top is.
        for folder in [here, *here.parents]:
            if folder.is_relative_to(top):
                found += _quota(folder)
    return found


def _quota(folder: Path) -> list[float]:
    if (folder / "cpu.max").is_file():
        limit, period = (folder / "cpu.max").read_text().split()
    elif (folder / "cpu.cfs_quota_us").is_file():
        limit = (folder / "cpu.cfs_quota_us").read_text().strip()
        period = (folder / "cpu.cfs_period_us").read_text()
    else:
        return []
    return [] if limit in ("max", "-1") else [int(limit) / int(period)]
