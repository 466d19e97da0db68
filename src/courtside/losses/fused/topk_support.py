# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Reverse KL on a top-k support in one kernel.

In torch (`support_divergence`, which has every divergence in every form) this is some seventy
small operations, each of which costs a kernel launch. With π the student and q the teacher
h = ∂L/∂log π = π·(log(π/q) − log(π_tail/q_tail)); without a tail only the first of the two logs,
which is the form with a stopped gradient.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from courtside.losses.fused.kernels import LN2, OUTPUTS, over_temperature
from courtside.losses.fused.topk_select import COMPARED, TopKBuffers
from courtside.losses.fused.types import DivergenceSpec, DivergenceStats, RawLogits

TEACHER = tl.constexpr(0)
STUDENT = tl.constexpr(1)
JOINT = tl.constexpr(2)
SUPPORTS = {"teacher": TEACHER, "student": STUDENT, "joint": JOINT}
SUPPORT_OUTPUTS = ("value", "student_mass", "teacher_mass", "overlap", "sum")
"""Of each row; the last is Σ_S h, weighted."""
FLOOR = tl.constexpr(8 * torch.finfo(torch.float32).eps)
"""Least tail mass: `top_k.tail_floor`."""


def has_support_kernel(divergence: DivergenceSpec) -> bool:
    support = divergence.support
    assert support is not None
    has_form = support.form in ("tail", "stop_gradient") and divergence.clip is None
    return has_form and divergence.name == "reverse_kl"


def reverse_kl_on_support(
    sides: tuple[RawLogits, RawLogits],
    selected: tuple[TopKBuffers, TopKBuffers],
    divergence: DivergenceSpec,
    per_row: tuple[Tensor, ...],
) -> tuple[DivergenceStats, Tensor, Tensor]:
    """(statistics, Σ_S h, the gradient by the logits of the tokens of S).

    `sides`: the student's and the teacher's logits, for their scales and softcaps only; `selected`:
    the most likely tokens of each. `per_row`: sampled tokens, temperatures, weights, ∂L/∂log π of
    the sampled tokens, and the `OUTPUTS` of `vocabulary_kernel`.
    """
    support, (student, teacher) = divergence.support, selected
    assert support is not None and len(per_row) == 5 and len(per_row[-1]) == len(OUTPUTS)
    num_rows, k = student.ids_NK.shape
    width = k * (2 if support.of == "joint" else 1)
    support_outputs = per_row[-1].new_empty(len(SUPPORT_OUTPUTS), num_rows)
    values_NK = sides[0].values_NV.new_empty(num_rows, width)
    if num_rows:
        support_kernel[(num_rows,)](
            student.ids_NK, student.logits_NK, student.other_logits_NK,
            teacher.ids_NK, teacher.logits_NK, teacher.other_logits_NK,
            *per_row, support_outputs, values_NK, num_rows, per_row[-1].stride(0), k, width,
            *(float(side.scale) for side in sides), *(float(side.softcap or 1) for side in sides),
            OF=SUPPORTS[support.of].value, TAIL=support.form == "tail",
            STUDENT_CAPPED=sides[0].softcap is not None,
            TEACHER_CAPPED=sides[1].softcap is not None,
            PADDED=triton.next_power_of_2(k), num_warps=1 if k <= 128 else 4,
        )  # fmt: skip
    by_name = {f"{name}_N": support_outputs[i] for i, name in enumerate(SUPPORT_OUTPUTS)}
    sum_N = by_name.pop("sum_N")
    return DivergenceStats(**by_name), sum_N, values_NK


@triton.jit
def _support_terms(
    student_raw, teacher_raw, at, inside, keep, on, out, stride, temperature, student_scale,
    teacher_scale, student_cap, teacher_cap, STUDENT_CAPPED: tl.constexpr,
    TEACHER_CAPPED: tl.constexpr,
):  # fmt: skip
    """Of these tokens: (π; π and q of those that count; the q that trains; log(π/q); the slope of
    the student's softcap)."""
    shift = tl.load(out)
    raw = tl.load(student_raw + at, mask=inside, other=0.0)
    x = over_temperature(raw, shift, student_scale, student_cap, temperature, STUDENT_CAPPED)
    slope = tl.full(x.shape, 1.0, tl.float32)
    if STUDENT_CAPPED:
        tanh = (x + shift) * (temperature / student_cap)
        slope = 1.0 - tanh * tanh
    logp = x - tl.load(out + stride) - tl.load(out + 2 * stride) * LN2
    raw = tl.load(teacher_raw + at, mask=inside, other=0.0)
    y = over_temperature(raw, tl.load(out + 3 * stride), teacher_scale, teacher_cap, temperature,
                         TEACHER_CAPPED)  # fmt: skip
    logq = y - tl.load(out + 4 * stride) - tl.load(out + 5 * stride) * LN2
    # A row without weight may have a teacher of NaN; the student itself takes its place.
    trained = tl.where(on, logq, logp)
    everywhere = tl.exp(logp)
    p = tl.where(keep, everywhere, 0.0)
    q = tl.where(keep, tl.exp(logq), 0.0)
    gap = tl.where(p == 0, 0.0, logp - trained)
    return everywhere, p, q, tl.where(keep, tl.exp(trained), 0.0), gap, slope


@triton.jit(do_not_specialize=["num_rows", "stride", "k", "width"])
def support_kernel(
    ids, student_raw, teacher_raw, teacher_ids, teacher_top_raw, teacher_top_student_raw,
    sampled_ids, temperatures, weights, coefficients, outputs, support_outputs, values, num_rows,
    stride, k, width, student_scale, teacher_scale, student_cap, teacher_cap,
    OF: tl.constexpr, TAIL: tl.constexpr, STUDENT_CAPPED: tl.constexpr,
    TEACHER_CAPPED: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """One row. The tokens of a joint support are the teacher's, then the student's, of which those
    that the teacher has too do not count."""
    n = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PADDED)
    inside = place < k
    at = n * k + place
    student_id = tl.load(ids + at, mask=inside, other=-1)
    teacher_top_id = tl.load(teacher_ids + at, mask=inside, other=-1)
    shared = tl.zeros([PADDED], tl.int32)
    first = k * 0
    while first < k:
        against = first + tl.arange(0, COMPARED)
        teacher_id = tl.load(teacher_ids + n * k + against, mask=against < k, other=-2)
        is_shared = student_id[:, None] == teacher_id[None, :]
        shared = tl.maximum(shared, tl.max(is_shared.to(tl.int32), 1))
        first += COMPARED
    temperature, weight = tl.load(temperatures + n), tl.load(weights + n)
    on, out = weight != 0, outputs + n
    student_mass, teacher_mass, trained_mass, value = 0.0, 0.0, 0.0, 0.0
    if OF != STUDENT:
        first_all, first_p, q, trained, first_gap, first_slope = _support_terms(
            teacher_top_student_raw, teacher_top_raw, at, inside, inside, on, out, stride,
            temperature, student_scale, teacher_scale, student_cap, teacher_cap, STUDENT_CAPPED,
            TEACHER_CAPPED,
        )  # fmt: skip
        student_mass += tl.sum(first_p, 0)
        teacher_mass += tl.sum(q, 0)
        trained_mass += tl.sum(trained, 0)
        value += tl.sum(first_p * first_gap, 0)
    if OF != TEACHER:
        keep = inside & ((shared == 0) | (OF == STUDENT))
        p_all, p, q, trained, gap, slope = _support_terms(
            student_raw, teacher_raw, at, inside, keep, on, out, stride, temperature,
            student_scale, teacher_scale, student_cap, teacher_cap, STUDENT_CAPPED, TEACHER_CAPPED,
        )  # fmt: skip
        student_mass += tl.sum(p, 0)
        teacher_mass += tl.sum(q, 0)
        trained_mass += tl.sum(trained, 0)
        value += tl.sum(p * gap, 0)
    tail_gap = 0.0
    total = value
    if TAIL:
        tail = tl.maximum(1.0 - student_mass, FLOOR)
        tail_gap = tl.log(tail) - tl.log(tl.maximum(1.0 - trained_mass, FLOOR))
        total -= student_mass * tail_gap
        value += tail * tail_gap
    # Σ_S h; of each token the gradient is h − π·(Σ_S h + c), and c more where it was sampled.
    total *= weight
    coefficient = tl.load(coefficients + n)
    pull = total + coefficient
    factor = student_scale / temperature
    sampled = tl.load(sampled_ids + n)
    to = values + n * width + place
    if OF != STUDENT:
        g = first_p * (first_gap - tail_gap) * weight - pull * first_all
        g += tl.where(teacher_top_id == sampled, coefficient, 0.0)
        g *= first_slope * factor
        tl.store(to, g.to(values.dtype.element_ty), mask=inside)
        to += k
    if OF != TEACHER:
        g = p * (gap - tail_gap) * weight - pull * p_all
        g += tl.where(student_id == sampled, coefficient, 0.0)
        g *= slope * factor
        tl.store(to, g.to(values.dtype.element_ty), mask=inside)
    out = support_outputs + n
    tl.store(out, tl.where(on, value, 0.0))
    tl.store(out + num_rows, student_mass)
    tl.store(out + 2 * num_rows, teacher_mass)
    tl.store(out + 3 * num_rows, tl.sum(shared, 0).to(tl.float32) / k)
    tl.store(out + 4 * num_rows, total)
