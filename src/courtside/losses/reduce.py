"""From losses per token to one number, with a denominator that micro-batches do not change."""

from __future__ import annotations

from torch import Tensor


def reduce_sum_over(loss_T: Tensor, weight_T: Tensor, denominator: float) -> Tensor:
    """Σ loss·weight / denominator.

    `denominator` is the number of trained tokens of this loss term in the *whole* optimizer step,
    over all micro-batches and ranks, so that sums over parts add up to the sum over the whole.
    Without tokens the result is a zero that still has a graph: every rank can call backward.
    """
    assert loss_T.shape == weight_T.shape
    if loss_T.numel() == 0:
        return loss_T.sum() * 0
    assert denominator > 0, "tokens without a denominator: count them over the whole step"
    return (loss_T * weight_T.detach()).sum() / denominator
