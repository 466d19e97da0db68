from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def roomy_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the tiny one, with room for an episode."""
    folder = tmp_path_factory.mktemp("roomy") / "model"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    return folder
