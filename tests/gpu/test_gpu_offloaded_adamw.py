"""AdamW with offloaded state, streamed through the device in chunks."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from courtside.training.checkpoints import optimizer_tensors, restore_optimizer
from courtside.training.optimizer import OffloadedAdamW

SHAPES = ((300, 257), (513,), (64, 64), (7,), (1, 1000), (2,))
SETTINGS: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.1}
CHUNK_SIZE = 4096
"""Many more chunks than staging buffers; the large parameter spans most of them."""


def random_parameters(device: torch.device) -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {str(n): nn.Parameter(torch.randn(s, device=device)) for n, s in enumerate(SHAPES)}


def set_gradients(parameters: dict[str, nn.Parameter], step: int) -> None:
    torch.manual_seed(100 + step)
    for number, parameter in enumerate(parameters.values()):
        gradient = torch.randn_like(parameter)
        parameter.grad = None if (number, step) == (2, 1) else gradient


def bits(optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]) -> list[Tensor]:
    state = optimizer_tensors(optimizer, parameters)
    return [p.detach().cpu() for p in parameters.values()] + [t.cpu() for t in state.values()]


def test_weights_and_moments_are_those_of_adamw_bit_for_bit(device: torch.device) -> None:
    offloaded, reference = random_parameters(device), random_parameters(device)
    optimizer: torch.optim.Optimizer = OffloadedAdamW(
        [{"params": [*offloaded.values()]}], chunk_size=CHUNK_SIZE, **SETTINGS
    )
    adamw = torch.optim.AdamW(reference.values(), fused=True, **SETTINGS)
    for step in range(5):
        set_gradients(offloaded, step)
        optimizer.step()
        set_gradients(reference, step)
        adamw.step()
        if step == 2:  # save and resume
            saved = {name: t.clone() for name, t in optimizer_tensors(optimizer, offloaded).items()}
            optimizer = OffloadedAdamW(
                [{"params": [*offloaded.values()]}], chunk_size=CHUNK_SIZE, **SETTINGS
            )
            restore_optimizer(optimizer, offloaded, saved)
    # A CPU's kernel rounds the ends of a tensor differently from its middle.
    exact = device.type == "cuda"
    for actual, expected in zip(bits(optimizer, offloaded), bits(adamw, reference), strict=True):
        torch.testing.assert_close(
            actual, expected, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-7
        )


def test_no_state_stays_on_the_device(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("host and device memory are the same")
    weight = nn.Parameter(torch.zeros(2**22, device=device))
    weight.grad = torch.ones_like(weight)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer = OffloadedAdamW([{"params": [weight]}], chunk_size=2**16, **SETTINGS)
    for _ in range(2):
        optimizer.step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 2**12
    assert torch.cuda.max_memory_allocated() - before < optimizer.staging_bytes + 2**16
    assert optimizer.staging_bytes < weight.nbytes
