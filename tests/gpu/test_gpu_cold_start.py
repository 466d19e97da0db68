"""CUDA graph captures in a process that has compiled no kernel, and after a capture that failed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cold_start_cases import CASES


@pytest.mark.parametrize("case", CASES)
def test_in_a_fresh_process(case: str, device: torch.device, tmp_path: Path) -> None:
    script = Path(__file__).with_name("cold_start_cases.py")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    run = subprocess.run(
        [sys.executable, str(script), case, str(device)],
        env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
