"""Loss and gradient from a chunk of logits in torch: any divergence, on any device.

With x = logits / temperature and h = ∂L/∂log π, the gradient is g_v = ∂L/∂x_v = h_v − π_v·Σ_u h_u
(π student, q teacher); the sampled token y with ∂L/∂log π_y = c adds c·(1[v = y] − π). Divergences
over the whole vocabulary that are computed in place, in closed form; sums are over the vocabulary:

- reverse KL: g = π·(log(π/q) − KL(π‖q))
- forward KL: g = π − q
- JSD, M = β·q + (1 − β)·π: g = (1 − β)·π·(log(π/M) − KL(π‖M)); the derivatives of M cancel
- skewed reverse, M = α·π + (1 − α)·q: g = π·(z − Σ_u π_u·z_u), z = log(π/M) − α·π/M
- skewed forward, M = α·q + (1 − α)·π, b = (1 − α)·π/M ≤ 1: g = π·Σ_u q_u·b_u − q·b

Any other divergence, and any cap on terms, has h from autograd, with the log-probs of a block of
rows as the leaf. On a top-k support (`support_gradient.py`) tokens outside S have no h of their
own: g = π·(h_tail/π_tail − Σ_S h − h_tail).

A logit may be −inf: a token that a model excludes, such as padding of its vocabulary. What both
sides exclude adds nothing; where one side only makes the divergence infinite, it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from courtside.losses.fused.support_gradient import differentiate_on_support
from courtside.losses.fused.types import (
    DivergenceSpec,
    DivergenceStats,
    HeadLossSpec,
    RawLogits,
    RowStats,
    TokenStatistics,
    TopKTarget,
)
from courtside.losses.top_k import (
    check_top_k,
    combine_top_k,
    tail_logp,
    tail_logp_from_support,
)

CPU_BLOCK, GPU_BLOCK = 2**20, 2**25
"""Elements of one block: on a CPU what its caches hold, so that many passes over it cost little."""
EXCLUDED = -1e30
"""The student's log-prob of a token that both sides exclude: its exponential is 0."""
SMALLEST_SUM = 2.0**-100
"""Below this, terms of a sum of probabilities may be missing: they have underflowed."""


class TorchVocabularyPass:
    def __init__(
        self,
        student: RawLogits,
        spec: HeadLossSpec,
        rows: slice,
        *,
        block_elements: int | None = None,
    ):
        self.student, self.spec, self.start = student, spec, rows.start
        on_cpu = student.values_NV.device.type == "cpu"
        self.block_elements = block_elements or (CPU_BLOCK if on_cpu else GPU_BLOCK)
        self.results: list[RowStats] = []

    def run_part(self, rows: slice, target: RawLogits | TopKTarget | None) -> None:
        """In blocks of a few rows."""
        values_NV, temperature_N = self.student.values_NV, self.spec.temperature_N
        num_rows, vocab_size = rows.stop - rows.start, values_NV.shape[1]
        size = max(1, min(num_rows, self.block_elements // vocab_size))
        # Scratch memory once for all blocks: memory of this size comes from the system page by
        # page, which takes a CPU longer than the arithmetic. Two more where logits are upcast.
        raw = [side.values_NV for side in (self.student, target) if isinstance(side, RawLogits)]
        is_upcast = any(side_NV.dtype != temperature_N.dtype for side_NV in raw)
        scratch = [temperature_N.new_empty(size, vocab_size) for _ in range(5 if is_upcast else 3)]
        for first in range(0, max(1, num_rows), size):
            last = min(first + size, num_rows)
            block = slice(rows.start + first, rows.start + last)
            student = self.student[block.start - self.start : block.stop - self.start]
            block_target = None if target is None else target[first:last]
            block_scratch = [scratch_NV[: last - first] for scratch_NV in scratch]
            self.results.append(_pass_block(student, block_target, self.spec, block, block_scratch))

    def finish(self) -> list[RowStats]:
        return self.results


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
    block, statistics = _open_block(student_NV, teacher_NV, ids_N, scratch[:3])
    # From gradients by logits / temperature to gradients by the output of the matmul.
    factor_N = student.scale / temperature_N
    pull_N = torch.zeros_like(factor_N)
    if spec.sampled:
        pull_N = spec.coefficient(rows, statistics).to(factor_N.dtype) * factor_N
    stats = None
    if spec.divergence is None or spec.weight_N is None:
        torch.mul(block.p_NV, -pull_N[:, None], out=block.logp_NV)
    else:
        weight_N = spec.weight_N[rows] * factor_N
        if spec.divergence.support is not None:
            top_k = target if isinstance(target, TopKTarget) else None
            stats = _set_support_gradient(block, top_k, spec.divergence, weight_N, pull_N)
        else:
            value_N = _set_gradient(block, statistics, spec.divergence, weight_N, pull_N)
            stats = DivergenceStats(value_N=value_N.masked_fill(weight_N == 0, 0.0))
    if spec.sampled:
        block.logp_NV.scatter_add_(-1, ids_N[:, None], pull_N[:, None])
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


@dataclass(slots=True, kw_only=True)
class VocabularyBlock:
    """Log-probs and probabilities of a few rows, all of which are overwritten on the way."""

    logp_NV: Tensor
    """Becomes the gradient by logits / temperature."""
    p_NV: Tensor
    logq_NV: Tensor | None
    q_NV: Tensor | None
    """The teacher's two are None where there is no teacher."""
    scratch_NV: Tensor
    has_excluded: bool = False
    """Whether a log-prob may be −inf: seen when a sum over the vocabulary is NaN."""

    def dot(self, first_NV: Tensor, second_NV: Tensor) -> Tensor:
        """Σ over the vocabulary; a factor of 0 in `first_NV` gives 0, also against −inf."""
        sum_N = torch.mul(first_NV, second_NV, out=self.scratch_NV).sum(-1)
        if bool(sum_N.isnan().any()):
            self.has_excluded = True
            sum_N = self.scratch_NV.masked_fill_(first_NV == 0, 0.0).sum(-1)
        return sum_N

    def fill_excluded(self) -> None:
        """The student gets a finite log-prob for tokens that both sides exclude: −inf − (−inf) is
        NaN."""
        assert self.logq_NV is not None
        if not self.has_excluded:
            return
        excluded_NV = (self.logp_NV == -math.inf) & (self.logq_NV == -math.inf)
        self.logp_NV.masked_fill_(excluded_NV, EXCLUDED)

    def set_centered(self, weight_N: Tensor, center_N: Tensor, pull_N: Tensor) -> None:
        """`logp_NV` holds z: it becomes π·(weight·(z − center) − pull)."""
        if self.has_excluded:
            self.logp_NV.masked_fill_(self.p_NV == 0, 0.0)  # 0 · −inf is NaN
        self.logp_NV.mul_(weight_N[:, None]).sub_((weight_N * center_N + pull_N)[:, None])
        self.logp_NV.mul_(self.p_NV)


def _open_block(
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
    logp_N = block.logp_NV.gather(-1, ids_N[:, None]).squeeze(-1)
    negative_N = block.dot(block.p_NV, block.logp_NV)
    if block.logq_NV is None or block.q_NV is None:
        return block, TokenStatistics(student_logp_N=logp_N, student_entropy_N=-negative_N)
    statistics = TokenStatistics(
        student_logp_N=logp_N,
        student_entropy_N=-negative_N,
        teacher_logp_N=block.logq_NV.gather(-1, ids_N[:, None]).squeeze(-1),
        teacher_entropy_N=-block.dot(block.q_NV, block.logq_NV),
        reverse_kl_N=negative_N - block.dot(block.p_NV, block.logq_NV),
    )
    block.fill_excluded()
    return block, statistics


# ── gradients: `block.logp_NV` becomes h − π·(Σ h + pull), with h weighted ───────────────────────


def _set_gradient(
    block: VocabularyBlock, statistics: TokenStatistics, divergence: DivergenceSpec,
    weight_N: Tensor, pull_N: Tensor,
) -> Tensor:  # fmt: skip
    """Returns the value of the divergence."""
    assert block.logq_NV is not None
    name = divergence.closed_form
    if name is not None:
        value_N = CLOSED_FORM_GRADIENTS[name](block, statistics, divergence, weight_N, pull_N)
        off_N = weight_N == 0
        if bool(off_N.any()):  # Without their teacher: 0 · NaN is NaN.
            block.logp_NV[off_N] = block.p_NV[off_N] * -pull_N[off_N, None]
        return value_N
    value_N, gradient_NV = _differentiate(block.logp_NV, block.logq_NV, divergence, weight_N)
    torch.mul(block.p_NV, -(pull_N + gradient_NV.sum(-1))[:, None], out=block.logp_NV)
    block.logp_NV.add_(gradient_NV)
    return value_N


def _set_reverse_kl(
    block: VocabularyBlock, statistics: TokenStatistics, _: DivergenceSpec, weight_N: Tensor,
    pull_N: Tensor,
) -> Tensor:  # fmt: skip
    assert block.logq_NV is not None and statistics.reverse_kl_N is not None
    block.logp_NV.sub_(block.logq_NV)
    block.set_centered(weight_N, statistics.reverse_kl_N, pull_N)
    return statistics.reverse_kl_N


def _set_forward_kl(
    block: VocabularyBlock, statistics: TokenStatistics, _: DivergenceSpec, weight_N: Tensor,
    pull_N: Tensor,
) -> Tensor:  # fmt: skip
    assert block.q_NV is not None and statistics.teacher_entropy_N is not None
    value_N = -statistics.teacher_entropy_N - block.dot(block.q_NV, block.logp_NV)
    torch.mul(block.p_NV, (weight_N - pull_N)[:, None], out=block.logp_NV)
    block.logp_NV.addcmul_(block.q_NV, -weight_N[:, None])
    return value_N


def _set_mixture(
    block: VocabularyBlock, _: TokenStatistics, divergence: DivergenceSpec, weight_N: Tensor,
    pull_N: Tensor,
) -> Tensor:  # fmt: skip
    logp_NV, logq_NV, q_NV = block.logp_NV, block.logq_NV, block.q_NV
    assert logq_NV is not None and q_NV is not None
    student_share, teacher_share = divergence.log_mixture_shares
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


CLOSED_FORM_GRADIENTS: dict[
    str, Callable[[VocabularyBlock, TokenStatistics, DivergenceSpec, Tensor, Tensor], Tensor]
] = {
    "reverse_kl": _set_reverse_kl,
    "forward_kl": _set_forward_kl,
    "jsd": _set_mixture,
    "skew_forward_kl": _set_mixture,
    "skew_reverse_kl": _set_mixture,
}


def _differentiate(
    logp_NV: Tensor, logq_NV: Tensor, divergence: DivergenceSpec, weight_N: Tensor
) -> tuple[Tensor, Tensor]:
    """(value, h weighted) of any divergence over the whole vocabulary, by autograd."""
    # Rows without weight may have a teacher of NaN; the student itself takes its place.
    logq_NV = torch.where((weight_N != 0)[:, None], logq_NV, logp_NV)
    leaf_NV = logp_NV.detach().clone().requires_grad_()
    with torch.enable_grad():
        value_N = divergence.value(leaf_NV, logq_NV, None)
    (gradient_NV,) = torch.autograd.grad(value_N, leaf_NV, weight_N.to(value_N.dtype))
    return value_N.detach(), gradient_NV


# ── a top-k support ──────────────────────────────────────────────────────────────────────────────


def _set_support_gradient(
    block: VocabularyBlock, target: TopKTarget | None, divergence: DivergenceSpec,
    weight_N: Tensor, pull_N: Tensor,
) -> DivergenceStats:  # fmt: skip
    support = divergence.support
    assert support is not None
    check_top_k(support.k, block.logp_NV.shape[-1])
    overlap_N: Tensor | None
    if target is not None:
        # The student's tokens are those whose log-probs the teacher was asked for.
        teacher_NK = target.select(support.k, "teacher")[0]
        if support.of == "teacher":
            student_NK = block.logp_NV.topk(support.k, dim=-1).indices
        else:
            student_NK = target.select(support.k, "student")[0]
        ids_NK, keep_NK, overlap_N = combine_top_k(student_NK, teacher_NK, support.of)
        if target.num_teacher == 0:
            overlap_N = None
        logq_NK = target.select(support.k, support.of)[1].to(block.logp_NV.dtype)
    else:
        assert block.logq_NV is not None
        student_NK = block.logp_NV.topk(support.k, dim=-1).indices
        teacher_NK = block.logq_NV.topk(support.k, dim=-1).indices
        ids_NK, keep_NK, overlap_N = combine_top_k(student_NK, teacher_NK, support.of)
        logq_NK = block.logq_NV.gather(-1, ids_NK)
    logp_NK, tails = block.logp_NV.gather(-1, ids_NK), None
    if support.form == "tail":
        tail_N = _tail_logp(block.logp_NV, block.p_NV, ids_NK)
        if target is None:
            assert block.logq_NV is not None and block.q_NV is not None
            tails = tail_N, _tail_logp(block.logq_NV, block.q_NV, ids_NK)
        else:
            tails = tail_N, tail_logp_from_support(logq_NK.masked_fill(~keep_NK, -math.inf))
    stats, gradient = differentiate_on_support(
        logp_NK, logq_NK, keep_NK, divergence, weight_N, overlap_N, tails
    )
    inside_N = gradient.sum() + pull_N
    inside_NK = gradient.h_NK - inside_N[:, None] * logp_NK.exp()
    _pull_all(block, *gradient.outside(pull_N))
    # Set, and the first half last: a joint support lists the teacher's tokens first, with their h.
    for ids, half_NK in reversed(
        [*zip(*(x.split(support.k, -1) for x in (ids_NK, inside_NK)), strict=True)]
    ):
        block.logp_NV.scatter_(-1, ids, half_NK)
    return stats


def _tail_logp(logp_NV: Tensor, p_NV: Tensor, ids_NK: Tensor) -> Tensor:
    """`tail_logp` without another pass of exponentials, but where all of them are tiny."""
    p_NK = p_NV.gather(-1, ids_NK)
    mass_N = p_NV.scatter_(-1, ids_NK, 0.0).sum(-1)
    p_NV.scatter_(-1, ids_NK, p_NK)
    tail_N = mass_N.log()
    is_tiny_N = mass_N < SMALLEST_SUM
    if bool(is_tiny_N.any()):
        tail_N[is_tiny_N] = tail_logp(logp_NV[is_tiny_N], ids_NK[is_tiny_N])
    return tail_N


def _pull_all(block: VocabularyBlock, plain_N: Tensor, exponent_N: Tensor) -> None:
    """`block.logp_NV` becomes −π·plain·exp(exponent)."""
    scaled_N = exponent_N > 0
    scaled_MV = None
    if bool(scaled_N.any()):
        scaled_MV = block.logp_NV[scaled_N].add_(exponent_N[scaled_N, None]).exp_()
    torch.mul(block.p_NV, -plain_N[:, None], out=block.logp_NV)
    if scaled_MV is not None:
        block.logp_NV[scaled_N] = scaled_MV.mul_(-plain_N[scaled_N, None])
