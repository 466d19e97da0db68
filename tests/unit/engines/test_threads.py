"""Threads follow the cores that a process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from courtside.engines.cpu import threads
from courtside.engines.cpu.threads import limit_threads, usable_cores


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four cores of two logical processors, six of which this process may use."""
    for number in range(8):
        folder = f"sys/devices/system/cpu/cpu{number}/topology"
        write(tmp_path, f"{folder}/core_cpus_list", f"{number % 4},{number % 4 + 4}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 4, 5, 6}, raising=False)
    return tmp_path


def test_processors_of_one_core_count_once(machine: Path) -> None:
    assert usable_cores(machine) == 3


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 3), ("200000 100000", 2), ("150000 100000", 2), ("50000 100000", 1),
     ("900000 100000", 3)],
)  # fmt: skip
def test_a_quota_bounds_the_cores(machine: Path, quota: str, cores: int) -> None:
    write(machine, "proc/self/cgroup", "0::/user/job\n")
    write(machine, "sys/fs/cgroup/user/job/cpu.max", "max 100000\n")
    write(machine, "sys/fs/cgroup/user/cpu.max", f"{quota}\n")
    assert usable_cores(machine) == cores


def test_a_container_sees_its_group_at_the_top(machine: Path) -> None:
    write(machine, "proc/self/cgroup", "0::/system/not-mounted-here\n")
    write(machine, "sys/fs/cgroup/cpu.max", "100000 100000\n")
    assert usable_cores(machine) == 1


def test_control_groups_of_the_first_version(machine: Path) -> None:
    write(machine, "proc/self/cgroup", "5:memory:/a\n4:cpu,cpuacct:/job\n0::/\n")
    write(machine, "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "200000\n")
    write(machine, "sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000\n")
    write(machine, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    write(machine, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert usable_cores(machine) == 2


def test_threads_are_lowered_unless_the_environment_sets_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = {"threads": 64}
    monkeypatch.setattr(torch, "get_num_threads", lambda: state["threads"])
    monkeypatch.setattr(torch, "set_num_threads", lambda number: state.update(threads=number))
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    limit_threads()
    assert state["threads"] == 64
    for name in threads.ENVIRONMENT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    limit_threads()
    assert state["threads"] == 2
    state["threads"] = 1
    limit_threads()
    assert state["threads"] == 1
