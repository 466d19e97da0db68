"""Where vLLM's transfer over NCCL cannot work. What it sends was never run: it takes two GPUs."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

from courtside.engines.served import nccl_transfer
from courtside.engines.served.nccl_transfer import find_address, refuse_nccl
from courtside.errors import RecipeError


def test_without_vllm_here_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"rollout.server.weight_transfer = 'nccl': vLLM is not "
                       r"installed in this environment.*Use 'folder'"):  # fmt: skip
        refuse_nccl("rollout.server")


def test_without_a_gpu_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RecipeError, match=r"'nccl': no GPU is visible here.*Use 'folder'"):
        refuse_nccl("rollout.server")


def test_vllm_is_not_imported_before_weights_are_sent() -> None:
    assert nccl_transfer.NcclCarrier and "vllm" not in sys.modules


def test_the_address_is_the_one_that_leads_to_the_server() -> None:
    address, port = find_address("http://127.0.0.1:9")
    assert address == "127.0.0.1" and 1024 <= port < 65536
