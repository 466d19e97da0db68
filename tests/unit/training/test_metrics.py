"""Metrics are accumulated on the device: exact means, without synchronization."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from courtside.engines.lm_head import LMHead
from courtside.losses.fused.torch_backend import TorchVocabularyPass
from courtside.recipe.losses import CrossEntropyLoss, DivergenceLoss, Loss, PolicyGradientLoss
from courtside.training.head import backward_through_head
from courtside.training.loss_terms import LossTerm
from courtside.training.metrics import MetricAccumulator, record_losses, record_token_metrics
from courtside.training.token_batch import TokenBatch

N, VOCAB_SIZE, SIZE = 23, 11, 5


class SynchronizationCounter(TorchDispatchMode):
    """Counts what would wait for a GPU: a number, a shape that depends on numbers, a mask that
    picks."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        by_mask = name == "aten.index" and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if by_mask or name in ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select"):
            self.count += 1
        return func(*args, **(kwargs or {}))


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def make_batch(parts: Sequence[LossTerm]) -> TokenBatch:
    torch.manual_seed(3)
    teacher_logp_N, sampler_logp_N = -normal(N).abs(), -normal(N).abs()
    teacher_logp_N[::4] = math.nan
    sampler_logp_N[::5] = math.nan
    return TokenBatch(
        hidden_ND=normal(N, SIZE),
        ids_N=torch.randint(VOCAB_SIZE, (N,)),
        temperature_N=torch.rand(N, dtype=torch.float64) + 0.7,
        sampler_logp_N=sampler_logp_N,
        by_student_N=torch.arange(N) % 5 != 0,
        teacher_logp_N=teacher_logp_N,
        reference_logp_N=-normal(N).abs(),
        teacher_hidden_ND=normal(N, SIZE),
        reference_hidden_ND=None,
        weight_CN={c.name: torch.tensor(c.weight["t"], dtype=torch.float64) for c in parts},
        advantage_CN={c.name: normal(N) for c in parts},
        teacher_head=make_head(1),
        reference_head=None,
    )


def make_head(seed: int) -> LMHead:
    torch.manual_seed(seed)
    module = torch.nn.Linear(SIZE, VOCAB_SIZE).double()
    return LMHead(module, vocab_size=VOCAB_SIZE, softcap=None, scale=1.0)


def part(loss: Loss, every: int) -> LossTerm:
    mask = [i % 4 != 0 and i % every == 1 for i in range(N)]
    return LossTerm(
        name=loss.kind,
        loss=loss,
        weight={"t": tuple(map(float, mask))},
        denominator=sum(mask),
        advantage={},
    )


def test_means_over_a_mask_are_those_over_what_it_picks() -> None:
    torch.manual_seed(0)
    metrics = MetricAccumulator()
    values_N, on_N = torch.randn(1000), torch.rand(1000) < 0.3
    values_N[~on_N] = math.nan  # masked out before it can spread
    for start in range(0, 1000, 100):
        span = slice(start, start + 100)
        metrics.mean("mean", values_N[span], where=on_N[span])
        metrics.max("max", values_N[span], where=on_N[span])
    means = metrics.means()
    assert means["mean"] == pytest.approx(float(values_N[on_N].double().mean()), rel=1e-12)
    assert means["max"] == float(values_N[on_N].max())


def test_a_metric_without_values_has_no_mean() -> None:
    metrics = MetricAccumulator()
    nowhere = torch.zeros(3, dtype=torch.bool)
    metrics.mean("mean", torch.ones(3), where=nowhere)
    metrics.max("max", torch.ones(3), where=nowhere)
    metrics.mean("empty", torch.ones(0))
    assert metrics.means() == {} and metrics.losses == {}
    metrics.mean("mean", torch.full((2,), 3.0), where=torch.tensor([True, False]))
    metrics.max("max", torch.tensor([-7.0]))
    assert metrics.means() == {"mean": 3.0, "max": -7.0}


def test_large_sums_keep_their_digits() -> None:
    metrics = MetricAccumulator()
    for _ in range(10):
        metrics.mean("mean", torch.full((100_000,), 16777217 / 16, dtype=torch.float32) + 0.0625)
        metrics.add_loss("value", torch.tensor(16777216.0))
        metrics.add_loss("value", torch.tensor(1.0))
    assert metrics.means()["mean"] == float(torch.tensor(16777217 / 16) + 0.0625)
    assert metrics.losses["value"] == 10 * 16777217.0, "float32 would lose every 1"


def test_nan_and_infinity_are_reported() -> None:
    metrics = MetricAccumulator()
    metrics.mean("mean", torch.tensor([1.0, math.nan]))
    metrics.add_loss("inf", torch.tensor(math.inf))
    metrics.max("max", torch.tensor([2.0]))
    metrics.max("max", torch.tensor([math.nan]))
    assert math.isnan(metrics.means()["mean"]) and metrics.means()["max"] == 2.0
    assert metrics.losses == {"inf": math.inf}


def test_accumulation_continues_after_the_values_were_read() -> None:
    metrics = MetricAccumulator()
    metrics.add_loss("loss", torch.tensor(0.25))
    metrics.mean("kl", torch.tensor([1.0]))
    assert (metrics.losses, metrics.means()) == ({"loss": 0.25}, {"kl": 1.0})
    metrics.add_loss("loss", torch.tensor(0.5))
    metrics.mean("kl", torch.tensor([3.0]))
    assert (metrics.losses, metrics.means()) == ({"loss": 0.75}, {"kl": 2.0})


def test_a_graph_does_not_outlive_its_chunk() -> None:
    metrics = MetricAccumulator()
    leaf = torch.ones(3, requires_grad=True)
    metrics.mean("mean", leaf * 2)
    metrics.max("max", leaf * 2)
    metrics.add_loss("value", (leaf * 2).sum())
    assert not any(scalar.requires_grad for scalar in metrics._scalars.values())
    assert metrics.losses == {"value": 6.0}


def test_the_sampled_tokens_by_hand() -> None:
    batch = make_batch([])
    logp_N = -normal(N).abs()
    metrics = MetricAccumulator()
    with SynchronizationCounter() as counter:
        record_token_metrics(batch, logp_N, metrics)
    assert counter.count == 0
    has_teacher_N = ~batch.teacher_logp_N.isnan()
    both_N = has_teacher_N & batch.by_student_N
    gap_N = (batch.teacher_logp_N - logp_N)[has_teacher_N]
    drift_N = (logp_N - batch.sampler_logp_N)[batch.by_student_N]
    expected = {
        "kl_estimate": (batch.sampler_logp_N - batch.teacher_logp_N)[both_N].mean(),
        "kl_estimate/reference": (batch.sampler_logp_N - batch.reference_logp_N)[
            batch.by_student_N
        ].mean(),
        "teacher_gap/mean": gap_N.mean(),
        "teacher_gap/negative": (gap_N < 0).double().mean(),
        "sampler/logp_diff": drift_N.abs().mean(),
        "sampler/ratio_max": drift_N.exp().max(),
    }
    means = metrics.means()
    assert means == {name: pytest.approx(float(v), rel=1e-12) for name, v in expected.items()}


MIX = [
    part(DivergenceLoss(kind="divergence", clip=0.5), 2),
    part(PolicyGradientLoss(kind="policy_gradient", baseline=True), 3),
    part(CrossEntropyLoss(kind="cross_entropy"), 1),
]


def test_only_the_pass_over_the_vocabulary_synchronizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups, matmuls, coefficients and metrics do not; the pass is a kernel on a GPU. Which
    position trains what is copied to the host once (`aten._to_copy`), before the first chunk."""
    metrics, num_parts = MetricAccumulator(), 0
    with SynchronizationCounter() as counter:
        run_part = TorchVocabularyPass.run_part

        def run_part_uncounted(*args: Any) -> None:
            nonlocal num_parts
            num_parts += 1
            before = counter.count
            run_part(*args)
            counter.count = before

        monkeypatch.setattr(TorchVocabularyPass, "run_part", run_part_uncounted)
        _, _, losses = backward_through_head(make_batch(MIX), make_head(0), MIX, chunk=3)
        record_losses(losses, metrics)
    assert num_parts > len(losses) > 1, "several groups of several chunks"
    assert counter.count == 0 and metrics.means()["kl"] > 0


@pytest.mark.parametrize("chunk", [3, N])
def test_excluded_tokens_add_nothing(chunk: int) -> None:
    """Both exclude a token: 0 · log 0 in every sum, in some chunks. The means are without it."""
    batch, head = make_batch(MIX), make_head(0)
    for module in (batch.teacher_head.module, head.module):
        module.bias.data[4] = -math.inf
    metrics = MetricAccumulator()
    record_losses(backward_through_head(batch, head, MIX, chunk=chunk)[-1], metrics)
    on_N = (batch.weight_CN["divergence"] > 0) | (batch.weight_CN["policy_gradient"] > 0)
    logp_MW, teacher_MW = (
        (side(hidden_ND) / batch.temperature_N[:, None]).log_softmax(-1)[on_N]
        [:, [i for i in range(VOCAB_SIZE) if i != 4]].detach()
        for side, hidden_ND in (
            (head, batch.hidden_ND), (batch.teacher_head, batch.teacher_hidden_ND)
        )
    )  # fmt: skip
    means = metrics.means()
    kl_M = (logp_MW.exp() * (logp_MW - teacher_MW)).sum(-1)
    assert means["kl"] == pytest.approx(float(kl_M.mean()), rel=1e-10)
    for who, side_MW in (("student", logp_MW), ("teacher", teacher_MW)):
        entropy_M = -(side_MW.exp() * side_MW).sum(-1)
        assert means[f"entropy/{who}"] == pytest.approx(float(entropy_M.mean()), rel=1e-10)
