from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The student of most tests."""
    from tiny import save_tiny

    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_teacher_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model with the same words, one layer deeper."""
    from tiny import save_tiny

    return save_tiny(tmp_path_factory.mktemp("tiny-teacher"), seed=1, layers=3)
