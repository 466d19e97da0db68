from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before anything imports Triton, as transformers does: without a GPU its interpreter runs kernels.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Before anything imports torch: how busy the machine is must not decide how results are rounded.
num_processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
num_threads = max(1, len(os.sched_getaffinity(0)) // num_processes)
os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))
# The width of a terminal, which workers inherit, must not decide how tables are printed.
os.environ.pop("COLUMNS", None)
# `nohup make test &` ignores both, and processes inherit that; tests send them to processes.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def any_cpu() -> Iterator[None]:
    """dtype = "auto" is float32 on every CPU: what a machine has must not decide what tests see.
    Those of bfloat16 ask for it, or for the choice itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("courtside.engines.precision.has_native_bf16", lambda: False)
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """As ranks have: two threads share sums differently."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The student of most tests."""
    from support.tiny_model import save_tiny

    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_teacher_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model with the same words, one layer deeper."""
    from support.tiny_model import save_tiny

    return save_tiny(tmp_path_factory.mktemp("tiny-teacher"), seed=1, layers=3)


@pytest.fixture(scope="session")
def roomy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the tiny one, with room for an episode."""
    from support.tiny_model import save_tiny

    folder = save_tiny(tmp_path_factory.mktemp("long"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    return folder


@pytest.fixture(scope="session")
def roomy_teacher_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The teacher of the same vocabulary, with the same context."""
    from support.tiny_model import save_tiny

    folder = save_tiny(tmp_path_factory.mktemp("long-teacher"), seed=1, layers=3)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    return folder
