"""What one word adds to a divergence, and the sum over words.

Knows log-probabilities only. Words of probability zero (log-probability −inf: masked, or so
unlikely that exp underflows) add 0·log 0 = 0 and get a gradient of 0, never NaN. Where the
mathematical value is infinite (a word the second distribution excludes and the first does not),
so is ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Terms = Callable[[Tensor, Tensor], Tensor]
"""(student_logp_TV, teacher_logp_TV) → what each word adds, [T, V]."""


def kl_terms(logp_TV: Tensor, other_logp_TV: Tensor) -> Tensor:
    """p·log(p/r) of each word."""
    p_TV = logp_TV.exp()
    # −inf − (−inf) is NaN: masking the difference stops it in the value and in the gradient.
    log_ratio_TV = (logp_TV - other_logp_TV).masked_fill(p_TV == 0, 0.0)
    return p_TV * log_ratio_TV


def log_mixture(first_logp_TV: Tensor, second_logp_TV: Tensor, share: float) -> Tensor:
    """log(share·first + (1 − share)·second), without leaving log-space."""
    first_TV = first_logp_TV + (math.log(share) if share > 0 else -math.inf)
    second_TV = second_logp_TV + (math.log1p(-share) if share < 1 else -math.inf)
    # logaddexp of two −inf is right in value and NaN in gradient, so those words go round it.
    nowhere_TV = (first_TV == -math.inf) & (second_TV == -math.inf)
    mixed_TV = torch.logaddexp(
        first_TV.masked_fill(nowhere_TV, 0.0), second_TV.masked_fill(nowhere_TV, 0.0)
    )
    return mixed_TV.masked_fill(nowhere_TV, -math.inf)


def sum_over_vocabulary(
    terms: Terms, student_logp_TV: Tensor, teacher_logp_TV: Tensor, clip: float | None
) -> Tensor:
    """Σ_v min(term_v, clip) at each position; the teacher gets no gradient.

    A capped word has a gradient of exactly 0, also where its uncapped term is infinite.
    """
    assert student_logp_TV.shape == teacher_logp_TV.shape
    assert student_logp_TV.dtype in (torch.float32, torch.float64), "log-softmax is fp32 or better"
    teacher_logp_TV = teacher_logp_TV.detach()
    if clip is None:
        return terms(student_logp_TV, teacher_logp_TV).sum(-1)
    assert clip > 0
    with torch.no_grad():
        capped_TV = terms(student_logp_TV, teacher_logp_TV) > clip
    # Cutting the inputs, not the terms: the backward pass of an infinite term is 0·inf = NaN.
    terms_TV = terms(
        student_logp_TV.masked_fill(capped_TV, 0.0), teacher_logp_TV.masked_fill(capped_TV, 0.0)
    )
    return terms_TV.masked_fill(capped_TV, clip).sum(-1)
