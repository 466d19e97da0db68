"""Preference losses on pairs (DPO, IPO); each input is a sequence's summed log-probability.

Both are functions of one margin a pair. The derivative by it, detached, is a weight of the tokens:
−c·log π on the better tokens plus c·log π on the worse ones has the gradient of the loss exactly,
and the two sequences of a pair need not be in memory at once.
"""

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
    """c_N = β·σ(−β·margin), detached: ∂dpo/∂better = −c and ∂dpo/∂worse = +c."""
    return (beta * (-beta * margin_N).sigmoid()).detach()


def ipo(margin_N: Tensor, *, beta: float) -> Tensor:
    """(margin − 1/(2β))² of each pair: the margin is pulled to a finite target from both sides, so
    pairs that are always won do not drive the student ever further from the reference."""
    return (margin_N - 1 / (2 * beta)).square()


def ipo_token_weights(margin_N: Tensor, *, beta: float) -> Tensor:
    """c_N = 1/β − 2·margin, detached: ∂ipo/∂better = −c and ∂ipo/∂worse = +c. Negative beyond the
    target, where the better one falls again."""
    return (1 / beta - 2 * margin_N).detach()


FORMS = {"sigmoid": (dpo, dpo_token_weights), "ipo": (ipo, ipo_token_weights)}
"""By `form` of a recipe's preference loss: value and token weights."""
