"""Divergences over the whole vocabulary: π student, q teacher, one number per position.

Log-probabilities [T, V] come from an fp32 (or better) log-softmax; values [T] are not reduced, have
their dtype, and send gradient to the student only.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from courtside.losses.divergences import find_divergence
from courtside.losses.divergences.kl_terms import kl_terms
from courtside.losses.divergences.registry import Terms


def divergence(
    student_logp_TV: Tensor,
    teacher_logp_TV: Tensor,
    *,
    name: str,
    clip: float | None = None,
    **parameters: float,
) -> Tensor:
    """The registered divergence of that name, with its parameters (`beta`, `alpha`, …).

    `clip` caps the term of each token at one position: min(term, clip), with no gradient where it
    is capped. The value is then no longer a divergence and can be negative.
    """
    chosen = find_divergence(name)
    chosen.check_parameters(parameters)
    return sum_terms(partial(chosen.terms, **parameters), student_logp_TV, teacher_logp_TV, clip)


def sum_terms(
    terms: Terms, student_logp_TV: Tensor, teacher_logp_TV: Tensor, clip: float | None
) -> Tensor:
    """Σ_v min(term_v, clip) at each position; the teacher gets no gradient.

    A capped token has a gradient of exactly 0, also where its uncapped term is infinite.
    """
    assert student_logp_TV.shape == teacher_logp_TV.shape
    assert student_logp_TV.dtype in (torch.float32, torch.float64), "log-softmax is fp32 or better"
    teacher_logp_TV = teacher_logp_TV.detach()
    if clip is None:
        return terms(student_logp_TV, teacher_logp_TV).sum(-1)
    assert clip > 0
    with torch.no_grad():
        capped_TV = terms(student_logp_TV, teacher_logp_TV) > clip
    # Masking the inputs, not the terms: the backward pass of an infinite term is 0·inf = NaN.
    terms_TV = terms(
        student_logp_TV.masked_fill(capped_TV, 0.0), teacher_logp_TV.masked_fill(capped_TV, 0.0)
    )
    return terms_TV.masked_fill(capped_TV, clip).sum(-1)


def entropy(logp_TV: Tensor) -> Tensor:
    """−Σ_v p·log p in nats, differentiable."""
    return -kl_terms(logp_TV, torch.zeros_like(logp_TV)).sum(-1)
