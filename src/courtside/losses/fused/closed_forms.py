"""Gradients of divergences by the logits in closed form: a speed-up, looked up by name.

With x = logits / temperature and h = ∂L/∂log π, the gradient is g_v = ∂L/∂x_v = h_v − π_v·Σ_u h_u
(π student, q teacher). What that gives; sums are over the vocabulary:

- reverse KL: g = π·(log(π/q) − KL(π‖q))
- forward KL: g = π − q
- JSD, M = β·q + (1 − β)·π: g = (1 − β)·π·(log(π/M) − KL(π‖M)); the derivatives of M cancel
- skewed reverse, M = α·π + (1 − α)·q: g = π·(z − Σ_u π_u·z_u), z = log(π/M) − α·π/M
- skewed forward, M = α·q + (1 − α)·π, b = (1 − α)·π/M ≤ 1: g = π·Σ_u q_u·b_u − q·b

Logits are finite here. Any other divergence, and any cap on terms, goes through autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from courtside.losses.fused.types import DivergenceSpec, TokenStatistics
from courtside.losses.top_k import tail_floor


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyBlock:
    """Log-probs and probabilities of a few rows, all of which are overwritten on the way."""

    logp_NV: Tensor
    """Becomes the gradient by logits / temperature."""
    p_NV: Tensor
    logq_NV: Tensor | None
    q_NV: Tensor | None
    """The teacher's two are None where there is no teacher."""
    scratch_NV: Tensor

    def dot(self, first_NV: Tensor, second_NV: Tensor) -> Tensor:
        """Σ over the vocabulary; a factor of 0 in `first_NV` gives 0, also against −inf."""
        sum_N = torch.mul(first_NV, second_NV, out=self.scratch_NV).sum(-1)
        if bool(sum_N.isnan().any()):
            sum_N = self.scratch_NV.masked_fill_(first_NV == 0, 0.0).sum(-1)
        return sum_N

    def set_centered(self, weight_N: Tensor, center_N: Tensor, pull_N: Tensor) -> None:
        """`logp_NV` holds z: it becomes π·(weight·(z − center) − pull)."""
        self.logp_NV.mul_(weight_N[:, None]).sub_((weight_N * center_N + pull_N)[:, None])
        self.logp_NV.mul_(self.p_NV)


ClosedForm = Callable[[VocabularyBlock, TokenStatistics, DivergenceSpec, Tensor, Tensor], Tensor]
"""(block, its statistics, divergence, weight_N, pull_N) → value_N; `block.logp_NV` becomes
weight·g − pull·π."""


def as_closed_form(divergence: DivergenceSpec) -> DivergenceSpec | None:
    """The same divergence under the name of its closed form; None: it has none.

    At the ends of their ranges JSD and the skewed KLs are plain KLs, without a mixture.
    """
    name, share = divergence.name, mixture_share(divergence)
    if divergence.support is not None or divergence.clip is not None or name not in CLOSED_FORMS:
        return None
    if share is None or 0 < share < 1:
        return divergence
    if name == "jsd":
        return DivergenceSpec(name="forward_kl" if share == 0 else "reverse_kl")
    return DivergenceSpec(name=name.removeprefix("skew_")) if share == 0 else None


def mixture_share(divergence: DivergenceSpec) -> float | None:
    return divergence.parameters.get("beta" if divergence.name == "jsd" else "alpha")


def log_mixture_shares(divergence: DivergenceSpec) -> tuple[float, float]:
    """(log of the student's share of the mixture, log of the teacher's)."""
    share = mixture_share(divergence)
    assert share is not None and 0 < share < 1
    shares = math.log(share), math.log1p(-share)
    return shares if divergence.name == "skew_reverse_kl" else (shares[1], shares[0])


def _reverse_kl(
    block: VocabularyBlock, statistics: TokenStatistics, _: DivergenceSpec, weight_N: Tensor,
    pull_N: Tensor,
) -> Tensor:  # fmt: skip
    assert block.logq_NV is not None and statistics.reverse_kl_N is not None
    block.logp_NV.sub_(block.logq_NV)
    block.set_centered(weight_N, statistics.reverse_kl_N, pull_N)
    return statistics.reverse_kl_N


def _forward_kl(
    block: VocabularyBlock, statistics: TokenStatistics, _: DivergenceSpec, weight_N: Tensor,
    pull_N: Tensor,
) -> Tensor:  # fmt: skip
    assert block.q_NV is not None and statistics.teacher_entropy_N is not None
    value_N = -statistics.teacher_entropy_N - block.dot(block.q_NV, block.logp_NV)
    torch.mul(block.p_NV, (weight_N - pull_N)[:, None], out=block.logp_NV)
    block.logp_NV.addcmul_(block.q_NV, -weight_N[:, None])
    return value_N


def _mixture(
    block: VocabularyBlock, _: TokenStatistics, divergence: DivergenceSpec, weight_N: Tensor,
    pull_N: Tensor,
) -> Tensor:  # fmt: skip
    logp_NV, logq_NV, q_NV = block.logp_NV, block.logq_NV, block.q_NV
    assert logq_NV is not None and q_NV is not None
    student_share, teacher_share = log_mixture_shares(divergence)
    # From here on log(share·π) and log(share·q), so that M is their plain sum.
    logp_NV.add_(student_share)
    logq_NV.add_(teacher_share)
    mixture_NV = torch.logaddexp(logp_NV, logq_NV, out=block.scratch_NV)
    logp_NV.sub_(mixture_NV)
    if divergence.name == "skew_reverse_kl":
        value_N = block.dot(block.p_NV, logp_NV) - student_share
        logp_NV.sub_(torch.exp(logp_NV, out=block.scratch_NV))
        block.set_centered(weight_N, block.dot(block.p_NV, logp_NV), pull_N)
        return value_N
    logq_NV.sub_(mixture_NV)
    from_teacher_N = block.dot(q_NV, logq_NV) - teacher_share
    if divergence.name == "skew_forward_kl":
        pulled_NV = logp_NV.exp_().mul_(q_NV)
        pull_N = pull_N - weight_N * pulled_NV.sum(-1)
        pulled_NV.mul_(-weight_N[:, None]).addcmul_(block.p_NV, -pull_N[:, None])
        return from_teacher_N
    beta = divergence.parameters["beta"]
    center_N = block.dot(block.p_NV, logp_NV)
    block.set_centered(weight_N * (1 - beta), center_N, pull_N)
    return beta * from_teacher_N + (1 - beta) * (center_N - student_share)


CLOSED_FORMS: dict[str, ClosedForm] = {
    "reverse_kl": _reverse_kl,
    "forward_kl": _forward_kl,
    "jsd": _mixture,
    "skew_forward_kl": _mixture,
    "skew_reverse_kl": _mixture,
}


def reverse_kl_with_tail(
    logp_NK: Tensor, logq_NK: Tensor, keep_NK: Tensor
) -> tuple[Tensor, Tensor]:
    """(value, h = π·(log(π/q) − log(π_tail/q_tail))) on a top-k support with a tail: what autograd
    gives, in a quarter of the operations."""
    p_NK, q_NK = (x.exp().masked_fill(~keep_NK, 0.0) for x in (logp_NK, logq_NK))
    floor = tail_floor(logp_NK.dtype)
    tail_N1, other_N1 = ((1 - x.sum(-1, keepdim=True)).clamp(min=floor) for x in (p_NK, q_NK))
    gap_NK = (logp_NK - logq_NK).masked_fill(p_NK == 0, 0.0)
    gap_N1 = tail_N1.log() - other_N1.log()
    value_N: Tensor = torch.linalg.vecdot(p_NK, gap_NK) + (tail_N1 * gap_N1).squeeze(-1)
    return value_N, p_NK * (gap_NK - gap_N1)
