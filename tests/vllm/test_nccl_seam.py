"""vLLM 0.32 still has what `engines/served/nccl_transfer.py` calls, with these arguments."""

from __future__ import annotations

import subprocess

import pytest
from support.vllm_server import ENVIRONMENT, PYTHON

PROGRAM = """
import inspect, torch
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine)
info = NCCLTrainerInitInfo(rank=0, master_address="127.0.0.1", master_port=1, world_size=2)
assert info.is_sender and info.backend == "nccl"
client = HTTPVLLMWeightSyncClient("http://127.0.0.1:1", timeout=600.0)
source = ModuleSource(torch.nn.Linear(2, 3))
assert [m.name for m in source.metadata()] == ["weight", "bias"]
init = inspect.signature(WeightTransferTrainerFactory.trainer_init)
init.bind(info, client=client, source=source)
inspect.signature(NCCLTrainerWeightTransferEngine.send_weights).bind(None)
try:
    WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
except Exception as error:
    print("ended with", type(error).__name__)
"""


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-vllm: `make test` sets it up")
def test_the_names_and_arguments_are_those_of_vllm() -> None:
    done = subprocess.run(
        [PYTHON, "-c", PROGRAM], env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and "ended with" in done.stdout, done.stderr[-3000:]
