"""Losses and metrics are computed on the device: the host waits only when it needs values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from support.linear_divergence_reference import FULL, ON_SUPPORT, make_case, zero_gradient

from courtside.losses.fused.linear_divergence import fused_linear_divergence
from courtside.losses.fused.types import DivergenceSpec
from courtside.training.metrics import MetricAccumulator


@contextmanager
def forbid_synchronization(device: torch.device) -> Iterator[None]:
    """An error where the host would wait for the GPU."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_host_does_not_wait_before_means_are_computed(device: torch.device) -> None:
    values_N = torch.randn(4096).to(device)
    on_N = values_N > 0.5
    metrics = MetricAccumulator()
    with forbid_synchronization(device):
        for _ in range(3):
            metrics.mean("mean", values_N, where=on_N)
            metrics.mean("all", values_N)
            metrics.max("max", values_N, where=on_N)
            metrics.add_loss("value", values_N[0])
    metrics.mean("host", torch.tensor([2.0]))  # pairs are compared on the host
    host_N = values_N.cpu().double()
    selected_M = host_N[host_N > 0.5]
    expected = {
        "mean": float(selected_M.mean()),
        "all": float(host_N.mean()),
        "host": 2.0,
        "max": float(selected_M.max()),
    }
    assert metrics.means() == {
        k: pytest.approx(v, rel=1e-12, abs=1e-15) for k, v in expected.items()
    }
    assert metrics.losses == {"value": 3 * float(host_N[0])}


@pytest.mark.parametrize("divergence", [*FULL, ON_SUPPORT[0], ON_SUPPORT[-1], None], ids=str)
def test_the_fused_loss_does_not_synchronize(
    divergence: DivergenceSpec | None, device: torch.device
) -> None:
    case = make_case(num_rows=24, vocab_size=600, sizes=(32, 48)).to(torch.bfloat16, str(device))
    spec, gradient = case.spec(divergence), zero_gradient(case)
    for is_compiled in (False, True):
        with forbid_synchronization(device) if is_compiled else nullcontext():
            loss = fused_linear_divergence(case.student, case.teacher, spec, head_gradient=gradient)
    assert bool(loss.hidden_gradient_ND.isfinite().all())
