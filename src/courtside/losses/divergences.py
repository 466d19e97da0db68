"""Divergences over the whole vocabulary: π student, q teacher, one number per position.

All take log-probabilities [T, V] from an fp32 (or better) log-softmax, keep their dtype, return
[T] un-reduced and send gradient to the student only. `clip` caps what each word adds at one
position, from above: min(term, clip), with no gradient where it is capped. Values are then no
longer divergences (they can be negative); unclipped ones are.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from courtside.losses.kl_terms import kl_terms, log_mixture, sum_over_vocabulary

DivergenceName = Literal["reverse_kl", "forward_kl", "jsd", "skew_forward_kl", "skew_reverse_kl"]


def reverse_kl(
    student_logp_TV: Tensor, teacher_logp_TV: Tensor, *, clip: float | None = None
) -> Tensor:
    """KL(π‖q) = Σ_v π·log(π/q): the student avoids what the teacher finds unlikely."""
    return sum_over_vocabulary(kl_terms, student_logp_TV, teacher_logp_TV, clip)


def forward_kl(
    student_logp_TV: Tensor, teacher_logp_TV: Tensor, *, clip: float | None = None
) -> Tensor:
    """KL(q‖π) = Σ_v q·log(q/π), the teacher's entropy included: 0 when the two agree."""
    return sum_over_vocabulary(
        lambda student_TV, teacher_TV: kl_terms(teacher_TV, student_TV),
        student_logp_TV,
        teacher_logp_TV,
        clip,
    )


def jsd(
    student_logp_TV: Tensor, teacher_logp_TV: Tensor, *, beta: float, clip: float | None = None
) -> Tensor:
    """β·KL(q‖M) + (1 − β)·KL(π‖M) with M = β·q + (1 − β)·π. Never infinite for 0 < β < 1.

    This vanishes at both ends: D/β tends to the forward KL as β → 0, D/(1 − β) to the reverse KL
    as β → 1. β = 0 and β = 1 are *defined* as forward and reverse KL, so the scale jumps there:
    β = 0.01 is about a hundredth of β = 0, and wants a learning rate or weight to match.
    """
    _check_share("beta", beta)
    if beta == 0:
        return forward_kl(student_logp_TV, teacher_logp_TV, clip=clip)
    if beta == 1:
        return reverse_kl(student_logp_TV, teacher_logp_TV, clip=clip)

    def terms(student_TV: Tensor, teacher_TV: Tensor) -> Tensor:
        mixture_TV = log_mixture(teacher_TV, student_TV, beta)
        from_teacher_TV = beta * kl_terms(teacher_TV, mixture_TV)
        return from_teacher_TV + (1 - beta) * kl_terms(student_TV, mixture_TV)

    return sum_over_vocabulary(terms, student_logp_TV, teacher_logp_TV, clip)


def skew_forward_kl(
    student_logp_TV: Tensor, teacher_logp_TV: Tensor, *, alpha: float, clip: float | None = None
) -> Tensor:
    """KL(q ‖ α·q + (1 − α)·π): forward KL at α = 0, 0 at α = 1, never above log(1/α)."""
    _check_share("alpha", alpha)
    return sum_over_vocabulary(
        lambda student_TV, teacher_TV: kl_terms(
            teacher_TV, log_mixture(teacher_TV, student_TV, alpha)
        ),
        student_logp_TV,
        teacher_logp_TV,
        clip,
    )


def skew_reverse_kl(
    student_logp_TV: Tensor, teacher_logp_TV: Tensor, *, alpha: float, clip: float | None = None
) -> Tensor:
    """KL(π ‖ α·π + (1 − α)·q): reverse KL at α = 0, 0 at α = 1, never above log(1/α)."""
    _check_share("alpha", alpha)
    return sum_over_vocabulary(
        lambda student_TV, teacher_TV: kl_terms(
            student_TV, log_mixture(student_TV, teacher_TV, alpha)
        ),
        student_logp_TV,
        teacher_logp_TV,
        clip,
    )


def divergence(
    student_logp_TV: Tensor,
    teacher_logp_TV: Tensor,
    *,
    name: DivergenceName,
    beta: float | None = None,
    alpha: float | None = None,
    clip: float | None = None,
) -> Tensor:
    """The divergence of that name. `beta` belongs to jsd, `alpha` to the skewed ones."""
    if name not in get_args(DivergenceName):
        raise ValueError(f"{name!r} is no divergence; use one of {get_args(DivergenceName)}")
    if (beta is not None) != (name == "jsd"):
        raise ValueError(f"beta = {beta} with {name!r}: jsd needs a beta, no other divergence does")
    if (alpha is not None) != name.startswith("skew_"):
        raise ValueError(f"alpha = {alpha} with {name!r}: the skewed ones need an alpha, no other")
    if beta is not None:
        return jsd(student_logp_TV, teacher_logp_TV, beta=beta, clip=clip)
    if alpha is not None:
        skewed = skew_forward_kl if name == "skew_forward_kl" else skew_reverse_kl
        return skewed(student_logp_TV, teacher_logp_TV, alpha=alpha, clip=clip)
    plain = forward_kl if name == "forward_kl" else reverse_kl
    return plain(student_logp_TV, teacher_logp_TV, clip=clip)


def entropy(logp_TV: Tensor) -> Tensor:
    """−Σ_v p·log p in nats, differentiable."""
    return -kl_terms(logp_TV, torch.zeros_like(logp_TV)).sum(-1)


def entropy_aware(
    student_logp_TV: Tensor, teacher_logp_TV: Tensor, threshold: float, weight: float
) -> Tensor:
    """The term that is *added* to another divergence: weight · 1[H(q) > threshold] · KL(q‖π).

    Where the teacher is unsure, the reverse KL alone would settle on one of its options.
    """
    sure_T = entropy(teacher_logp_TV.detach()) <= threshold
    # Filling, not multiplying: 0 · inf is NaN.
    return weight * forward_kl(student_logp_TV, teacher_logp_TV).masked_fill(sure_T, 0.0)


def extrapolate_logprobs(teacher_logp_TV: Tensor, reference_logp_TV: Tensor, lam: float) -> Tensor:
    """log of q^λ·ref^(1−λ), normalised and detached: λ > 1 goes beyond the teacher.

    A word the teacher excludes stays excluded. With λ > 1, a word that only the reference excludes
    has no finite extrapolation: the result is NaN at that position, on purpose.
    """
    assert lam > 0
    teacher_TV = teacher_logp_TV.detach()
    if lam == 1:  # Not 0·(−inf) where the reference excludes a word.
        return teacher_TV
    mixed_TV = lam * teacher_TV + (1 - lam) * reference_logp_TV.detach()
    return mixed_TV.masked_fill(teacher_TV == -torch.inf, -torch.inf).log_softmax(-1)


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} = {value}: must lie between 0 and 1")
