"""KL(π‖q) = Σ_v π·log(π/q): the student avoids what the teacher finds unlikely."""

from __future__ import annotations

from typing import TYPE_CHECKING

from courtside.losses.divergences.kl_terms import kl_terms
from courtside.losses.divergences.registry import Divergence, register

if TYPE_CHECKING:
    from torch import Tensor


def _score_terms(student_logp_TK: Tensor, teacher_logp_TK: Tensor) -> Tensor:
    """π·sg[log(π/q)]: the value of the reverse KL, its gradient without the +1."""
    p_TK = student_logp_TK.exp()
    return p_TK * (student_logp_TK - teacher_logp_TK).detach().masked_fill(p_TK == 0, 0.0)


register(
    Divergence(
        name="reverse_kl",
        terms=kl_terms,
        stop_gradient_terms=_score_terms,
        truncation_bias="its gradient has a +1 per token that cancels over the whole vocabulary "
        "only, so the student converges to 1/e of the teacher's mass on the support. Use form = "
        "'tail' or 'stop_gradient'",
    )
)
