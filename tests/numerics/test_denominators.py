"""One denominator per loss term and step: the split into micro-batches changes no loss or gradient.

Each piece of a batch goes through the training head alone, with the denominator of the whole.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.testing import assert_close

from courtside.engines.lm_head import LMHead
from courtside.recipe.losses import Loss
from courtside.training.head import backward_through_head
from courtside.training.loss_terms import LossTerm
from courtside.training.metrics import MetricAccumulator, record_losses
from courtside.training.token_batch import TokenBatch

LOSSES = [{"kind": "divergence", "weight": 0.5}, {"kind": "cross_entropy", "weight": 2.0}]
close = partial(assert_close, rtol=1e-12, atol=1e-13)


def make_head(seed: int) -> LMHead:
    torch.manual_seed(seed)
    module = nn.Linear(4, 13, bias=False).double()
    return LMHead(module, vocab_size=13, softcap=None, scale=1.0)


def make_terms(num_tokens: int) -> list[LossTerm]:
    losses = [TypeAdapter(Loss).validate_python(options) for options in LOSSES]
    return [
        LossTerm(name=loss.kind, loss=loss, weight={}, denominator=num_tokens, advantage={})
        for loss in losses
    ]


def make_batch(num_tokens: int, seed: int) -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    missing_N = torch.full((num_tokens,), math.nan, dtype=torch.float64)
    weights = {term.name: normal(num_tokens).abs() for term in make_terms(1)}
    return TokenBatch(
        hidden_ND=normal(num_tokens, 4),
        ids_N=torch.randint(13, (num_tokens,), generator=generator),
        temperature_N=torch.ones(num_tokens, dtype=torch.float64),
        sampler_logp_N=missing_N,
        by_student_N=torch.zeros(num_tokens, dtype=torch.bool),
        teacher_logp_N=missing_N,
        reference_logp_N=missing_N,
        teacher_hidden_ND=normal(num_tokens, 4),
        reference_hidden_ND=None,
        weight_CN=weights,
        advantage_CN={},
        teacher_head=make_head(1),
        reference_head=None,
    )


def run(
    batch: TokenBatch, sizes: list[int], terms: list[LossTerm]
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Gradients by hidden states and head, and loss values, of micro-batches of these sizes."""
    head, metrics, gradients = make_head(0), MetricAccumulator(), []
    for index_M in torch.arange(len(batch)).split(sizes):
        gradient_MD, _, losses = backward_through_head(
            batch.select(index_M), head, terms, chunk=None
        )
        record_losses(losses, metrics)
        gradients.append(gradient_MD)
    return torch.cat(gradients), head.module.weight.grad, metrics.losses


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 2**20))
def test_micro_batches_add_up_to_the_whole(sizes: list[int], seed: int) -> None:
    total = sum(sizes)
    if total == 0:
        return
    batch, terms = make_batch(total, seed), make_terms(total)
    hidden_ND, weight_VD, values = run(batch, [total], terms)
    # By hand: the loss of a token times its weight, over the tokens of the whole step.
    leaf_ND, head = batch.hidden_ND.clone().requires_grad_(), make_head(0)
    logp_NV = head(leaf_ND).log_softmax(-1)
    logq_NV = batch.teacher_head(batch.teacher_hidden_ND).log_softmax(-1).detach()
    kl_N = (logp_NV.exp() * (logp_NV - logq_NV)).sum(-1)
    cross_entropy_N = -logp_NV.gather(-1, batch.ids_N[:, None])[:, 0]
    expected = {
        name: (loss_N * batch.weight_CN[name]).sum() / total
        for name, loss_N in (("divergence", kl_N), ("cross_entropy", cross_entropy_N))
    }
    close(values, {name: value.item() for name, value in expected.items()})
    (0.5 * expected["divergence"] + 2 * expected["cross_entropy"]).backward()
    close(hidden_ND, leaf_ND.grad)
    close(weight_VD, head.module.weight.grad)
    pieces_ND, pieces_VD, sums = run(batch, sizes, terms)
    close(pieces_ND, hidden_ND)
    close(pieces_VD, weight_VD)
    close(sums, values)


def test_weights_are_constants() -> None:
    batch, terms = make_batch(3, 0), make_terms(3)
    weights = {name: w_N.clone().requires_grad_() for name, w_N in batch.weight_CN.items()}
    hidden_ND, weight_VD, values = run(replace(batch, weight_CN=weights), [3], terms)
    assert not hidden_ND.requires_grad and not weight_VD.requires_grad
    assert all(weight_N.grad is None for weight_N in weights.values())
    close((hidden_ND, weight_VD, values), run(batch, [3], terms))


@pytest.mark.parametrize("denominator", [0, 5])
def test_an_empty_micro_batch_adds_a_gradient_of_zero(denominator: int) -> None:
    """Also to the head, so that every rank has a gradient to reduce."""
    hidden_ND, weight_VD, values = run(make_batch(0, 0), [0], make_terms(denominator))
    assert hidden_ND.shape == (0, 4) and values == {}
    close(weight_VD, torch.zeros(13, 4, dtype=torch.float64))


def test_tokens_without_a_denominator_or_a_weight_each_are_our_mistake() -> None:
    (term, _) = make_terms(2)
    with pytest.raises(AssertionError, match="denominator"):
        replace(term, weight={"t": (1.0, 0.0)}, denominator=0)
    assert replace(term, weight={"t": (0.0, 0.0)}, denominator=0).num_tokens == 0
    batch = make_batch(2, 0)
    weights = {name: weight_N[:1] for name, weight_N in batch.weight_CN.items()}
    with pytest.raises(AssertionError):
        backward_through_head(
            replace(batch, weight_CN=weights), make_head(0), make_terms(2), chunk=None
        )
