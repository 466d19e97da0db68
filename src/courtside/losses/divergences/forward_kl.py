"""KL(q‖π) = Σ_v q·log(q/π), the teacher's entropy included: 0 where the two agree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from courtside.losses.divergences.kl_terms import kl_terms
from courtside.losses.divergences.registry import Divergence, register

if TYPE_CHECKING:
    from torch import Tensor


def _terms(student_logp_TV: Tensor, teacher_logp_TV: Tensor) -> Tensor:
    return kl_terms(teacher_logp_TV, student_logp_TV)


register(
    Divergence(
        name="forward_kl",
        terms=_terms,
        truncation_bias="no term holds mass outside the support, so the student converges to the "
        "teacher renormalized on it. Use form = 'tail'",
    )
)
