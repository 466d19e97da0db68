"""Loss and gradient from a chunk of logits in torch: any divergence, on any device.

With x = logits / temperature and h = ∂L/∂log π, ∂L/∂x = h − π·Σ_u h_u; the sampled token y with
∂L/∂log π_y = c adds c·(1[v = y] − π). A divergence with a closed form (`closed_forms`) is computed
in place; any other has h from autograd, with the log-probs of a block of rows (or of their top-k
support, [N, K]) as the leaf.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from courtside.losses.fused.closed_forms import (
    CLOSED_FORMS,
    VocabularyBlock,
    as_closed_form,
    reverse_kl_with_tail,
)
from courtside.losses.fused.types import (
    DivergenceSpec,
    DivergenceStats,
    HeadLossSpec,
    RawLogits,
    TeacherLogits,
    TokenStatistics,
    TopKTarget,
    concatenate_rows,
)
from courtside.losses.top_k import check_top_k, combine_top_k, support_mass

CPU_BLOCK, GPU_BLOCK = 2**20, 2**25
"""Elements of one block: on a CPU what its caches hold, so that many passes over it cost little."""

RowStats = tuple[TokenStatistics, DivergenceStats | None]


def vocabulary_pass_torch(
    student: RawLogits, teacher: TeacherLogits | TopKTarget | None, spec: HeadLossSpec, rows: slice
) -> RowStats:
    """Statistics and divergence of `rows`; the student's logits are replaced by the gradient."""
    parts: Iterable[tuple[slice, RawLogits | TopKTarget | None]]
    if teacher is None or isinstance(teacher, TopKTarget):
        parts = [(rows, teacher and teacher.select_rows(rows))]
    else:
        parts = teacher
    stats = [
        block_stats
        for part, target in parts
        for block_stats in _pass_in_blocks(
            student.select_rows(slice(part.start - rows.start, part.stop - rows.start)),
            target, spec, part,
        )
    ]  # fmt: skip
    divergences = [divergence for _, divergence in stats if divergence is not None]
    return (
        concatenate_rows([statistics for statistics, _ in stats]),
        concatenate_rows(divergences) if divergences else None,
    )


def _pass_in_blocks(
    student: RawLogits, target: RawLogits | TopKTarget | None, spec: HeadLossSpec, rows: slice
) -> Iterator[RowStats]:
    num_rows, vocab_size = student.values_NV.shape
    on_cpu = student.values_NV.device.type == "cpu"
    size = max(1, min(num_rows, (CPU_BLOCK if on_cpu else GPU_BLOCK) // vocab_size))
    # Scratch memory once for all blocks: memory of this size comes from the system page by page,
    # which takes a CPU longer than the arithmetic. Two more where logits are upcast.
    raw = [side.values_NV for side in (student, target) if isinstance(side, RawLogits)]
    is_upcast = any(values_NV.dtype != spec.temperature_N.dtype for values_NV in raw)
    scratch = [spec.temperature_N.new_empty(size, vocab_size) for _ in range(5 if is_upcast else 3)]
    for start in range(0, max(1, num_rows), size):
        block = slice(start, min(start + size, num_rows))
        yield _pass_block(
            student.select_rows(block),
            None if target is None else target.select_rows(block),
            spec,
            slice(rows.start + block.start, rows.start + block.stop),
            [scratch_NV[: block.stop - block.start] for scratch_NV in scratch],
        )


def _pass_block(
    student: RawLogits,
    target: RawLogits | TopKTarget | None,
    spec: HeadLossSpec,
    rows: slice,
    scratch: list[Tensor],
) -> RowStats:
    temperature_N, ids_N = spec.temperature_N[rows], spec.ids_N[rows]
    student_NV, slope_NV = _scale_logits(student, temperature_N, scratch[-2])
    teacher_NV = None
    if isinstance(target, RawLogits):
        teacher_NV, _ = _scale_logits(target, temperature_N, scratch[-1])
    block, statistics = open_block(student_NV, teacher_NV, ids_N, scratch[:3])
    # From gradients by logits / temperature to gradients by the output of the matmul.
    factor_N = student.scale / temperature_N
    coefficient_N = spec.coefficient(rows, statistics)
    if coefficient_N is not None:
        coefficient_N = coefficient_N.to(factor_N.dtype) * factor_N
    pull_N = torch.zeros_like(factor_N) if coefficient_N is None else coefficient_N
    stats = None
    if spec.divergence is None or spec.weight_N is None:
        torch.mul(block.p_NV, -pull_N[:, None], out=block.logp_NV)
    else:
        weight_N = spec.weight_N[rows] * factor_N
        if spec.divergence.support is not None:
            top_k = target if isinstance(target, TopKTarget) else None
            stats = _support_gradient(block, top_k, spec.divergence, weight_N, pull_N)
        else:
            value_N = _full_gradient(block, statistics, spec.divergence, weight_N, pull_N)
            stats = DivergenceStats(value_N=value_N.masked_fill(weight_N == 0, 0.0))
    if coefficient_N is not None:
        block.logp_NV.scatter_add_(-1, ids_N[:, None], coefficient_N[:, None])
    if slope_NV is not None:
        block.logp_NV.mul_(slope_NV)
    if block.logp_NV.data_ptr() != student.values_NV.data_ptr():
        student.values_NV.copy_(block.logp_NV)
    return statistics, stats


def _scale_logits(
    raw: RawLogits, temperature_N: Tensor, scratch_NV: Tensor
) -> tuple[Tensor, Tensor | None]:
    """(logits over temperature, in place where they have its dtype already and in `scratch_NV`
    where not; the slope of the softcap)."""
    values_NV = raw.values_NV
    if values_NV.dtype != temperature_N.dtype:
        values_NV = scratch_NV.copy_(values_NV)
    if raw.softcap is None:
        factor_N = raw.scale / temperature_N
        if bool((factor_N != 1).any()):
            values_NV.mul_(factor_N[:, None])
        return values_NV, None
    tanh_NV = values_NV.mul_(raw.scale / raw.softcap).tanh_()
    slope_NV = 1 - tanh_NV.square()
    return tanh_NV.mul_((raw.softcap / temperature_N)[:, None]), slope_NV


def open_block(
    student_NV: Tensor, teacher_NV: Tensor | None, ids_N: Tensor, scratch: list[Tensor]
) -> tuple[VocabularyBlock, TokenStatistics]:
    """From logits over temperature in float32 or better, which are overwritten, and three scratch
    tensors of their shape."""
    block = VocabularyBlock(
        logp_NV=torch.log_softmax(student_NV, -1, out=student_NV),
        p_NV=torch.exp(student_NV, out=scratch[0]),
        logq_NV=None if teacher_NV is None else torch.log_softmax(teacher_NV, -1, out=teacher_NV),
        q_NV=None if teacher_NV is None else torch.exp(teacher_NV, out=scratch[1]),
        scratch_NV=scratch[2],
    )
    logp_N = _gather(block.logp_NV, ids_N)
    negative_N = block.dot(block.p_NV, block.logp_NV)
    if block.logq_NV is None or block.q_NV is None:
        return block, TokenStatistics(student_logp_N=logp_N, student_entropy_N=-negative_N)
    return block, TokenStatistics(
        student_logp_N=logp_N,
        student_entropy_N=-negative_N,
        teacher_logp_N=_gather(block.logq_NV, ids_N),
        teacher_entropy_N=-block.dot(block.q_NV, block.logq_NV),
        reverse_kl_N=negative_N - block.dot(block.p_NV, block.logq_NV),
    )


def _gather(values_NV: Tensor, ids_N: Tensor) -> Tensor:
    return values_NV.gather(-1, ids_N[:, None]).squeeze(-1)


# ── gradients: `block.logp_NV` becomes h − π·(Σ h + pull), with h weighted ───────────────────────


def _full_gradient(
    block: VocabularyBlock,
    statistics: TokenStatistics,
    divergence: DivergenceSpec,
    weight_N: Tensor,
    pull_N: Tensor,
) -> Tensor:
    assert block.logq_NV is not None
    closed = as_closed_form(divergence)
    if closed is not None:
        value_N = CLOSED_FORMS[closed.name](block, statistics, closed, weight_N, pull_N)
        off_N = weight_N == 0
        if bool(off_N.any()):  # Without their teacher: 0 · NaN is NaN.
            block.logp_NV[off_N] = block.p_NV[off_N] * -pull_N[off_N, None]
        return value_N
    value_N, gradient_NV = differentiate(block.logp_NV, block.logq_NV, None, divergence, weight_N)
    torch.mul(block.p_NV, -(pull_N + gradient_NV.sum(-1))[:, None], out=block.logp_NV)
    block.logp_NV.add_(gradient_NV)
    return value_N


def _support_gradient(
    block: VocabularyBlock,
    target: TopKTarget | None,
    divergence: DivergenceSpec,
    weight_N: Tensor,
    pull_N: Tensor,
) -> DivergenceStats:
    support = divergence.support
    assert support is not None
    check_top_k(support.k, block.logp_NV.shape[-1])
    student_NK = block.logp_NV.topk(support.k, dim=-1).indices
    if target is None:
        assert block.logq_NV is not None
        teacher_NK = block.logq_NV.topk(support.k, dim=-1).indices
    else:
        teacher_NK = target.ids_NK[:, : support.k]
    ids_NK, keep_NK, overlap_N = combine_top_k(student_NK, teacher_NK, support.of)
    if target is None:
        assert block.logq_NV is not None
        logq_NK = block.logq_NV.gather(-1, ids_NK)
    else:
        logq_NK = target.logp_NK[:, : support.k].to(block.logp_NV.dtype)
    stats, gradient_NK = support_divergence(
        block.logp_NV.gather(-1, ids_NK), logq_NK, keep_NK, divergence, weight_N, overlap_N
    )
    torch.mul(block.p_NV, -(pull_N + gradient_NK.sum(-1))[:, None], out=block.logp_NV)
    block.logp_NV.scatter_add_(-1, ids_NK, gradient_NK)
    return stats


def support_divergence(
    logp_NK: Tensor,
    logq_NK: Tensor,
    keep_NK: Tensor,
    divergence: DivergenceSpec,
    weight_N: Tensor,
    overlap_N: Tensor,
) -> tuple[DivergenceStats, Tensor]:
    """(statistics, h_NK weighted) from log-probs normalized over the whole vocabulary; h is 0 on
    tokens that a joint support lists twice."""
    support = divergence.support
    assert support is not None
    if (divergence.name, support.form, divergence.clip) == ("reverse_kl", "tail", None):
        safe_NK = torch.where((weight_N != 0)[:, None], logq_NK, logp_NK)
        value_N, gradient_NK = reverse_kl_with_tail(logp_NK, safe_NK, keep_NK)
        gradient_NK = gradient_NK * weight_N[:, None]
    else:
        value_N, gradient_NK = differentiate(logp_NK, logq_NK, keep_NK, divergence, weight_N)
    stats = DivergenceStats(
        value_N=value_N.masked_fill(weight_N == 0, 0.0),
        student_mass_N=support_mass(logp_NK, keep_NK),
        teacher_mass_N=support_mass(logq_NK, keep_NK),
        overlap_N=overlap_N.to(logp_NK.dtype),
    )
    return stats, gradient_NK


def differentiate(
    logp_NV: Tensor,
    logq_NV: Tensor,
    keep_NV: Tensor | None,
    divergence: DivergenceSpec,
    weight_N: Tensor,
) -> tuple[Tensor, Tensor]:
    """(value, h weighted) of any divergence, by autograd."""
    # Rows without weight may have a teacher of NaN; the student itself takes its place.
    logq_NV = torch.where((weight_N != 0)[:, None], logq_NV, logp_NV)
    leaf_NV = logp_NV.detach().clone().requires_grad_()
    with torch.enable_grad():
        value_N = divergence.value(leaf_NV, logq_NV, keep_NV)
    (gradient_NV,) = torch.autograd.grad(value_N, leaf_NV, weight_N.to(value_N.dtype))
    return value_N.detach(), gradient_NV
