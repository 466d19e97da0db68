"""A top-k support on a GPU: its tokens and tails while the logits exist, then the gradient.

The tokens are selected and the reverse KL is differentiated by `topk_kernels`, other divergences by
`support_gradient.py` on [N, K]. The run of the vocabulary's kernel for the gradient needs no
teacher's logits, and waits for all parts of the rows. A tail takes a run of `tail_kernel` a side.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from courtside.losses.fused.kernels import LN2, LOG2E
from courtside.losses.fused.support_gradient import differentiate_on_support
from courtside.losses.fused.tail_kernel import store_tails
from courtside.losses.fused.topk_kernels import (
    TopKBuffers,
    allocate_group_maxima,
    allocate_top_k,
    has_support_kernel,
    num_select_warps,
    reverse_kl_on_support,
    select_top_k,
    select_top_k_by_sorting,
)
from courtside.losses.fused.triton_launch import Launch, guard_launch
from courtside.losses.fused.types import (
    DivergenceSpec,
    DivergenceStats,
    RawLogits,
    TokenStatistics,
    TopKTarget,
)
from courtside.losses.top_k import check_top_k, combine_top_k, tail_logp_from_support


class SupportPass:
    """A divergence on a support: part by part what needs the teacher's logits, which are the
    statistics and the tokens that may be in the support; everything on those few tokens once for
    all rows of the chunk."""

    def __init__(
        self, chunk: Launch, divergence: DivergenceSpec, weight_N: Tensor, *, kernels: bool
    ):
        support, values_NV = divergence.support, chunk.student.values_NV
        assert support is not None
        check_top_k(support.k, values_NV.shape[1])
        self.divergence, self.support, self.weight_N = divergence, support, weight_N
        self.kernels = kernels
        self.num_warps: int | None = None
        """Of the selection kernel; None: `torch.topk` selects."""
        if kernels:
            self.num_warps = num_select_warps(
                values_NV.shape[1], support.k, least=chunk.tiling.num_warps, width=chunk.width
            )
        tiling = replace(chunk.tiling, num_warps=self.num_warps or chunk.tiling.num_warps)
        self.chunk = replace(chunk, tiling=tiling)
        self.student_top, self.teacher_top = (
            allocate_top_k(len(values_NV), support.k, values_NV.device) for _ in range(2)
        )

    def select(self, span: slice, target: RawLogits | TopKTarget) -> None:
        if isinstance(target, TopKTarget):
            self._select_given(span, target)
            return
        self.teacher, self.has_logits = target, True  # all parts share its scale and softcap
        launch, tiling = self.chunk.in_part(span, target), self.chunk.tiling
        sides = launch.student.values_NV, target.values_NV
        maxima = None
        if self.num_warps is not None:
            student_NG, teacher_NG = (
                allocate_group_maxima(values_NV, lanes=tiling.lanes, width=launch.width)
                for values_NV in sides
            )
            maxima = student_NG, teacher_NG
        launch.run(None, weight_N=self.weight_N[span], statistics=True, maxima=maxima)
        with guard_launch(sides[0].device):
            for i, top in enumerate((self.student_top.rows(span), self.teacher_top.rows(span))):
                if maxima is None:
                    select_top_k_by_sorting(sides[i], sides[1 - i], top)
                else:
                    select_top_k(
                        sides[i], sides[1 - i], maxima[i], top,
                        lanes=tiling.lanes, width=launch.width, num_warps=tiling.num_warps,
                    )  # fmt: skip
        if self.support.form == "tail":
            self._store_tails(launch, span, target)

    def _store_tails(self, launch: Launch, span: slice, target: RawLogits | None) -> None:
        """`target`: the teacher's logits; None: its tail is known."""
        tops = [top.rows(span) for top in self._listed_tokens()]
        is_students = [top is self.student_top for top in self._listed_tokens()]
        for side, prefix in ((launch.student, ""), (target, "teacher_")):
            if side is None:
                continue
            # Of each list the logits of this side, which are its own or the other's.
            support = [
                (top.ids_NK, top.logits_NK if is_student == (not prefix) else top.other_logits_NK)
                for top, is_student in zip(tops, is_students, strict=True)
            ]
            with guard_launch(side.values_NV.device):
                store_tails(
                    side, support, launch.temperature_N, launch.outputs, prefix=prefix,
                    lanes=launch.tiling.lanes, width=launch.width,
                    num_warps=launch.tiling.num_warps,
                )  # fmt: skip

    def _select_given(self, span: slice, target: TopKTarget) -> None:
        """Log-probs times the temperature are the teacher's logits: the normalizer that `outputs`
        has for the teacher is 0."""
        launch, k = self.chunk.in_part(span, None), self.support.k
        values_NV, top = launch.student.values_NV, self.teacher_top.rows(span)
        self.teacher = RawLogits(values_NV=values_NV, scale=1.0, softcap=None)
        self.has_logits = False
        launch.run(None, weight_N=self.weight_N[span], statistics=True)
        # The student's tokens are for the overlap only.
        select_top_k_by_sorting(values_NV, values_NV, self.student_top.rows(span))
        top.ids_NK.copy_(target.ids_NK[:, :k])
        top.logits_NK.copy_(target.logp_NK[:, :k] * launch.temperature_N[:, None])
        top.other_logits_NK.copy_(values_NV.gather(-1, top.ids_NK))
        if self.support.form == "tail":
            logq_NK = target.logp_NK[:, :k].to(launch.temperature_N.dtype)
            launch.output("teacher_tail").copy_(tail_logp_from_support(logq_NK))
            self._store_tails(launch, span, None)

    def statistics(self) -> TokenStatistics:
        return self.chunk.statistics(self.has_logits)

    def set_gradient(self, coefficient_N: Tensor | None) -> DivergenceStats:
        has_kernel = self.kernels and has_support_kernel(self.divergence)
        differentiate = self._differentiate_by_kernel if has_kernel else self._differentiate
        stats, pull_N, gradient_NK = differentiate(
            self.chunk.zeros() if coefficient_N is None else coefficient_N.contiguous()
        )
        # The pull on tokens outside S everywhere, then the tokens of S once more. Set, not added:
        # two roundings would be one too many. The teacher's tokens go last: one of both sides has
        # its h there.
        self.chunk.run(None, weight_N=pull_N, coefficient_N=coefficient_N, gradient=True)
        halves = zip(self._listed_tokens(), gradient_NK.split(self.support.k, dim=-1), strict=True)
        for top, half_NK in reversed(list(halves)):
            self.chunk.student.values_NV.scatter_(-1, top.ids_NK, half_NK)
        return stats

    def _listed_tokens(self) -> list[TopKBuffers]:
        if self.support.of == "joint":
            return [self.teacher_top, self.student_top]
        return [self.teacher_top if self.support.of == "teacher" else self.student_top]

    def _differentiate_by_kernel(
        self, coefficient_N: Tensor
    ) -> tuple[DivergenceStats, Tensor, Tensor]:
        """(statistics, the pull on tokens outside S, the gradient by the logits of those of S)."""
        chunk, weight_N = self.chunk, self.weight_N.contiguous()
        sides, tops = (chunk.student, self.teacher), (self.student_top, self.teacher_top)
        per_row = (chunk.ids_N, chunk.temperature_N, weight_N, coefficient_N, chunk.outputs)
        with guard_launch(coefficient_N.device):
            return reverse_kl_on_support(sides, tops, self.divergence, per_row)

    def _differentiate(self, coefficient_N: Tensor) -> tuple[DivergenceStats, Tensor, Tensor]:
        """The same in torch: every divergence in every form."""
        chunk = self.chunk
        ids_NK, keep_NK, overlap_N = combine_top_k(
            self.student_top.ids_NK, self.teacher_top.ids_NK, self.support.of
        )
        raw = [
            (top.logits_NK, top.other_logits_NK)
            if top is self.student_top
            else (top.other_logits_NK, top.logits_NK)
            for top in self._listed_tokens()
        ]
        student_NK, teacher_NK = (torch.cat(side, dim=-1) for side in zip(*raw, strict=True))
        logp_NK, slope_NK = self._log_probs(chunk.student, student_NK, prefix="")
        logq_NK, _ = self._log_probs(self.teacher, teacher_NK, prefix="teacher_")
        tails = None
        if self.support.form == "tail":
            tails = chunk.output("tail"), chunk.output("teacher_tail")
        stats, gradient = differentiate_on_support(
            logp_NK, logq_NK, keep_NK, self.divergence, self.weight_N, overlap_N, tails
        )
        inside_N = gradient.sum() + coefficient_N
        gradient_NK = gradient.h_NK - inside_N[:, None] * logp_NK.exp()
        gradient_NK += coefficient_N[:, None] * (ids_NK == chunk.ids_N[:, None])
        gradient_NK *= slope_NK * (chunk.student.scale / chunk.temperature_N)[:, None]
        pull_N, exponent_N = gradient.outside(coefficient_N)
        torch.mul(exponent_N, LOG2E.value, out=chunk.output("exponent"))
        # The kernel adds the coefficient.
        return stats, pull_N - coefficient_N, gradient_NK.to(chunk.student.values_NV.dtype)

    def _log_probs(self, side: RawLogits, raw_NK: Tensor, *, prefix: str) -> tuple[Tensor, Tensor]:
        """(log-probs, slope of the softcap) of a few tokens of each row from their raw logits and
        the outputs whose names have this prefix."""
        # Rounded once, as in the kernel: 1 − Σ_S p is small and shows the difference.
        temperature_N1 = self.chunk.temperature_N[:, None]
        slope_NK = torch.ones_like(raw_NK, dtype=temperature_N1.dtype)
        if side.softcap is None:
            z_NK = raw_NK.double() * (side.scale / temperature_N1).double()
        else:
            tanh_NK = torch.tanh(raw_NK.double() * (side.scale / side.softcap))
            slope_NK = (1 - tanh_NK.square()).to(slope_NK.dtype)
            z_NK = tanh_NK * (side.softcap / temperature_N1).double()
        shift_N, top_N, log_total_N = (
            self.chunk.output(f"{prefix}{name}") for name in ("shift", "top", "log_total")
        )
        x_NK = (z_NK - shift_N[:, None]).to(slope_NK.dtype)
        return x_NK - top_N[:, None] - (log_total_N * LN2.value)[:, None], slope_NK
