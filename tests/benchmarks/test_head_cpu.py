"""The head's benchmark on a CPU: its variants do the same work, its ratios are what they say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch


@pytest.fixture
def driver(import_benchmark: Callable[[str], ModuleType]) -> Any:
    return import_benchmark("head_cpu")


def record(variant: str, *, seconds: float, rise: int, loss: float = 2.0) -> dict[str, Any]:
    return {"variant": variant, "seconds": seconds, "rise": rise, "loss": loss,
            "gradient_norm": 3.0}  # fmt: skip


def test_ratios_and_work_that_is_not_the_same(driver: Any) -> None:
    rows = [record("matmuls", seconds=2.0, rise=10, loss=0.0), record("full", seconds=3.0, rise=4),
            record("plain", seconds=6.0, rise=20)]  # fmt: skip
    assert driver.differences(rows) == []
    ratios = driver.ratios_of(rows)
    assert ratios["full"] == {
        "time_over_matmuls": 1.5, "time_over_full": 1.0, "memory_over_full": 1.0,
    }  # fmt: skip
    assert ratios["plain"]["time_over_full"] == 2.0 and ratios["plain"]["memory_over_full"] == 5.0
    assert "| plain | 3.00 |" in driver.table(rows, ratios)
    (problem,) = driver.differences([*rows, record("trl_full", seconds=9.0, rise=30, loss=2.1)])
    assert "loss of trl_full is 2.1" in problem and "not the same work" in problem
    assert driver.ratios_of(rows[1:])["plain"].keys() == {"time_over_full", "memory_over_full"}


def test_the_matmuls_are_four_and_ours_is_what_plain_logits_give(driver: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    hidden_TD, teacher_TD = torch.randn(2, 6, 8, generator=draw)
    weight_VD, teacher_VD = torch.randn(2, 40, 8, generator=draw)
    inputs = driver.Inputs(
        hidden_TD=hidden_TD, weight_VD=weight_VD, teacher_hidden_TD=teacher_TD,
        teacher_VD=teacher_VD, ids_T=torch.zeros(6, dtype=torch.long),
    )  # fmt: skip

    def run(variant: str, **options: Any) -> tuple[float, Any]:
        leaves = replace(inputs, hidden_TD=hidden_TD.clone().requires_grad_(),
                      weight_VD=weight_VD.clone().requires_grad_())  # fmt: skip
        return driver.RUN[variant](leaves, **options), leaves

    _, matmuls = run("matmuls", num_rows=4)
    logits_TV = hidden_TD @ weight_VD.T
    torch.testing.assert_close(matmuls.hidden_TD.grad, logits_TV @ weight_VD)
    torch.testing.assert_close(matmuls.weight_VD.grad, logits_TV.T @ hidden_TD)
    (loss, ours), (expected, plain) = run("full"), run("plain")
    assert loss == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(ours.hidden_TD.grad, plain.hidden_TD.grad)
    torch.testing.assert_close(ours.weight_VD.grad, plain.weight_VD.grad)
