"""Threads follow the cores that a process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from courtside.engines.cpu import threads
from courtside.engines.cpu.threads import choose_threads, usable_cores


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


@pytest.fixture
def torch_threads(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Of a machine with 2 cores, in a process without a number in its environment."""
    state = {"threads": 64}
    monkeypatch.setattr(torch, "get_num_threads", lambda: state["threads"])
    monkeypatch.setattr(torch, "set_num_threads", lambda number: state.update(threads=number))
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    monkeypatch.setattr(threads, "_chosen", [])
    for name in threads.ENVIRONMENT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return state


@pytest.mark.parametrize(
    ("busy", "number", "note"),
    [
        (0.0, 2, None),
        (0.4, 2, None),
        (0.9, 1, "1 thread: other processes use 0.9 of 2 cores. OMP_NUM_THREADS sets another"),
        (2.0, 1, "1 thread: other processes use 2.0 of 2 cores"),
    ],
)
def test_a_new_run_takes_the_free_cores(
    torch_threads: dict[str, int], busy: float, number: int, note: str | None
) -> None:
    note_text = choose_threads(measure_busy_cores=lambda: busy)
    assert torch_threads["threads"] == number
    assert note_text is None if note is None else str(note_text).startswith(note)
    # The next run of this process takes as many.
    choose_threads(measure_busy_cores=lambda: 2.0 - busy)
    assert torch_threads["threads"] == number


def test_a_resumed_run_keeps_its_number(torch_threads: dict[str, int]) -> None:
    """Another one changes the rounding."""
    note_text = choose_threads(2, measure_busy_cores=lambda: 1.1)
    assert torch_threads["threads"] == 2
    assert note_text == (
        "2 threads as before, though other processes use 1.1 of 2 cores; OMP_NUM_THREADS=1 may be "
        "faster"
    )
    assert choose_threads(1, measure_busy_cores=lambda: 0.0) is None
    assert torch_threads["threads"] == 1


def test_the_environment_decides(
    torch_threads: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    assert choose_threads(measure_busy_cores=lambda: 2.0) is None
    assert choose_threads(64) is None
    note_text = choose_threads(2)
    assert torch_threads["threads"] == 64
    assert "64 threads; the steps so far ran with 2. Results are equal up to rounding" in str(
        note_text
    )
    assert "OMP_NUM_THREADS=2" in str(note_text)


def test_a_pool_is_never_made_larger(torch_threads: dict[str, int]) -> None:
    torch_threads["threads"] = 1  # set by the caller, or in a forked process
    assert choose_threads(measure_busy_cores=lambda: 0.0) is None
    assert torch_threads["threads"] == 1


def test_busy_cores_are_those_of_this_process(machine: Path) -> None:
    """Four of its six processors are busy; what others of the machine do is not counted."""

    def write_ticks(seconds: int) -> None:
        lines = ["cpu  1 2 3 4 5 6 7 8 0 0"]
        for number in range(8):
            busy = 100 * seconds * (number in (0, 1, 2, 3, 4, 7))
            lines.append(f"cpu{number} {busy} 0 0 {100 * seconds - busy} 0 0 0 0 50 0")
        write(machine, "proc/stat", "\n".join([*lines, "intr 1 2 3"]))

    write_ticks(1)
    assert threads.busy_cores(machine, lambda seconds: write_ticks(2)) == pytest.approx(4.0)
    assert threads.busy_cores(machine / "nowhere") == 0.0
