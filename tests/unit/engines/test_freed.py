"""Memory that is freed is used again, without the system."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import resource
from courtside.engines.freed import keep_freed_memory

keep_freed_memory()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    # Together far above the 64 MiB after which the library's own rule gives memory back.
    made = [bytearray(b"x") * 24_000_000 for _ in range(8)]
    del made
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print([faults() for _ in range(4)][-1])
"""
PAGES = 8 * 24_000_000 // 4096


def last_faults(**environment: str) -> int:
    command = [sys.executable, "-c", SCRIPT]
    environ = {**os.environ, **environment}
    return int(subprocess.run(command, env=environ, capture_output=True, check=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="a glibc's settings")
def test_pages_are_asked_for_once_unless_the_environment_says_otherwise() -> None:
    assert last_faults() < PAGES / 100
    assert last_faults(MALLOC_TRIM_THRESHOLD_="131072") > PAGES / 2
