"""One denominator per component and step: the cut into micro-batches does not show."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from courtside.losses.reduce import reduce_sum_over

close = partial(assert_close, rtol=1e-12, atol=1e-13)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 2**20))
def test_micro_batches_add_up_to_the_whole(sizes: list[int], seed: int) -> None:
    total = sum(sizes)
    if total == 0:
        return
    generator = torch.Generator().manual_seed(seed)
    parameter_T = torch.randn(total, generator=generator, dtype=torch.float64, requires_grad=True)
    weight_T = torch.rand(total, generator=generator, dtype=torch.float64)
    by_hand = sum(
        float(w) * float(x) ** 2 for w, x in zip(weight_T, parameter_T.detach(), strict=True)
    )
    whole = reduce_sum_over(parameter_T.square(), weight_T, total)
    close(whole.item(), by_hand / total)
    (expected_T,) = torch.autograd.grad(whole, parameter_T)
    value = 0.0
    pieces = zip(parameter_T.split(sizes), weight_T.split(sizes), strict=True)
    for piece_T, piece_weight_T in pieces:
        part = reduce_sum_over(piece_T.square(), piece_weight_T, total)
        part.backward()
        value += part.item()
    close(value, whole.item())
    close(parameter_T.grad, expected_T)


def test_weights_are_constants() -> None:
    weight_T = torch.ones(2, dtype=torch.float64, requires_grad=True)
    loss_T = torch.ones(2, dtype=torch.float64, requires_grad=True)
    reduce_sum_over(loss_T, weight_T, 2).backward()
    assert weight_T.grad is None


@pytest.mark.parametrize("denominator", [0, 5])
def test_an_empty_component_is_a_zero_that_backward_accepts(denominator: int) -> None:
    parameter = torch.randn(3, dtype=torch.float64, requires_grad=True)
    nothing = reduce_sum_over((parameter * 2)[:0], torch.ones(0), denominator)
    assert nothing.item() == 0 and nothing.shape == ()
    nothing.backward()
    close(parameter.grad, torch.zeros(3, dtype=torch.float64))


def test_tokens_without_a_denominator_or_a_weight_each_are_our_mistake() -> None:
    with pytest.raises(AssertionError, match="denominator"):
        reduce_sum_over(torch.ones(2), torch.ones(2), 0)
    with pytest.raises(AssertionError):
        reduce_sum_over(torch.ones(2), torch.ones(1), 2)
