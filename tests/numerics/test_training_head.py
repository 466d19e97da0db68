"""The student's losses through the fused head and through autograd: the same update and metrics."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.testing import assert_close

from courtside.engines.lm_head import LMHead
from courtside.recipe import Loss
from courtside.training.head import autograd, fused
from courtside.training.loss_terms import LossTerm
from courtside.training.metrics import MetricAccumulator
from courtside.training.token_batch import TokenBatch

N, WORDS = 11, 29
ALL, FIRST, LAST, SOME = [1.0] * N, [1.0] * 6 + [0.0] * 5, [0.0] * 6 + [1.0] * 5, [0.5, 0, 2] * 4
KL = {"kind": "divergence"}
TOP_K = {**KL, "support": {"kind": "top_k", "k": 4, "of": "joint"}}
GAP = {"kind": "policy_gradient"}
REWARD = {"kind": "policy_gradient", "advantage": "reward", "ratio": "none"}
FUSED: dict[str, list[tuple[dict[str, Any], list[float]]]] = {
    "reverse KL": [(KL, ALL)],
    "by turn": [({**KL, "weight": 0.3}, SOME[:N])],
    "JSD": [({**KL, "divergence": "jsd", "beta": 0.4}, ALL)],
    "skewed": [({**KL, "divergence": "skew_forward_kl", "alpha": 0.1}, ALL)],
    "top k": [(TOP_K, ALL)],
    "top k, capped": [({**TOP_K, "clip": 0.05}, FIRST)],
    "against the reference": [({**KL, "against": "reference"}, ALL)],
    "two, each on its own": [(KL, FIRST), ({**TOP_K, "name": "b", "against": "reference"}, LAST)],
    "with cross-entropy": [(KL, FIRST), ({"kind": "cross_entropy", "weight": 0.1}, ALL)],
    "sampled tokens only": [({"kind": "cross_entropy"}, LAST), (REWARD, ALL)],
    "importance ratios": [({**GAP, "truncate": 1.1}, ALL), (KL, FIRST)],
    "clipped": [({**GAP, "clip": (0.1, 0.1)}, ALL)],
    "baseline": [({**GAP, "baseline": True}, ALL)],
    "baseline on some": [({**GAP, "baseline": True}, FIRST), (REWARD | {"name": "b"}, LAST)],
    "baseline beside a divergence": [({**GAP, "baseline": True}, ALL), (TOP_K, FIRST)],
    "preference": [({"kind": "preference"}, ALL)],
}
NOT_FUSED: dict[str, list[tuple[dict[str, Any], list[float]]]] = {
    "a cap on all words": [({**KL, "clip": 0.1}, ALL)],
    "extrapolated": [({**KL, "extrapolate": 1.5}, ALL)],
    "entropy-aware": [({**KL, "entropy_aware": {"threshold": 1.0}}, ALL)],
    "two on one position": [(KL, ALL), ({**KL, "name": "b", "divergence": "forward_kl"}, LAST)],
    "baseline where the reference is": [
        ({**GAP, "baseline": True}, ALL), ({**KL, "against": "reference"}, LAST)
    ],
}  # fmt: skip


def components(losses: list[tuple[dict[str, Any], list[float]]]) -> list[LossTerm]:
    parts = []
    for options, weights in losses:
        loss = TypeAdapter(Loss).validate_python(options)
        parts.append(
            LossTerm(
                name=loss.name or loss.kind,
                loss=loss,
                weight={"t": tuple(weights)},
                denominator=7,
                advantage={},
            )
        )
    return parts


def make_head(size: int, seed: int, **options: Any) -> LMHead:
    torch.manual_seed(seed)
    module = nn.Linear(size, WORDS + 2, bias=bool(options.get("softcap"))).double()
    return LMHead(module, vocab_size=WORDS, **{"softcap": None, "scale": 1.0, **options})


def make_rows(parts: list[LossTerm], **options: Any) -> TokenBatch:
    torch.manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    teacher_logp_N = -normal(N).abs() - 1
    teacher_logp_N[2] = math.nan if options.pop("silent", False) else -1.0
    return TokenBatch(
        hidden_ND=normal(N, 5),
        ids_N=torch.randint(WORDS, (N,)),
        temperature_N=torch.rand(N, dtype=torch.float64) + 0.7,
        sampler_logp_N=-normal(N).abs() - 2.5,
        by_student_N=torch.arange(N) % 3 != 0,
        teacher_logp_N=teacher_logp_N,
        reference_logp_N=-normal(N).abs() - 1,
        teacher_hidden_ND=normal(N, 7),
        reference_hidden_ND=normal(N, 5),
        weight_CN={c.name: torch.tensor(c.weight["t"], dtype=torch.float64) for c in parts},
        advantage_CN={c.name: normal(N) for c in parts},
        teacher_head=make_head(7, 1, **options),
        reference_head=make_head(5, 2, **options),
    )


def run(
    module: Any, losses: list[tuple[dict[str, Any], list[float]]], **options: Any
) -> dict[str, Any]:
    parts = components(losses)
    rows = make_rows(parts, **options)
    options.pop("silent", None)
    own = make_head(5, 0, **options)
    metrics = MetricAccumulator()
    gradient_ND, logp_N = module.backward_through_head(rows, own, parts, chunk=4, metrics=metrics)
    return {
        "hidden": gradient_ND,
        "logp": logp_N,
        "head": own.module.weight.grad,
        "bias": None if own.module.bias is None else own.module.bias.grad,
        "values": metrics.losses,
        "metrics": metrics.means(),
    }


@pytest.mark.parametrize("losses", [*FUSED, *NOT_FUSED])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "scale": 1.3}], ids=["plain", "capped"])
def test_the_same_as_autograd(losses: str, options: dict[str, float]) -> None:
    mix = {**FUSED, **NOT_FUSED}[losses]
    ours, right = (run(module, mix, **options) for module in (fused, autograd))
    assert ours["values"].keys() == right["values"].keys()
    assert ours["metrics"].keys() == right["metrics"].keys()
    assert_close(ours, right, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("losses", [*FUSED, *NOT_FUSED])
def test_what_is_covered(losses: str) -> None:
    parts = components({**FUSED, **NOT_FUSED}[losses])
    assert (fused._groups(make_rows(parts), parts) is not None) == (losses in FUSED)


def test_a_teacher_that_is_silent_on_some_positions() -> None:
    """Its log-prob is NaN there and its hidden states are anything; no loss is taken there."""
    mix = [(KL, [1.0, 1.0, 0.0] + [1.0] * 8), ({"kind": "cross_entropy"}, ALL)]
    ours, right = (run(module, mix, silent=True) for module in (fused, autograd))
    assert_close(ours, right, rtol=1e-8, atol=1e-10)


def test_chunks_are_chosen_where_none_are_given() -> None:
    parts = components(FUSED["reverse KL"])
    whole = fused.backward_through_head(
        make_rows(parts), make_head(5, 0), parts, chunk=None, metrics=MetricAccumulator()
    )
    assert_close(whole[0], run(autograd, FUSED["reverse KL"])["hidden"], rtol=1e-8, atol=1e-10)


def test_a_frozen_head_gets_no_gradient() -> None:
    parts, own = components(FUSED["reverse KL"]), make_head(5, 0)
    own.module.requires_grad_(False)
    fused.backward_through_head(make_rows(parts), own, parts, chunk=4, metrics=MetricAccumulator())
    assert own.module.weight.grad is None


def test_autocast_makes_bfloat16_logits_and_float32_gradients() -> None:
    parts, own = components(FUSED["reverse KL"]), make_head(5, 0)
    own.module.float()
    rows = make_rows(parts)
    rows.teacher_head.module.float()
    right = run(autograd, FUSED["reverse KL"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        gradient_ND, _ = fused.backward_through_head(
            rows, own, parts, chunk=4, metrics=MetricAccumulator()
        )
    assert own.module.weight.grad.dtype == torch.float32
    for found, exact in ((gradient_ND, right["hidden"]), (own.module.weight.grad, right["head"])):
        assert 1e-4 < float((found - exact).norm() / exact.norm()) < 3e-2
