"""Direct preference optimization on pairs; each input is a sequence's summed log-probability."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


def dpo_margin(
    better_N: Tensor, worse_N: Tensor, reference_better_N: Tensor, reference_worse_N: Tensor
) -> Tensor:
    """(better − its reference) − (worse − its reference) of each pair: positive where the student
    prefers the better one more than the reference does."""
    return (better_N - reference_better_N.detach()) - (worse_N - reference_worse_N.detach())


def dpo(margin_N: Tensor, *, beta: float) -> Tensor:
    """−log σ(β·margin) of each pair."""
    return -logsigmoid(beta * margin_N)


def dpo_token_weights(margin_N: Tensor, *, beta: float) -> Tensor:
    """c_N = β·σ(−β·margin), detached: ∂dpo/∂better = −c and ∂dpo/∂worse = +c.

    So −c·log π on the better tokens plus c·log π on the worse ones has the gradient of `dpo`
    exactly, and the two sequences of a pair need not be in memory at once.
    """
    return (beta * (-beta * margin_N).sigmoid()).detach()
