"""Divergences on a support S of a few words instead of the whole vocabulary.

The inputs are log-probabilities normalised over the *full* vocabulary and gathered on S. What is
done about the words outside S decides where training ends (π student, q teacher):

- tail: the rest of both is one extra class. A true divergence between coarsened distributions;
  its only fixed points have π = q on S.
- stop_gradient, reverse: Σ_S π·(sg[log π] − log q), whose gradient Σ_S π·log(π/q)·∇log π leaves out
  the +1 that cancels over the whole vocabulary only. Fixed point π = q on S.
- stop_gradient, forward: Σ_S q·log(q/π). There is nothing to stop: the student is in the second
  place only, so this *is* the naive form. The words outside S are only pushed down, and the fixed
  point is π = q/Σ_S q on S and 0 outside: S ends up with all of the student's mass.
- renormalized: both divided by their mass on S. Right ratios within S, but no gradient on the mass
  of S, which stays undetermined.
- naive, reverse: Σ_S π·log(π/q) with its +1: a word rises only where q > e·π, and the fixed point
  is π = q/e on S.

Naive, and stop_gradient with the forward KL, converge to a wrong mass on S: they warn, once.
"""

from __future__ import annotations

import functools
import math
import warnings
from typing import Literal

import torch
from torch import Tensor

from courtside.losses.divergences import DivergenceName, divergence
from courtside.losses.kl_terms import sum_over_vocabulary

SupportOf = Literal["teacher", "student", "joint"]
Form = Literal["tail", "stop_gradient", "renormalized", "naive"]


def top_k_ids(
    student_logp_TV: Tensor, teacher_logp_TV: Tensor, *, k: int, of: SupportOf
) -> tuple[Tensor, Tensor]:
    """The support at each position: (ids_TK, keep_TK). K = k, or 2k for the joint support.

    `joint` lists the teacher's words, then the student's; `keep_TK` is False on those that the
    teacher already listed, so that no word counts twice.
    """
    if k > student_logp_TV.shape[-1]:
        raise ValueError(f"k = {k}: the vocabulary has {student_logp_TV.shape[-1]} words only")
    if of == "joint":
        teacher_ids_TK = teacher_logp_TV.topk(k, dim=-1).indices
        student_ids_TK = student_logp_TV.topk(k, dim=-1).indices
        new_TK = ~_is_among(student_ids_TK, teacher_ids_TK)
        ids_TK = torch.cat([teacher_ids_TK, student_ids_TK], dim=-1)
        return ids_TK, torch.cat([torch.ones_like(new_TK), new_TK], dim=-1)
    if of not in ("teacher", "student"):
        raise ValueError(f"of = {of!r}: use 'teacher', 'student' or 'joint'")
    ids_TK = (teacher_logp_TV if of == "teacher" else student_logp_TV).topk(k, dim=-1).indices
    return ids_TK, torch.ones_like(ids_TK, dtype=torch.bool)


def top_k_divergence(
    student_logp_TK: Tensor,
    teacher_logp_TK: Tensor,
    keep_TK: Tensor,
    *,
    name: DivergenceName,
    form: Form,
    beta: float | None = None,
    alpha: float | None = None,
    clip: float | None = None,
) -> Tensor:
    """[T], un-reduced; gradient to the student only. The module says what each form converges to.

    `clip` caps each word of S; the tail counts as one word. The support is a constant: no gradient
    flows through the choice of its words.
    """
    if form in ("stop_gradient", "naive") and name not in ("reverse_kl", "forward_kl"):
        raise ValueError(
            f"form = {form!r} is defined for reverse_kl and forward_kl; use 'tail' with {name!r}"
        )
    # Excluded words have probability zero: they add nothing to any sum over S.
    student_logp_TK = student_logp_TK.masked_fill(~keep_TK, -math.inf)
    teacher_logp_TK = teacher_logp_TK.masked_fill(~keep_TK, -math.inf)
    if form == "tail":
        student_logp_TK = torch.cat([student_logp_TK, _tail_logp(student_logp_TK)], dim=-1)
        teacher_logp_TK = torch.cat([teacher_logp_TK, _tail_logp(teacher_logp_TK)], dim=-1)
    elif form == "renormalized":
        student_logp_TK = student_logp_TK.log_softmax(-1)
        teacher_logp_TK = teacher_logp_TK.log_softmax(-1)
    elif form == "stop_gradient" and name == "reverse_kl":
        return sum_over_vocabulary(_score_terms, student_logp_TK, teacher_logp_TK, clip)
    elif form in ("stop_gradient", "naive"):
        _warn_of_fixed_point(name)
    else:
        raise ValueError(f"form = {form!r}: use 'tail', 'stop_gradient', 'renormalized' or 'naive'")
    return divergence(
        student_logp_TK, teacher_logp_TK, name=name, beta=beta, alpha=alpha, clip=clip
    )


def support_mass(logp_TK: Tensor, keep_TK: Tensor) -> Tensor:
    """Σ_S p at each position. A student's that is 1/e of the teacher's shows the naive bias."""
    return logp_TK.exp().masked_fill(~keep_TK, 0.0).sum(-1)


def overlap(student_logp_TV: Tensor, teacher_logp_TV: Tensor, k: int) -> Tensor:
    """|S_π ∩ S_q| / k: the share of the teacher's k likeliest words that are the student's too."""
    student_ids_TK = student_logp_TV.topk(k, dim=-1).indices
    teacher_ids_TK = teacher_logp_TV.topk(k, dim=-1).indices
    return _is_among(student_ids_TK, teacher_ids_TK).to(student_logp_TV.dtype).mean(-1)


def _is_among(ids_TK: Tensor, others_TK: Tensor) -> Tensor:
    return (ids_TK.unsqueeze(-1) == others_TK.unsqueeze(-2)).any(-1)


def _tail_logp(logp_TK: Tensor) -> Tensor:
    """log(1 − Σ_S p), [T, 1].

    1 − Σ_S p is rounding noise once it nears the dtype's epsilon (and may be negative), so it never
    goes below 8 epsilons. The gradient goes on as if at that floor, bounded: a student that is sure
    of words the teacher does not have must still be able to move.
    """
    tail_T1 = 1 - logp_TK.exp().sum(-1, keepdim=True)
    floor = 8 * torch.finfo(logp_TK.dtype).eps
    return (tail_T1 + (tail_T1.clamp(min=floor) - tail_T1).detach()).log()


def _score_terms(student_TK: Tensor, teacher_TK: Tensor) -> Tensor:
    """π·sg[log(π/q)]: value of the reverse KL, gradient without the +1."""
    p_TK = student_TK.exp()
    return p_TK * (student_TK - teacher_TK).detach().masked_fill(p_TK == 0, 0.0)


@functools.cache
def _warn_of_fixed_point(name: DivergenceName) -> None:
    if name == "reverse_kl":
        reason = (
            "its gradient keeps a +1 per word that cancels over the whole vocabulary only, so the "
            "student converges to 1/e of the teacher's mass on the support. Use form = 'tail' or "
            "'stop_gradient'"
        )
    else:
        reason = (
            "nothing holds mass outside the support, so the student converges to the teacher "
            "renormalized on it. Use form = 'tail'"
        )
    warnings.warn(f"{name} on a top-k support without a tail: {reason}", stacklevel=3)
