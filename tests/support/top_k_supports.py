"""Overlap of top-k supports from whole distributions; training has it from its backends."""

from __future__ import annotations

from torch import Tensor

from courtside.losses.top_k import combine_top_k


def overlap(student_logp_TV: Tensor, teacher_logp_TV: Tensor, k: int) -> Tensor:
    """|S_π ∩ S_q| / k: the share of the teacher's k most likely tokens that the student shares."""
    student_TK, teacher_TK = (x.topk(k, dim=-1).indices for x in (student_logp_TV, teacher_logp_TV))
    return combine_top_k(student_TK, teacher_TK, "joint")[2].to(student_logp_TV.dtype)
