"""The divergence on a top-k support with its gradient by few log-probs, for both backends.

With h = ∂L/∂log π, weighted, of the tokens of S and of the tail, which is a class of its own in the
form `tail` and absent in the others, the gradient by the logits over temperature is

- on S: g = h − π·(Σ_S h + h_tail)
- elsewhere: g = π·(h_tail/π_tail − Σ_S h − h_tail), the tail's h in proportion to π.

All of it is exact where the student's tail is exact: a forward KL has h_tail = −q_tail, so that its
gradient outside S adds up to −q_tail however small π_tail is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from courtside.losses.fused.types import DivergenceSpec, DivergenceStats
from courtside.losses.top_k import fill_empty_tails, support_mass

LARGEST_RATIO = 40.0
"""Of h_tail/π_tail, as a logarithm: above this, the rest of the gradient is lost in its rounding,
and π itself may underflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupportGradient:
    """h = ∂L/∂log π, weighted."""

    h_NK: Tensor
    """0 on tokens that a joint support lists twice."""
    h_tail_N: Tensor
    tail_N: Tensor
    """log π_tail; where there is no tail, 0."""

    def sum(self) -> Tensor:
        return self.h_NK.sum(-1) + self.h_tail_N

    def outside(self, coefficient_N: Tensor) -> tuple[Tensor, Tensor]:
        """(pull, exponent): g = −π·pull·exp(exponent) outside S. `coefficient_N`: ∂L/∂log π of the
        sampled token. The exponent is 0 but where π_tail is tiny."""
        log_ratio_N = self.h_tail_N.double().abs().log() - self.tail_N
        exponent_N = (log_ratio_N - LARGEST_RATIO).clamp(min=0.0)
        ratio_N = self.h_tail_N.sign() * (log_ratio_N - exponent_N).exp()
        pull_N = (self.sum() + coefficient_N) * (-exponent_N).exp() - ratio_N
        return pull_N.to(self.h_NK.dtype), exponent_N.to(self.h_NK.dtype)


def differentiate_on_support(
    logp_NK: Tensor, logq_NK: Tensor, keep_NK: Tensor, divergence: DivergenceSpec,
    weight_N: Tensor, overlap_N: Tensor | None, tails: tuple[Tensor, Tensor] | None,
) -> tuple[DivergenceStats, SupportGradient]:  # fmt: skip
    """From log-probs normalized over the whole vocabulary. `tails`: the log-probs of all other
    tokens, of both sides; None: the form has no tail."""
    support = divergence.support
    assert support is not None and (support.form == "tail") == (tails is not None)
    on_N = weight_N != 0
    # Rows without weight may have a teacher of NaN; the student itself takes its place.
    safe_NK = torch.where(on_N[:, None], logq_NK, logp_NK)
    student_mass_N, teacher_mass_N = (support_mass(x_NK, keep_NK) for x_NK in (logp_NK, logq_NK))
    if tails is not None:
        tail_N = _refine_tail(tails[0], student_mass_N)
        tails = tail_N, torch.where(on_N, _refine_tail(tails[1], teacher_mass_N), tail_N)
    if tails is not None and (divergence.name, divergence.clip) == ("reverse_kl", None):
        value_N, h_NK, h_tail_N = reverse_kl_with_tail(logp_NK, safe_NK, keep_NK, tails)
        h_NK, h_tail_N = h_NK * weight_N[:, None], h_tail_N * weight_N
    else:
        value_N, h_NK, h_tail_N = _by_autograd(
            logp_NK, safe_NK, keep_NK, divergence, weight_N, tails
        )
    stats = DivergenceStats(
        value_N=value_N.masked_fill(~on_N, 0.0),
        student_mass_N=student_mass_N,
        teacher_mass_N=teacher_mass_N,
        overlap_N=None if overlap_N is None else overlap_N.to(logp_NK.dtype),
    )
    tail_N = torch.zeros_like(value_N) if tails is None else tails[0]
    return stats, SupportGradient(h_NK=h_NK, h_tail_N=h_tail_N, tail_N=tail_N)


def _refine_tail(tail_N: Tensor, mass_N: Tensor) -> Tensor:
    """The tail's log-prob, finite, from the sum over the smaller part: the tail or S."""
    return torch.where(mass_N < 0.5, torch.log1p(-mass_N), fill_empty_tails(tail_N))


def _by_autograd(
    logp_NK: Tensor, logq_NK: Tensor, keep_NK: Tensor, divergence: DivergenceSpec,
    weight_N: Tensor, tails: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(value, h, h_tail), the two weighted."""
    leaves = [x.detach().clone().requires_grad_() for x in (logp_NK, *(tails or ())[:1])]
    with torch.enable_grad():
        leaf_tails = None if tails is None else (leaves[1], tails[1])
        value_N = divergence.value(leaves[0], logq_NK, keep_NK, leaf_tails)
    h_NK, *h_tails = torch.autograd.grad(value_N, leaves, weight_N.to(value_N.dtype))
    value_N = value_N.detach()
    return value_N, h_NK, h_tails[0] if h_tails else torch.zeros_like(value_N)


def reverse_kl_with_tail(
    logp_NK: Tensor, logq_NK: Tensor, keep_NK: Tensor, tails: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """(value, h, h_tail) on a top-k support with a tail, in a quarter of autograd's operations.
    Each h is π·log(π/q): the + 1 of the derivative cancels over S and tail together."""
    p_NK = logp_NK.exp().masked_fill(~keep_NK, 0.0)
    h_NK = p_NK * (logp_NK - logq_NK).masked_fill(p_NK == 0, 0.0)
    h_tail_N = tails[0].exp() * (tails[0] - tails[1])
    return h_NK.sum(-1) + h_tail_N, h_NK, h_tail_N
