"""Divergences on a support S of a few tokens instead of the whole vocabulary.

The inputs are log-probabilities normalized over the *full* vocabulary and gathered on S. What is
done about the tokens outside S, the form, decides where training ends (π student, q teacher):

- tail: the remaining mass of both is one extra class. A true divergence between coarsened
  distributions; its only fixed points have π = q on S. `tail_logp` has that mass from the
  whole vocabulary: 1 − Σ_S p is rounding noise below 1e-6 in float32, where a forward KL loses the
  gradient that would bring the student back.
- stop_gradient, reverse: Σ_S π·(sg[log π] − log q), whose gradient Σ_S π·log(π/q)·∇log π leaves out
  the +1 that cancels over the whole vocabulary only. Fixed point π = q on S.
- stop_gradient, forward: Σ_S q·log(q/π). There is nothing to stop: the student is in the second
  place only, so this *is* the naive form. Tokens outside S are only pushed down, and the fixed
  point is π = q/Σ_S q on S and 0 outside: S ends up with all of the student's mass.
- renormalized: both divided by their mass on S. Right ratios within S, but no gradient on the mass
  of S, which stays undetermined. Where one side excludes all of S there are no ratios to compare:
  value and gradient are 0.
- naive, reverse: Σ_S π·log(π/q) with its +1: a token rises only where q > e·π, and the fixed point
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

from courtside.losses.divergences import Form, find_divergence
from courtside.losses.full_vocabulary import sum_terms

SupportOf = Literal["teacher", "student", "joint"]


def top_k_ids(
    student_logp_TV: Tensor, teacher_logp_TV: Tensor, *, k: int, of: SupportOf
) -> tuple[Tensor, Tensor]:
    """The support at each position: (ids_TK, keep_TK). K = k, or 2k for the joint support."""
    check_top_k(k, student_logp_TV.shape[-1])
    student_TK, teacher_TK = (x.topk(k, dim=-1).indices for x in (student_logp_TV, teacher_logp_TV))
    return combine_top_k(student_TK, teacher_TK, of)[:2]


def combine_top_k(
    student_ids_TK: Tensor, teacher_ids_TK: Tensor, of: SupportOf
) -> tuple[Tensor, Tensor, Tensor]:
    """(ids_TK, keep_TK, overlap_T) from the most likely tokens of each side.

    `joint` lists the teacher's tokens, then the student's; `keep_TK` is False on those that the
    teacher already listed, so that no token counts twice.
    """
    shared_TK = (student_ids_TK.unsqueeze(-1) == teacher_ids_TK.unsqueeze(-2)).any(-1)
    all_TK = torch.ones_like(shared_TK)
    overlap_T = shared_TK.double().mean(-1)
    if of == "joint":
        ids_TK = torch.cat([teacher_ids_TK, student_ids_TK], dim=-1)
        return ids_TK, torch.cat([all_TK, ~shared_TK], dim=-1), overlap_T
    if of not in ("teacher", "student"):
        raise ValueError(f"of = {of!r}: use 'teacher', 'student' or 'joint'")
    return (teacher_ids_TK if of == "teacher" else student_ids_TK), all_TK, overlap_T


def check_top_k(k: int, vocab_size: int) -> None:
    if k > vocab_size:
        raise ValueError(f"k = {k}: the vocabulary has {vocab_size} tokens only")


def top_k_divergence(
    student_logp_TK: Tensor,
    teacher_logp_TK: Tensor,
    keep_TK: Tensor,
    *,
    name: str,
    form: Form,
    tails: tuple[Tensor, Tensor] | None = None,
    clip: float | None = None,
    **parameters: float,
) -> Tensor:
    """[T], not reduced; gradient to the student only. See above for what each form converges to.

    `tails`: log-probs [T] of everything outside S, of student and teacher; None: from 1 − Σ_S p.
    `clip` caps the term of each token of S; the tail counts as one token. The support is a
    constant: no gradient flows through the choice of its tokens.
    """
    divergence = find_divergence(name)
    divergence.check_parameters(parameters)
    divergence.check_form(form)
    terms = functools.partial(divergence.terms, **parameters)
    # Excluded tokens have probability zero: they add nothing to any sum over S.
    student_logp_TK = student_logp_TK.masked_fill(~keep_TK, -math.inf)
    teacher_logp_TK = teacher_logp_TK.masked_fill(~keep_TK, -math.inf)
    if form == "tail":
        student_tail_T, teacher_tail_T = tails or (
            tail_logp_from_support(student_logp_TK), tail_logp_from_support(teacher_logp_TK)
        )  # fmt: skip
        student_logp_TK = _append_tail(student_logp_TK, student_tail_T)
        teacher_logp_TK = _append_tail(teacher_logp_TK, teacher_tail_T)
    elif form == "renormalized":
        is_empty_T1 = _excludes_all(student_logp_TK) | _excludes_all(teacher_logp_TK)
        # Equal constants: no divergence, and no gradient passes a masked value.
        student_logp_TK = student_logp_TK.masked_fill(is_empty_T1, 0.0).log_softmax(-1)
        teacher_logp_TK = teacher_logp_TK.masked_fill(is_empty_T1, 0.0).log_softmax(-1)
    elif form == "stop_gradient" and divergence.stop_gradient_terms is not None:
        terms = functools.partial(divergence.stop_gradient_terms, **parameters)
    else:
        _warn_of_bias(name)
    return sum_terms(terms, student_logp_TK, teacher_logp_TK, clip)


def support_mass(logp_TK: Tensor, keep_TK: Tensor) -> Tensor:
    """Σ_S p at each position. A student's that is 1/e of the teacher's shows the naive bias."""
    return logp_TK.exp().masked_fill(~keep_TK, 0.0).sum(-1)


def tail_logp(logp_TV: Tensor, ids_TK: Tensor) -> Tensor:
    """log Σ p over the tokens that are not in S, [T]: as exact as the log-probs, however small.
    −inf where there are none."""
    masked_TV = logp_TV.scatter(-1, ids_TK, -math.inf)
    is_empty_T1 = _excludes_all(masked_TV)  # whose log-sum-exp has a NaN for a gradient
    tail_T = masked_TV.masked_fill(is_empty_T1, 0.0).logsumexp(-1)
    return tail_T.masked_fill(is_empty_T1.squeeze(-1), -math.inf)


def tail_logp_from_support(logp_TK: Tensor) -> Tensor:
    """log(1 − Σ_S p), [T], where the tokens outside S are not known.

    Below a floor the difference is rounding noise, and may be negative. The gradient goes on as if
    at the floor, bounded: a student that is sure of tokens the teacher does not have must still be
    able to move.
    """
    mass_T = 1 - logp_TK.exp().sum(-1)
    floor = 8 * torch.finfo(logp_TK.dtype).eps
    return (mass_T + (mass_T.clamp(min=floor) - mass_T).detach()).log()


def fill_empty_tails(tail_T: Tensor) -> Tensor:
    """The least positive mass where no token is outside S, or where all of them are excluded: a
    divergence from nothing at all is finite."""
    return tail_T.masked_fill(tail_T == -math.inf, math.log(torch.finfo(tail_T.dtype).tiny))


def _append_tail(logp_TK: Tensor, tail_T: Tensor) -> Tensor:
    return torch.cat([logp_TK, fill_empty_tails(tail_T).unsqueeze(-1)], dim=-1)


def _excludes_all(logp_TK: Tensor) -> Tensor:
    return (logp_TK == -math.inf).all(-1, keepdim=True)


@functools.cache
def _warn_of_bias(name: str) -> None:
    reason = find_divergence(name).truncation_bias
    warnings.warn(f"{name} on a top-k support without a tail: {reason}", stacklevel=3)
