"""DPO and IPO against the textbook, and the token weights that stand in for them."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from courtside.losses.preference import (
    FORMS,
    dpo,
    dpo_margin,
    dpo_token_weights,
    ipo,
    ipo_token_weights,
)

close = partial(assert_close, rtol=1e-9, atol=1e-12)


@given(st.integers(0, 2**20), st.sampled_from([0.05, 0.5, 2.0]), st.sampled_from([1.0, 20.0]))
def test_dpo_value_gradient_and_weights(seed: int, beta: float, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = scale * torch.randn(4, 3, generator=generator, dtype=torch.float64)
    better_N, worse_N, *references = (x.requires_grad_() for x in inputs.unbind())
    margin_N = dpo_margin(better_N, worse_N, *references)
    loss_N = dpo(margin_N, beta=beta)
    gradients = torch.autograd.grad(
        loss_N.sum(), (better_N, worse_N, *references), allow_unused=True
    )
    assert gradients[2:] == (None, None)
    weight_N = dpo_token_weights(margin_N, beta=beta)
    assert not weight_N.requires_grad
    for n in range(3):
        better, worse, reference_better, reference_worse = (x.item() for x in inputs[:, n])
        margin = beta * ((better - reference_better) - (worse - reference_worse))
        # log(1 + e^−m) and e^−m / (1 + e^−m): −log σ(m) and σ(−m) from scratch.
        close(loss_N[n].item(), math.log1p(math.exp(-margin)))
        slope = beta * math.exp(-margin) / (1 + math.exp(-margin))
        close(gradients[0][n].item(), -slope)
        close(gradients[1][n].item(), slope)
        close(weight_N[n].item(), slope)


@given(st.integers(0, 2**20), st.sampled_from([0.05, 0.5, 2.0]), st.sampled_from([1.0, 20.0]))
def test_ipo_value_gradient_and_weights(seed: int, beta: float, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = scale * torch.randn(4, 3, generator=generator, dtype=torch.float64)
    better_N, worse_N, *references = (x.requires_grad_() for x in inputs.unbind())
    margin_N = dpo_margin(better_N, worse_N, *references)
    loss_N = ipo(margin_N, beta=beta)
    by_better, by_worse = torch.autograd.grad(loss_N.sum(), (better_N, worse_N))
    weight_N = ipo_token_weights(margin_N, beta=beta)
    assert not weight_N.requires_grad
    for n in range(3):
        better, worse, reference_better, reference_worse = (x.item() for x in inputs[:, n])
        # The paper's h: log π(y_w)·π_ref(y_l) / π(y_l)·π_ref(y_w), regressed on 1 / 2τ.
        h = better + reference_worse - worse - reference_better
        close(loss_N[n].item(), (h - 0.5 / beta) ** 2)
        slope = 2 * (0.5 / beta - h)
        close(by_better[n].item(), -slope)
        close(by_worse[n].item(), slope)
        close(weight_N[n].item(), slope)


def test_beyond_its_target_ipo_turns_round_and_dpo_does_not() -> None:
    margin_N = torch.tensor([0.0, 5.0, 9.0], dtype=torch.float64)
    assert ipo_token_weights(margin_N, beta=0.1).sign().tolist() == [1, 0, -1]
    assert (dpo_token_weights(margin_N, beta=0.1) > 0).all()


@pytest.mark.parametrize("form", FORMS)
def test_the_stream_of_token_weights_has_the_gradient_of_the_loss(form: str) -> None:
    loss_of, token_weights = FORMS[form]
    better_NT, worse_NT = torch.randn(2, 3, 4, dtype=torch.float64).unbind()
    better_NT.requires_grad_()
    worse_NT.requires_grad_()
    references = (torch.randn(3, dtype=torch.float64), torch.randn(3, dtype=torch.float64))
    margin_N = dpo_margin(better_NT.sum(-1), worse_NT.sum(-1), *references)
    loss = loss_of(margin_N, beta=0.3).sum()
    weight_N = token_weights(margin_N, beta=0.3)
    stream = (weight_N[:, None] * worse_NT).sum() - (weight_N[:, None] * better_NT).sum()
    exact = torch.autograd.grad(loss, (better_NT, worse_NT))
    close(torch.autograd.grad(stream, (better_NT, worse_NT)), exact)
