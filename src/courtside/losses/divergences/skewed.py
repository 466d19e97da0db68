"""Skewed KLs, which never exceed log(1/α): plain at α = 0, zero at α = 1.

Forward KL(q ‖ α·q + (1 − α)·π), reverse KL(π ‖ α·π + (1 − α)·q).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from courtside.losses.divergences.kl_terms import kl_terms, log_mixture
from courtside.losses.divergences.registry import Divergence, Parameter, register

if TYPE_CHECKING:
    from torch import Tensor


def _forward_terms(student_logp_TV: Tensor, teacher_logp_TV: Tensor, *, alpha: float) -> Tensor:
    return kl_terms(teacher_logp_TV, log_mixture(teacher_logp_TV, student_logp_TV, alpha))


def _reverse_terms(student_logp_TV: Tensor, teacher_logp_TV: Tensor, *, alpha: float) -> Tensor:
    return kl_terms(student_logp_TV, log_mixture(student_logp_TV, teacher_logp_TV, alpha))


ALPHA = {"alpha": Parameter(hint="0.1 is common")}
register(Divergence(name="skew_forward_kl", terms=_forward_terms, parameters=ALPHA))
register(Divergence(name="skew_reverse_kl", terms=_reverse_terms, parameters=ALPHA))
