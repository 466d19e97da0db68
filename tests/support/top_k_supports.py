"""Supports of top-k divergences from whole distributions; training has them in its backends."""

from __future__ import annotations

from torch import Tensor

from courtside.losses.top_k import SupportOf, check_top_k, combine_top_k


def top_k_ids(
    student_logp_TV: Tensor, teacher_logp_TV: Tensor, *, k: int, of: SupportOf
) -> tuple[Tensor, Tensor]:
    """The support at each position: (ids_TK, keep_TK). K = k, or 2k for the joint support."""
    check_top_k(k, student_logp_TV.shape[-1])
    student_TK, teacher_TK = (x.topk(k, dim=-1).indices for x in (student_logp_TV, teacher_logp_TV))
    return combine_top_k(student_TK, teacher_TK, of)[:2]


def overlap(student_logp_TV: Tensor, teacher_logp_TV: Tensor, k: int) -> Tensor:
    """|S_π ∩ S_q| / k: the share of the teacher's k most likely tokens that the student shares."""
    student_TK, teacher_TK = (x.topk(k, dim=-1).indices for x in (student_logp_TV, teacher_logp_TV))
    return combine_top_k(student_TK, teacher_TK, "joint")[2].to(student_logp_TV.dtype)
