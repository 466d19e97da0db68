"""Terms that KL divergences are sums of.

A token of probability zero (log-probability −inf, or so unlikely that exp underflows) adds
0·log 0 = 0 and gets a gradient of 0, never NaN. Where the mathematical value is infinite (the
second distribution excludes a token that the first does not), so is the term.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def kl_terms(logp_TV: Tensor, other_logp_TV: Tensor) -> Tensor:
    """p·log(p/r) of each token."""
    p_TV = logp_TV.exp()
    # −inf − (−inf) is NaN: masking the difference stops it in the value and in the gradient.
    log_ratio_TV = (logp_TV - other_logp_TV).masked_fill(p_TV == 0, 0.0)
    return p_TV * log_ratio_TV


def log_mixture(first_logp_TV: Tensor, second_logp_TV: Tensor, share: float) -> Tensor:
    """log(share·first + (1 − share)·second), without leaving log-space."""
    first_TV = first_logp_TV + (math.log(share) if share > 0 else -math.inf)
    second_TV = second_logp_TV + (math.log1p(-share) if share < 1 else -math.inf)
    # logaddexp of two −inf has the right value and a NaN gradient: those tokens are masked.
    excluded_TV = (first_TV == -math.inf) & (second_TV == -math.inf)
    mixed_TV = first_TV.masked_fill(excluded_TV, 0.0).logaddexp(
        second_TV.masked_fill(excluded_TV, 0.0)
    )
    return mixed_TV.masked_fill(excluded_TV, -math.inf)
