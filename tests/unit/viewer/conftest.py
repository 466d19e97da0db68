"""A run of two steps, and a viewer of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient
from unit.viewer.viewed_runs import opened, write_run

from courtside.report.folder.folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return write_run(tmp_path / "first")


@pytest.fixture
def client(folder: RunFolder) -> TestClient:
    return opened(folder)
