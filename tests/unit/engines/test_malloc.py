"""Memory that is freed is used again, without the system."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import resource
from pathlib import Path
from courtside.engines.cpu.malloc import retain_freed_memory

retain_freed_memory()

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

before = resident()
# Together far above the 64 MiB after which the library's own rule gives memory back.
made = [bytearray(b"x") * 24_000_000 for _ in range(8)]
del made
print(resident() - before)
"""
MADE = 8 * 24_000_000


def left(**environment: str) -> int:
    """Bytes that the process still has of what it freed."""
    command = [sys.executable, "-c", SCRIPT]
    environ = {**os.environ, **environment}
    return int(subprocess.run(command, env=environ, capture_output=True, check=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="a glibc's settings")
def test_freed_memory_stays_unless_the_environment_says_otherwise() -> None:
    assert left() > 0.9 * MADE
    assert left(MALLOC_TRIM_THRESHOLD_="131072") < 0.2 * MADE
    assert left(GLIBC_TUNABLES="glibc.malloc.trim_threshold=131072") < 0.2 * MADE
