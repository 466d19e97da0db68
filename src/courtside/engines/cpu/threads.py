"""As many threads as there are free cores, not as many as the machine has.

A matmul waits for the slowest of its threads. In a container with a quota of two cores, sixty-four
threads take many times as long as two; and beside one busy process, two threads on two cores take
many times as long as one, because the one that has no core holds up the other.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

ENVIRONMENT_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
SAMPLE_SECONDS = 0.25


def choose_threads(
    previous: int | None = None, *, measure_busy_cores: Callable[[], float] | None = None
) -> str | None:
    """Set torch's number of threads, and return a note where the user should know of it.

    Environment variables decide. Without them a resumed run takes the number that it had
    (`previous`), because another one changes the rounding; a new run takes the cores that are free,
    and keeps the number as long as the process lives.
    """
    if any(os.environ.get(name) for name in ENVIRONMENT_VARIABLES):
        number = torch.get_num_threads()
        if previous is None or number == previous:
            return None
        return (
            f"{_count(number)}; the steps so far ran with {previous}. Results are equal up to "
            f"rounding, and bit for bit with OMP_NUM_THREADS={previous}"
        )
    cores = usable_cores()
    if previous is None and _chosen:
        return _set_threads(_chosen[0], None)
    busy = (measure_busy_cores or busy_cores)()
    free = max(1, math.floor(cores - busy + 0.5))
    usage = f"other processes use {busy:.1f} of {cores} cores"
    if previous is not None:
        note = f"{_count(previous)} as before, though {usage}; OMP_NUM_THREADS={free} may be faster"
        return _set_threads(min(previous, cores), note if free < min(previous, cores) else None)
    _chosen.append(min(free, cores))
    note = f"{_count(free)}: {usage}. OMP_NUM_THREADS sets another number"
    return _set_threads(min(free, cores), note if free < cores else None)


_chosen: list[int] = []
"""The number of this process's new runs: results of two runs in it must be comparable."""


def _set_threads(number: int, note: str | None) -> str | None:
    # Never more than there are: setting it again breaks a forked process's pool.
    if number >= torch.get_num_threads():
        return None
    torch.set_num_threads(number)
    return note


def _count(number: int) -> str:
    return f"{number} thread" + "s" * (number != 1)


def busy_cores(root: Path = Path("/"), sleep: Callable[[float], None] = time.sleep) -> float:
    """Processors of this process that others use, on average over a moment; 0 if unknown."""
    stat = root / "proc/stat"
    if not stat.is_file():
        return 0.0
    processors = _processors()
    before = _read_times(stat, processors)
    sleep(SAMPLE_SECONDS)
    after = _read_times(stat, processors)
    total = sum(after[name][0] - before[name][0] for name in before)
    busy = sum(after[name][1] - before[name][1] for name in before)
    return len(before) * busy / total if total > 0 else 0.0


def _read_times(stat: Path, processors: set[int]) -> dict[str, tuple[int, int]]:
    """Ticks since the start, all and busy ones, of each processor."""
    times = {}
    for line in stat.read_text().splitlines():
        name, *numbers = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in processors:
            ticks = [int(number) for number in numbers[:8]]  # later ones are counted in these
            idle = sum(ticks[3:5])  # also while it waits for a disk
            times[name] = (sum(ticks), sum(ticks) - idle)
    return times


def _processors() -> set[int]:
    """Logical processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def usable_cores(root: Path = Path("/")) -> int:
    """Physical cores that this process may run on, bounded by the quota of its control groups."""
    cores = {_siblings(root, number) for number in _processors()}
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
