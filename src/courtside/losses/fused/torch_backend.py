"""Value and gradient of a divergence from a block of logits, in closed form and in place.

With x = logits / temperature and h = ∂L/∂log π, the gradient is g_v = ∂L/∂x_v = h_v − π_v·Σ_u h_u
(π student, q teacher). What that gives; sums are over the vocabulary:

- reverse KL: g = π·(log(π/q) − KL(π‖q))
- forward KL: g = π − q
- JSD, M = β·q + (1 − β)·π: g = (1 − β)·π·(log(π/M) − KL(π‖M)); the derivatives of M cancel
- skewed reverse, M = α·π + (1 − α)·q: g = π·(z − Σ_u π_u·z_u), z = log(π/M) − α·π/M
- skewed forward, M = α·q + (1 − α)·π, b = (1 − α)·π/M ≤ 1: g = π·Σ_u q_u·b_u − q·b
- the sampled word y with ∂L/∂log π_y = c: g = c·(1[v = y] − π)
- a support S: h is 0 outside it, so g = h − π·Σ_S h, where h [N, K] is small enough for autograd

Logits are finite here. Words that are masked out (−inf) belong to `full` and `top_k`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from courtside.losses.fused.types import (
    DivergenceSpec,
    DivergenceStats,
    HeadLossSpec,
    RawLogits,
    Support,
    TeacherLogits,
    TokenStatistics,
    concatenate_fields,
)
from courtside.losses.top_k import support_mass, top_k_divergence

CPU_BLOCK, GPU_BLOCK = 2**20, 2**26
"""Elements of one block: on a CPU what its caches hold, so that many passes over it cost little."""


def vocabulary_pass_torch(
    student: RawLogits, teacher: TeacherLogits | None, asked: HeadLossSpec, rows: slice
) -> tuple[TokenStatistics, DivergenceStats | None]:
    """All about `rows`, whose logits these are; the student's are replaced by the gradient."""
    statistics: list[TokenStatistics] = []
    found: list[DivergenceStats] = []
    parts = [(rows, None)] if teacher is None else teacher
    for part, logits in parts:
        own_NV = student.values_NV[part.start - rows.start : part.stop - rows.start]
        here, there = _part_in_torch(replace(student, values_NV=own_NV), logits, asked, part)
        statistics.append(here)
        found += [] if there is None else [there]
    return concatenate_fields(statistics), concatenate_fields(found) if found else None


def _part_in_torch(
    student: RawLogits, teacher: RawLogits | None, asked: HeadLossSpec, rows: slice
) -> tuple[TokenStatistics, DivergenceStats | None]:
    num_rows, vocab_size = student.values_NV.shape
    on_cpu = student.values_NV.device.type == "cpu"
    size = max(1, min(num_rows, (CPU_BLOCK if on_cpu else GPU_BLOCK) // vocab_size))
    # All that a block computes in, once for all blocks: memory of this size comes from the system
    # anew each time, page by page, which takes a CPU longer than the arithmetic.
    sides = [side.values_NV.dtype for side in (student, teacher) if side is not None]
    widened = any(dtype != asked.temperature_N.dtype for dtype in sides)
    scratch = [asked.temperature_N.new_empty(size, vocab_size) for _ in range(5 if widened else 3)]
    statistics: list[TokenStatistics] = []
    found: list[DivergenceStats] = []
    for start in range(0, max(1, num_rows), size):
        end = min(start + size, num_rows)
        here, there = _block_in_torch(
            replace(student, values_NV=student.values_NV[start:end]),
            None if teacher is None else replace(teacher, values_NV=teacher.values_NV[start:end]),
            asked,
            slice(rows.start + start, rows.start + end),
            [room_NV[: end - start] for room_NV in scratch],
        )
        statistics.append(here)
        found += [] if there is None else [there]
    return concatenate_fields(statistics), concatenate_fields(found) if found else None


def _block_in_torch(
    student: RawLogits,
    teacher: RawLogits | None,
    asked: HeadLossSpec,
    rows: slice,
    scratch: list[Tensor],
) -> tuple[TokenStatistics, DivergenceStats | None]:
    temperature_N, ids_N = asked.temperature_N[rows], asked.ids_N[rows]
    student_NV, slope_NV = _scaled(student, temperature_N, scratch[-2])
    teacher_NV = None if teacher is None else _scaled(teacher, temperature_N, scratch[-1])[0]
    block, statistics = open_block(student_NV, teacher_NV, ids_N, scratch[:3])
    # From gradients by logits / temperature to gradients by what the matrix product gave.
    factor_N = student.scale / temperature_N
    coefficient_N = asked.coefficient(rows, statistics)
    if coefficient_N is not None:
        coefficient_N = coefficient_N.to(factor_N.dtype) * factor_N
    pull_N = torch.zeros_like(factor_N) if coefficient_N is None else coefficient_N
    found = None
    if asked.divergence is None or asked.weight_N is None:
        sampled_token_gradient(block, pull_N)
    else:
        gradient = support_gradient if asked.divergence.support else full_vocabulary_gradient
        weight_N = asked.weight_N[rows] * factor_N
        found = gradient(block, statistics, asked.divergence, weight_N=weight_N, pull_N=pull_N)
    if coefficient_N is not None:
        block.logp_NV.scatter_add_(-1, ids_N[:, None], coefficient_N[:, None])
    if slope_NV is not None:
        block.logp_NV.mul_(slope_NV)
    if block.logp_NV.data_ptr() != student.values_NV.data_ptr():
        student.values_NV.copy_(block.logp_NV)
    return statistics, found


def _scaled(raw: RawLogits, temperature_N: Tensor, room_NV: Tensor) -> tuple[Tensor, Tensor | None]:
    """(logits over temperature, in place where they have its dtype already and in `room_NV` where
    not; the slope of the cap)."""
    values_NV = raw.values_NV
    if values_NV.dtype != temperature_N.dtype:
        values_NV = room_NV.copy_(values_NV)
    if raw.softcap is None:
        factor_N = raw.scale / temperature_N
        if bool((factor_N != 1).any()):
            values_NV.mul_(factor_N[:, None])
        return values_NV, None
    share_NV = values_NV.mul_(raw.scale / raw.softcap).tanh_()
    slope_NV = 1 - share_NV.square()
    return share_NV.mul_((raw.softcap / temperature_N)[:, None]), slope_NV


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyBlock:
    """A few rows at hand. All of it is overwritten on the way."""

    logp_NV: Tensor
    """In the end the gradient."""
    p_NV: Tensor
    logq_NV: Tensor | None
    q_NV: Tensor | None
    """The teacher's two are None where there is no teacher."""
    room_NV: Tensor

    def dot(self, first_NV: Tensor, second_NV: Tensor) -> Tensor:
        """Σ over the words."""
        return torch.mul(first_NV, second_NV, out=self.room_NV).sum(-1)


def open_block(
    student_NV: Tensor, teacher_NV: Tensor | None, ids_N: Tensor, scratch: list[Tensor]
) -> tuple[VocabularyBlock, TokenStatistics]:
    """From logits over temperature, float32 or better, which are overwritten. `scratch`: room for
    three more of them."""
    block = VocabularyBlock(
        logp_NV=torch.log_softmax(student_NV, -1, out=student_NV),
        p_NV=torch.exp(student_NV, out=scratch[0]),
        logq_NV=None if teacher_NV is None else torch.log_softmax(teacher_NV, -1, out=teacher_NV),
        q_NV=None if teacher_NV is None else torch.exp(teacher_NV, out=scratch[1]),
        room_NV=scratch[2],
    )
    logp_N = _of(block.logp_NV, ids_N)
    negative_N = block.dot(block.p_NV, block.logp_NV)
    if block.logq_NV is None or block.q_NV is None:
        return block, TokenStatistics(student_logp_N=logp_N, student_entropy_N=-negative_N)
    return block, TokenStatistics(
        student_logp_N=logp_N,
        student_entropy_N=-negative_N,
        teacher_logp_N=_of(block.logq_NV, ids_N),
        teacher_entropy_N=-block.dot(block.q_NV, block.logq_NV),
        reverse_kl_N=negative_N - block.dot(block.p_NV, block.logq_NV),
    )


def full_vocabulary_gradient(
    block: VocabularyBlock,
    statistics: TokenStatistics,
    divergence: DivergenceSpec,
    *,
    weight_N: Tensor,
    pull_N: Tensor,
) -> DivergenceStats:
    """`block.logp_NV` becomes weight·g − pull·π."""
    assert block.logq_NV is not None and block.q_NV is not None
    assert statistics.reverse_kl_N is not None
    divergence = divergence.without_ends()
    if divergence.name == "reverse_kl":
        value_N = centre_N = statistics.reverse_kl_N
        block.logp_NV.sub_(block.logq_NV)
        _weighted(block, weight_N, centre_N, pull_N)
    elif divergence.name == "forward_kl":
        assert statistics.teacher_entropy_N is not None
        value_N = -statistics.teacher_entropy_N - block.dot(block.q_NV, block.logp_NV)
        torch.mul(block.p_NV, (weight_N - pull_N)[:, None], out=block.logp_NV)
        block.logp_NV.addcmul_(block.q_NV, -weight_N[:, None])
    else:
        value_N = _mixture_gradient(block, divergence, weight_N, pull_N)
    _leave_out(block, weight_N, pull_N)
    return DivergenceStats(value_N=value_N.masked_fill(weight_N == 0, 0.0))


def _mixture_gradient(
    block: VocabularyBlock, divergence: DivergenceSpec, weight_N: Tensor, pull_N: Tensor
) -> Tensor:
    logp_NV, logq_NV, q_NV = block.logp_NV, block.logq_NV, block.q_NV
    assert logq_NV is not None and q_NV is not None
    if divergence.is_zero:
        torch.mul(block.p_NV, -pull_N[:, None], out=logp_NV)
        return torch.zeros_like(weight_N)
    first, second = log_mixture_weights(divergence)
    # From here on log(share·π) and log(share·q), so that M is their plain sum.
    logp_NV.add_(first)
    logq_NV.add_(second)
    mixture_NV = torch.logaddexp(logp_NV, logq_NV, out=block.room_NV)
    logp_NV.sub_(mixture_NV)
    if divergence.name == "skew_reverse_kl":
        value_N = block.dot(block.p_NV, logp_NV) - first
        logp_NV.sub_(torch.exp(logp_NV, out=block.room_NV))
        _weighted(block, weight_N, block.dot(block.p_NV, logp_NV), pull_N)
        return value_N
    logq_NV.sub_(mixture_NV)
    from_teacher_N = block.dot(q_NV, logq_NV) - second
    if divergence.name == "skew_forward_kl":
        weighed_NV = logp_NV.exp_().mul_(q_NV)
        pull_N = pull_N - weight_N * weighed_NV.sum(-1)
        weighed_NV.mul_(-weight_N[:, None]).addcmul_(block.p_NV, -pull_N[:, None])
        return from_teacher_N
    assert divergence.beta is not None
    centre_N = block.dot(block.p_NV, logp_NV)
    _weighted(block, weight_N * (1 - divergence.beta), centre_N, pull_N)
    return divergence.beta * from_teacher_N + (1 - divergence.beta) * (centre_N - first)


def log_mixture_weights(divergence: DivergenceSpec) -> tuple[float, float]:
    """(log of the student's share of the mixture, log of the teacher's)."""
    share = divergence.beta if divergence.name == "jsd" else divergence.alpha
    assert share is not None and 0 < share < 1
    shares = math.log(share), math.log1p(-share)
    return shares if divergence.name == "skew_reverse_kl" else (shares[1], shares[0])


def _weighted(block: VocabularyBlock, weight_N: Tensor, centre_N: Tensor, pull_N: Tensor) -> None:
    """`logp_NV` holds z: it becomes π·(weight·(z − centre) − pull)."""
    block.logp_NV.mul_(weight_N[:, None]).sub_((weight_N * centre_N + pull_N)[:, None])
    block.logp_NV.mul_(block.p_NV)


def _leave_out(block: VocabularyBlock, weight_N: Tensor, pull_N: Tensor) -> None:
    """Rows without weight again, without their teacher: 0 · NaN is NaN."""
    off_N = weight_N == 0
    if bool(off_N.any()):
        block.logp_NV[off_N] = block.p_NV[off_N] * -pull_N[off_N, None]


# ── a support of a few words ─────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class SupportGradient:
    """A divergence on a support, and its gradient by the student's log-probs there."""

    found: DivergenceStats
    ids_NK: Tensor
    gradient_NK: Tensor
    """h, weighted; 0 on words that are listed twice."""


def select_support(
    student_NV: Tensor, teacher_NV: Tensor, support: Support
) -> tuple[Tensor, Tensor, Tensor]:
    """(ids_NK, keep_NK, overlap_N): as `top_k_ids` and `overlap`, each side sorted only once.

    From anything that orders the words as the log-probs do.
    """
    check_support_size(support.k, student_NV.shape[-1])
    student_NK, teacher_NK = (
        values_NV.topk(support.k, dim=-1).indices for values_NV in (student_NV, teacher_NV)
    )
    return combine_supports(student_NK, teacher_NK, support)


def check_support_size(k: int, vocab_size: int) -> None:
    if k > vocab_size:
        raise ValueError(f"k = {k}: the vocabulary has {vocab_size} words only")


def combine_supports(
    student_NK: Tensor, teacher_NK: Tensor, support: Support
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, from the likeliest words of each side."""
    shared_NK = (student_NK.unsqueeze(-1) == teacher_NK.unsqueeze(-2)).any(-1)
    all_NK = torch.ones_like(shared_NK)
    share_N = shared_NK.sum(-1) / support.k
    if support.of == "joint":
        ids_NK = torch.cat([teacher_NK, student_NK], dim=-1)
        return ids_NK, torch.cat([all_NK, ~shared_NK], dim=-1), share_N
    return (teacher_NK if support.of == "teacher" else student_NK), all_NK, share_N


def support_divergence(
    logp_NK: Tensor,
    logq_NK: Tensor,
    picked: tuple[Tensor, Tensor, Tensor],
    divergence: DivergenceSpec,
    weight_N: Tensor,
) -> SupportGradient:
    """`picked` is what `select_support` gave; log-probs are over the whole vocabulary."""
    ids_NK, keep_NK, overlap_N = picked
    support = divergence.support
    assert support is not None
    on_N = weight_N != 0
    # Rows without weight may hold a teacher of NaN; their place is taken by the student itself.
    safe_NK = torch.where(on_N[:, None], logq_NK, logp_NK)
    if divergence.name == "reverse_kl" and support.form == "tail" and support.clip is None:
        value_N, gradient_NK = reverse_kl_with_tail(logp_NK, safe_NK, keep_NK)
        gradient_NK = gradient_NK * weight_N[:, None]
    else:
        value_N, gradient_NK = _by_autograd(logp_NK, safe_NK, keep_NK, divergence, weight_N)
    found = DivergenceStats(
        value_N=value_N.masked_fill(~on_N, 0.0),
        student_mass_N=support_mass(logp_NK, keep_NK),
        teacher_mass_N=support_mass(logq_NK, keep_NK),
        overlap_N=overlap_N.to(logp_NK.dtype),
    )
    return SupportGradient(found=found, ids_NK=ids_NK, gradient_NK=gradient_NK)


def reverse_kl_with_tail(
    logp_NK: Tensor, logq_NK: Tensor, keep_NK: Tensor
) -> tuple[Tensor, Tensor]:
    """(value, ∂value/∂log π): what `top_k_divergence` and autograd give, in a quarter of the
    operations, each of which is a launch. Of the words h = π·(log(π/q) − log(π_tail/q_tail))."""
    p_NK, q_NK = (x.exp().masked_fill(~keep_NK, 0.0) for x in (logp_NK, logq_NK))
    floor = 8 * torch.finfo(logp_NK.dtype).eps  # as `top_k` has it: below, 1 − Σ_S is rounding
    tail_N1, other_N1 = ((1 - x.sum(-1, keepdim=True)).clamp(min=floor) for x in (p_NK, q_NK))
    gap_NK = (logp_NK - logq_NK).masked_fill(p_NK == 0, 0.0)
    gap_N1 = tail_N1.log() - other_N1.log()
    value_N = _dot(p_NK, gap_NK) + (tail_N1 * gap_N1).squeeze(-1)
    return value_N, p_NK * (gap_NK - gap_N1)


def _by_autograd(
    logp_NK: Tensor, logq_NK: Tensor, keep_NK: Tensor, divergence: DivergenceSpec, weight_N: Tensor
) -> tuple[Tensor, Tensor]:
    """(value, weighted gradient by log π) of any divergence in any form."""
    support = divergence.support
    assert support is not None
    leaf_NK = logp_NK.detach().requires_grad_()
    with torch.enable_grad():
        value_N = top_k_divergence(
            leaf_NK,
            logq_NK,
            keep_NK,
            name=divergence.name,
            form=support.form,
            beta=divergence.beta,
            alpha=divergence.alpha,
            clip=support.clip,
        )
    (gradient_NK,) = torch.autograd.grad(value_N, leaf_NK, weight_N.to(value_N.dtype))
    return value_N.detach(), gradient_NK


def support_gradient(
    block: VocabularyBlock,
    statistics: TokenStatistics,
    divergence: DivergenceSpec,
    *,
    weight_N: Tensor,
    pull_N: Tensor,
) -> DivergenceStats:
    """`block.logp_NV` becomes h − π·(Σ_S h + pull), h weighted."""
    assert block.logq_NV is not None and divergence.support is not None
    picked = select_support(block.logp_NV, block.logq_NV, divergence.support)
    ids_NK = picked[0]
    here = support_divergence(
        block.logp_NV.gather(-1, ids_NK),
        block.logq_NV.gather(-1, ids_NK),
        picked,
        divergence,
        weight_N,
    )
    sampled_token_gradient(block, pull_N + here.gradient_NK.sum(-1))
    block.logp_NV.scatter_add_(-1, ids_NK, here.gradient_NK)
    return here.found


def sampled_token_gradient(block: VocabularyBlock, pull_N: Tensor) -> None:
    """`block.logp_NV` becomes −pull·π."""
    torch.mul(block.p_NV, -pull_N[:, None], out=block.logp_NV)


def _dot(first_NV: Tensor, second_NV: Tensor) -> Tensor:
    dot_N: Tensor = torch.linalg.vecdot(first_NV, second_NV)
    return dot_N


def _of(values_NV: Tensor, ids_N: Tensor) -> Tensor:
    return values_NV.gather(-1, ids_N[:, None]).squeeze(-1)
