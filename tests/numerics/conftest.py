"""Numerics run on one CPU thread, in float64, and the same way every time."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# Before the test modules: they import `references` and `mutants` from this folder.
sys.path.insert(0, str(Path(__file__).parent))

settings.register_profile("numerics", derandomize=True, deadline=None, database=None)
settings.load_profile("numerics")

WRONG_TREE = 99
"""Exit status when the losses under test are not the ones that a mutation run prepared."""


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    expected = os.environ.get("COURTSIDE_LOSSES_UNDER_TEST")
    if expected is not None:
        import courtside.losses

        folder = Path(str(courtside.losses.__file__)).parent
        if folder != Path(expected):
            pytest.exit(f"testing {folder} instead of {expected}", returncode=WRONG_TREE)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
