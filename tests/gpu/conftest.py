"""Tests that need a GPU; without one nothing here is collected.

python -m pytest -p no:cacheprovider tests/gpu
COURTSIDE_TEST_DEVICE=cpu python -m pytest tests/gpu     # the same bodies, without a GPU
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

DEVICE = os.environ.get("COURTSIDE_TEST_DEVICE") or (
    "cuda" if torch.cuda.is_available() else "none"
)
collect_ignore_glob = ["test_*.py"] if DEVICE == "none" else []
if DEVICE == "cuda":
    # Compiled kernels, where the CPU tests set Triton's interpreter.
    interpret = os.environ.pop("TRITON_INTERPRET", "0")
    assert interpret != "1" or "triton" not in sys.modules, "Triton interprets already: too late"
# For `cold_start_cases`.
sys.path.insert(0, str(Path(__file__).parent))


def pytest_configure(config: pytest.Config) -> None:
    # A step that cannot be captured runs eagerly: right, and ten times slower.
    config.addinivalue_line("filterwarnings", "error:CUDA graph capture failed:UserWarning")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device(DEVICE)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
