"""Generalized Jensen-Shannon: β·KL(q‖M) + (1 − β)·KL(π‖M), M = β·q + (1 − β)·π.

Bounded for 0 < β < 1. It vanishes at both ends: D/β tends to the forward KL as β → 0, D/(1 − β) to
the reverse KL as β → 1. β = 0 and β = 1 are *defined* as forward and reverse KL, so the scale jumps
there: β = 0.01 is about a hundredth of β = 0, and wants a learning rate or weight to match.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from courtside.losses.divergences.kl_terms import kl_terms, log_mixture
from courtside.losses.divergences.registry import Divergence, Parameter, register

if TYPE_CHECKING:
    from torch import Tensor


def _terms(student_logp_TV: Tensor, teacher_logp_TV: Tensor, *, beta: float) -> Tensor:
    if beta == 0:
        return kl_terms(teacher_logp_TV, student_logp_TV)
    if beta == 1:
        return kl_terms(student_logp_TV, teacher_logp_TV)
    mixture_TV = log_mixture(teacher_logp_TV, student_logp_TV, beta)
    from_teacher_TV = beta * kl_terms(teacher_logp_TV, mixture_TV)
    return from_teacher_TV + (1 - beta) * kl_terms(student_logp_TV, mixture_TV)


register(
    Divergence(
        name="jsd", terms=_terms, parameters={"beta": Parameter(hint="0.5 is the symmetric one")}
    )
)
