"""AdamW with its moments in the host's memory, through the device piece by piece."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from courtside.training.checkpoints import optimiser_tensors, restore_optimiser
from courtside.training.offloaded_adamw import OffloadedAdamW

SHAPES = ((300, 257), (513,), (64, 64), (7,), (1, 1000), (2,))
SETTINGS: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.1}
PIECE = 4096
"""So that there are many more than rooms, and the large one is in most of them."""


def drawn(device: torch.device) -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {str(n): nn.Parameter(torch.randn(s, device=device)) for n, s in enumerate(SHAPES)}


def push(parameters: dict[str, nn.Parameter], step: int) -> None:
    torch.manual_seed(100 + step)
    for number, parameter in enumerate(parameters.values()):
        gradient = torch.randn_like(parameter)
        parameter.grad = None if (number, step) == (2, 1) else gradient


def bits(optimiser: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]) -> list[Tensor]:
    state = optimiser_tensors(optimiser, parameters)
    return [p.detach().cpu() for p in parameters.values()] + [t.cpu() for t in state.values()]


def test_weights_and_moments_are_those_of_adamw_bit_for_bit(device: torch.device) -> None:
    own, plain = drawn(device), drawn(device)
    ours: torch.optim.Optimizer = OffloadedAdamW(
        [{"params": [*own.values()]}], piece=PIECE, **SETTINGS
    )
    theirs = torch.optim.AdamW(plain.values(), fused=True, **SETTINGS)
    for step in range(5):
        push(own, step)
        ours.step()
        push(plain, step)
        theirs.step()
        if step == 2:  # and a run that was saved and goes on
            saved = {name: t.clone() for name, t in optimiser_tensors(ours, own).items()}
            ours = OffloadedAdamW([{"params": [*own.values()]}], piece=PIECE, **SETTINGS)
            restore_optimiser(ours, own, saved)
    # A CPU's kernel rounds the ends of a tensor otherwise than its middle.
    exact = device.type == "cuda"
    for mine, its in zip(bits(ours, own), bits(theirs, plain), strict=True):
        torch.testing.assert_close(mine, its, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-7)


def test_nothing_of_them_stays_on_the_device(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("a CPU has one memory for both")
    weight = nn.Parameter(torch.zeros(2**22, device=device))
    weight.grad = torch.ones_like(weight)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    optimiser = OffloadedAdamW([{"params": [weight]}], piece=2**16, **SETTINGS)
    for _ in range(2):
        optimiser.step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - held < 2**12
    assert torch.cuda.max_memory_allocated() - held < optimiser.room_bytes + 2**16
    assert optimiser.room_bytes < weight.nbytes
