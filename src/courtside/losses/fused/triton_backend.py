"""The pass over the vocabulary on a GPU: the Triton kernels, and what runs between their launches.

Where the gradient depends on the statistics (an importance ratio, a baseline) or on a support,
`vocabulary_kernel` runs twice, for statistics and for the gradient; otherwise once. The second run
for a support needs no teacher's logits, and waits for all parts of the rows. Nothing here
synchronizes with the GPU. A kernel that cannot be compiled or launched is an error, never a reason
to fall back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from subprocess import CalledProcessError

import torch
import triton
from torch import Tensor
from triton.errors import TritonError

from courtside.errors import RunError
from courtside.losses.fused.kernels import FORMS, JSD, LN2, LOG2E, NONE, OUTPUTS, vocabulary_kernel
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
from courtside.losses.fused.torch_backend import support_divergence
from courtside.losses.fused.types import (
    DivergenceSpec,
    DivergenceStats,
    HeadLossSpec,
    RawLogits,
    RowStats,
    TokenStatistics,
    TopKTarget,
)
from courtside.losses.top_k import check_top_k, combine_top_k


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How a row is tiled; `benchmarks/head_variants.py` measures several."""

    num_warps: int = 8
    lanes_per_thread: int = 1

    @property
    def lanes(self) -> int:
        return 32 * self.num_warps * self.lanes_per_thread


TILING = Tiling()


class TritonVocabularyPass:
    def __init__(
        self,
        student: RawLogits,
        spec: HeadLossSpec,
        rows: slice,
        *,
        tiling: Tiling = TILING,
        top_k_kernels: bool = True,
    ):
        """`top_k_kernels`: a top-k support is selected and differentiated by `topk_kernels`; False:
        by `torch.topk` and torch operations on [N, K]."""
        self.spec, self.rows = spec, rows
        self.chunk = _Launch(
            student=student,
            teacher=None,
            ids_N=spec.ids_N[rows],
            temperature_N=spec.temperature_N[rows],
            outputs=spec.temperature_N.new_zeros(len(OUTPUTS), len(student.values_NV)),
            tiling=tiling,
        )
        self.weight_N = self.chunk.zeros() if spec.weight_N is None else spec.weight_N[rows]
        self.support: _SupportPass | None = None
        if spec.divergence is None:
            return
        if spec.divergence.support is not None:
            self.support = _SupportPass(
                self.chunk, spec.divergence, self.weight_N, kernels=top_k_kernels
            )
        else:
            name = spec.divergence.name
            assert spec.divergence.closed_form is not None, f"there is no kernel for {name}"

    def run_part(self, rows: slice, target: RawLogits | TopKTarget | None) -> None:
        span = slice(rows.start - self.rows.start, rows.stop - self.rows.start)
        if self.support is not None:
            assert target is not None
            self.support.select(span, target)
            return
        launch = self.chunk.in_part(span, target if isinstance(target, RawLogits) else None)
        self.has_teacher = launch.teacher is not None
        divergence, weight_N = self.spec.divergence, self.weight_N[span]
        coefficient_N, needs_statistics = None, self.spec.needs_statistics
        if needs_statistics:
            launch.run(divergence, weight_N=weight_N, statistics=True)
        if self.spec.sampled:
            statistics = launch.statistics(self.has_teacher) if needs_statistics else None
            coefficient_N = self.spec.coefficient(rows, statistics)
        launch.run(
            divergence,
            weight_N=weight_N,
            coefficient_N=coefficient_N,
            statistics=not needs_statistics,
            gradient=True,
        )

    def finish(self) -> list[RowStats]:
        if self.support is None:
            stats = None
            if self.spec.divergence is not None:
                stats = DivergenceStats(value_N=self.chunk.output("value"))
            return [(self.chunk.statistics(self.has_teacher), stats)]
        statistics = self.support.statistics()
        coefficient_N = None
        if self.spec.sampled:
            coefficient_N = self.spec.coefficient(self.rows, statistics)
        return [(statistics, self.support.set_gradient(coefficient_N))]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launch:
    """The kernel with what its statistics run and its gradient run share."""

    student: RawLogits
    teacher: RawLogits | None
    ids_N: Tensor
    temperature_N: Tensor
    outputs: Tensor
    """[output, row]: see `OUTPUTS`."""
    tiling: Tiling

    def in_part(self, span: slice, teacher: RawLogits | None) -> _Launch:
        """Some of the rows, with the teacher's logits there; `outputs` is shared."""
        return replace(
            self,
            student=self.student[span],
            teacher=teacher,
            ids_N=self.ids_N[span],
            temperature_N=self.temperature_N[span],
            outputs=self.outputs[:, span],
        )

    @property
    def width(self) -> int:
        """Logits that a thread loads at once."""
        return 16 // self.student.values_NV.element_size()

    def output(self, name: str) -> Tensor:
        return self.outputs[OUTPUTS.index(name)]

    def zeros(self) -> Tensor:
        return torch.zeros_like(self.temperature_N)

    def run(
        self,
        divergence: DivergenceSpec | None,
        *,
        weight_N: Tensor,
        coefficient_N: Tensor | None = None,
        statistics: bool = False,
        gradient: bool = False,
        maxima: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """`divergence`: over the whole vocabulary. `maxima` of both sides get the largest logit of
        every group of `width` tokens."""
        num_rows, vocab_size = self.student.values_NV.shape
        if not num_rows:
            return
        teacher = self.teacher or self.student
        for side in (self.student, teacher):
            assert side.values_NV.stride(1) == 1, "the logits of a row are contiguous"
        form, shares, beta = NONE, (0.0, 0.0), 0.0
        if divergence is not None and divergence.closed_form is not None:
            form = FORMS[divergence.closed_form]
            if form.value >= JSD.value:
                shares = divergence.log_mixture_shares
                beta = divergence.parameters.get("beta", 0.0)
        weight_N = weight_N.to(self.temperature_N.dtype).contiguous()
        if coefficient_N is None:
            coefficient_N = self.zeros() if gradient else weight_N  # used for gradients only
        with _launching(self.student.values_NV.device):
            vocabulary_kernel[(num_rows,)](
                self.student.values_NV,
                teacher.values_NV,
                self.ids_N,
                self.temperature_N,
                weight_N,
                coefficient_N.contiguous(),
                self.outputs,
                *(maxima or (self.outputs, self.outputs)),
                self.student.values_NV.stride(0),
                teacher.values_NV.stride(0),
                self.outputs.stride(0),
                float(self.student.scale),
                float(teacher.scale),
                float(self.student.softcap or 1.0),
                float(teacher.softcap or 1.0),
                shares[0] * LOG2E.value,
                shares[1] * LOG2E.value,
                float(beta),
                FORM=form.value,
                TEACHER=self.teacher is not None,
                STATISTICS=statistics,
                GRADIENT=gradient,
                GROUP_MAXIMA=maxima is not None,
                STUDENT_CAPPED=self.student.softcap is not None,
                TEACHER_CAPPED=teacher.softcap is not None,
                VOCAB_SIZE=vocab_size,
                LANES=self.tiling.lanes,
                WIDTH=self.width,
                num_warps=self.tiling.num_warps,
            )

    def statistics(self, with_teacher: bool) -> TokenStatistics:
        names = ["student_logp", "student_entropy"]
        if with_teacher:
            names += ["teacher_logp", "teacher_entropy", "reverse_kl"]
        return TokenStatistics(**{f"{name}_N": self.output(name) for name in names})


@contextmanager
def _launching(device: torch.device) -> Iterator[None]:
    """Around kernel launches: on the GPU of their tensors, which need not be the current one."""
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            yield
    except torch.OutOfMemoryError:
        raise
    except (TritonError, RuntimeError, OSError, ImportError, CalledProcessError) as error:
        raise RunError(_cannot_run(device, error)) from error


def _cannot_run(device: torch.device, error: BaseException) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return (
        f"a kernel of the fused head could not be compiled or launched on {name} with Triton "
        f"{triton.__version__}: {type(error).__name__}: {error}. Triton compiles at first use and "
        "needs a C compiler and Python's headers; where Triton is not installed at all, the head "
        "runs in plain torch, more slowly"
    )


# ── a top-k support ──────────────────────────────────────────────────────────────────────────────


class _SupportPass:
    """A divergence on a support: part by part what needs the teacher's logits, which are the
    statistics and the tokens that may be in the support; everything on those few tokens once for
    all rows of the chunk."""

    def __init__(
        self, chunk: _Launch, divergence: DivergenceSpec, weight_N: Tensor, *, kernels: bool
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
        with _launching(sides[0].device):
            for i, top in enumerate((self.student_top.rows(span), self.teacher_top.rows(span))):
                if maxima is None:
                    select_top_k_by_sorting(sides[i], sides[1 - i], top)
                else:
                    select_top_k(
                        sides[i], sides[1 - i], maxima[i], top,
                        lanes=tiling.lanes, width=launch.width, num_warps=tiling.num_warps,
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

    def statistics(self) -> TokenStatistics:
        return self.chunk.statistics(self.has_logits)

    def set_gradient(self, coefficient_N: Tensor | None) -> DivergenceStats:
        has_kernel = self.kernels and has_support_kernel(self.divergence)
        differentiate = self._differentiate_by_kernel if has_kernel else self._differentiate
        stats, sum_N, gradient_NK = differentiate(
            self.chunk.zeros() if coefficient_N is None else coefficient_N.contiguous()
        )
        # −π·(Σ_S h + c) everywhere, then the tokens of S once more. Set, not added: two roundings
        # would be one too many. The teacher's tokens go last: one of both sides has its h there.
        self.chunk.run(None, weight_N=sum_N, coefficient_N=coefficient_N, gradient=True)
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
        """(statistics, Σ_S h weighted, the gradient by the logits of the tokens of S)."""
        chunk, weight_N = self.chunk, self.weight_N.contiguous()
        sides, tops = (chunk.student, self.teacher), (self.student_top, self.teacher_top)
        per_row = (chunk.ids_N, chunk.temperature_N, weight_N, coefficient_N, chunk.outputs)
        with _launching(coefficient_N.device):
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
        stats, h_NK = support_divergence(
            logp_NK, logq_NK, keep_NK, self.divergence, self.weight_N, overlap_N
        )
        sum_N = h_NK.sum(-1)
        gradient_NK = h_NK - (sum_N + coefficient_N)[:, None] * logp_NK.exp()
        gradient_NK += coefficient_N[:, None] * (ids_NK == chunk.ids_N[:, None])
        gradient_NK *= slope_NK * (chunk.student.scale / chunk.temperature_N)[:, None]
        return stats, sum_N, gradient_NK.to(chunk.student.values_NV.dtype)

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
