"""Random pairs of student and teacher logits, with the edge cases that break formulas."""

from __future__ import annotations

from typing import Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

Masks = Literal["none", "student_more", "teacher_more", "independent"]


@st.composite
def logit_pairs(
    draw: st.DrawFn, *, masks: Masks = "none", max_scale: float = 40.0, max_vocab_size: int = 6
) -> tuple[Tensor, Tensor]:
    """(student_TV, teacher_TV) in float64, from nearly uniform to nearly deterministic.

    `masks` puts −inf: `student_more` excludes for the student every token that the teacher excludes
    and others (a finite reverse KL), `teacher_more` the other way round (a finite forward KL).
    """
    positions, vocab_size = draw(st.integers(1, 3)), draw(st.integers(2, max_vocab_size))
    shape = (positions, vocab_size)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    scales = st.sampled_from([s for s in (0.1, 1.0, 5.0, 40.0) if s <= max_scale])
    student_TV, teacher_TV = (
        torch.randn(shape, generator=generator, dtype=torch.float64) * draw(scales)
        for _ in range(2)
    )
    if masks == "none":
        return student_TV, teacher_TV
    first_TV, second_TV = (torch.rand(shape, generator=generator) < 0.4 for _ in range(2))
    if masks == "independent":
        return _masked(student_TV, first_TV, 0), _masked(teacher_TV, second_TV, vocab_size - 1)
    if masks == "student_more":
        return _masked(student_TV, first_TV | second_TV, 0), _masked(teacher_TV, first_TV, 0)
    return _masked(student_TV, first_TV, 0), _masked(teacher_TV, first_TV | second_TV, 0)


def _masked(logits_TV: Tensor, mask_TV: Tensor, never: int) -> Tensor:
    mask_TV = mask_TV.clone()
    mask_TV[:, never] = False
    return logits_TV.masked_fill(mask_TV, -torch.inf)
