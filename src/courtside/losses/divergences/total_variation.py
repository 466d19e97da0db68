"""Total variation ½·Σ_v |π − q|, between 0 and 1: each token pulls by its sign, not by how far."""

from __future__ import annotations

from typing import TYPE_CHECKING

from courtside.losses.divergences.registry import Divergence, register

if TYPE_CHECKING:
    from torch import Tensor


def _terms(student_logp_TV: Tensor, teacher_logp_TV: Tensor) -> Tensor:
    return 0.5 * (student_logp_TV.exp() - teacher_logp_TV.exp()).abs()


register(Divergence(name="total_variation", terms=_terms))
