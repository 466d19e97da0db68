"""Direct preference optimization on pairs; each input is a sequence's summed log-probability."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


def dpo(
    better_N: Tensor,
    worse_N: Tensor,
    reference_better_N: Tensor,
    reference_worse_N: Tensor,
    *,
    beta: float,
) -> Tensor:
    """−log σ(β·[(better − its reference) − (worse − its reference)]) of each pair."""
    margin_N = _margin(better_N, worse_N, reference_better_N, reference_worse_N)
    return -logsigmoid(beta * margin_N)


def dpo_token_weights(
    better_N: Tensor,
    worse_N: Tensor,
    reference_better_N: Tensor,
    reference_worse_N: Tensor,
    *,
    beta: float,
) -> Tensor:
    """c_N = β·σ(−β·margin), detached: ∂dpo/∂better = −c and ∂dpo/∂worse = +c.

    So −c·log π on the better tokens plus c·log π on the worse ones has the gradient of `dpo`
    exactly, and the two sequences of a pair need not be in memory at once.
    """
    margin_N = _margin(better_N, worse_N, reference_better_N, reference_worse_N)
    return (beta * (-beta * margin_N).sigmoid()).detach()


def _margin(
    better_N: Tensor, worse_N: Tensor, reference_better_N: Tensor, reference_worse_N: Tensor
) -> Tensor:
    return (better_N - reference_better_N.detach()) - (worse_N - reference_worse_N.detach())
