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
from courtside.losses.fused.closed_forms import as_closed_form, log_mixture_shares
from courtside.losses.fused.kernels import FORMS, JSD, LN2, LOG2E, NONE, OUTPUTS, vocabulary_kernel
from courtside.losses.fused.topk_select import (
    TopKBuffers,
    allocate_group_maxima,
    allocate_top_k,
    num_select_warps,
    select_top_k,
    select_top_k_by_sorting,
)
from courtside.losses.fused.topk_support import has_support_kernel, reverse_kl_on_support
from courtside.losses.fused.torch_backend import support_divergence
from courtside.losses.fused.types import (
    DivergenceSpec,
    DivergenceStats,
    HeadLossSpec,
    RawLogits,
    TeacherLogits,
    TokenStatistics,
    TopKTarget,
)
from courtside.losses.top_k import check_top_k, combine_top_k

TOP_K_KERNELS = True
"""Whether a top-k support is selected and differentiated by kernels (`topk_select`,
`topk_support`). False: by `torch.topk` and torch operations on [N, K]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How a row is tiled; `benchmarks/head_variants.py` measures several."""

    num_warps: int = 8
    lanes_per_thread: int = 1

    @property
    def lanes(self) -> int:
        return 32 * self.num_warps * self.lanes_per_thread


TILING = Tiling()


def vocabulary_pass_triton(
    student: RawLogits,
    teacher: TeacherLogits | TopKTarget | None,
    spec: HeadLossSpec,
    rows: slice,
    *,
    tiling: Tiling = TILING,
) -> tuple[TokenStatistics, DivergenceStats | None]:
    """Statistics and divergence of `rows`; the student's logits are replaced by the gradient."""
    chunk = _Launch(
        student=student,
        teacher=None,
        ids_N=spec.ids_N[rows],
        temperature_N=spec.temperature_N[rows],
        outputs=spec.temperature_N.new_zeros(len(OUTPUTS), len(student.values_NV)),
        tiling=tiling,
    )
    if spec.divergence is not None and spec.divergence.support is not None:
        assert teacher is not None
        return _pass_support(chunk, teacher, spec.divergence, spec, rows)
    logits = None if isinstance(teacher, TopKTarget) else teacher
    weight_N, divergence = chunk.zeros(), None
    if spec.divergence is not None:
        assert spec.weight_N is not None
        weight_N, divergence = spec.weight_N[rows], as_closed_form(spec.divergence)
        assert divergence is not None, f"there is no kernel for {spec.divergence.name}"
    for part, launch in chunk.in_parts(logits, rows):
        part_weight_N = weight_N[part.start - rows.start : part.stop - rows.start]
        if spec.needs_statistics:
            launch.run(divergence, weight_N=part_weight_N, statistics=True)
            coefficient_N = spec.coefficient(part, launch.statistics())
        else:
            coefficient_N = spec.coefficient(part, None)
        launch.run(
            divergence,
            weight_N=part_weight_N,
            coefficient_N=coefficient_N,
            statistics=not spec.needs_statistics,
            gradient=True,
        )
    stats = None if divergence is None else DivergenceStats(value_N=chunk.output("value"))
    return chunk.statistics(with_teacher=logits is not None), stats


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

    def in_parts(
        self, teacher: TeacherLogits | None, rows: slice
    ) -> Iterator[tuple[slice, _Launch]]:
        """With the teacher's logits, a part of the rows at a time; `outputs` is shared."""
        if teacher is None:
            yield rows, self
            return
        for part, logits in teacher:
            span = slice(part.start - rows.start, part.stop - rows.start)
            yield (
                part,
                replace(
                    self,
                    student=self.student.select_rows(span),
                    teacher=logits,
                    ids_N=self.ids_N[span],
                    temperature_N=self.temperature_N[span],
                    outputs=self.outputs[:, span],
                ),
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
        """`maxima` of both sides get the largest logit of every group of `width` tokens."""
        num_rows, vocab_size = self.student.values_NV.shape
        if not num_rows:
            return
        teacher = self.teacher or self.student
        for side in (self.student, teacher):
            assert side.values_NV.stride(1) == 1, "the logits of a row are contiguous"
        device = self.student.values_NV.device
        mixes = divergence is not None and FORMS[divergence.name].value >= JSD.value
        shares = log_mixture_shares(divergence) if divergence is not None and mixes else (0.0, 0.0)
        weight_N = weight_N.to(self.temperature_N.dtype).contiguous()
        if coefficient_N is None:
            coefficient_N = self.zeros() if gradient else weight_N  # used for gradients only
        coefficient_N = coefficient_N.contiguous()
        with _launching(device):
            vocabulary_kernel[(num_rows,)](
                self.student.values_NV,
                teacher.values_NV,
                self.ids_N,
                self.temperature_N,
                weight_N,
                coefficient_N,
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
                float(divergence.parameters.get("beta", 0.0) if divergence is not None else 0.0),
                FORM=(NONE if divergence is None else FORMS[divergence.name]).value,
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

    def statistics(self, *, with_teacher: bool | None = None) -> TokenStatistics:
        """`with_teacher`: whether some part has a teacher; None: whether this one has."""
        names = ["student_logp", "student_entropy"]
        if self.teacher is not None if with_teacher is None else with_teacher:
            names += ["teacher_logp", "teacher_entropy", "reverse_kl"]
        return TokenStatistics(**{f"{name}_N": self.output(name) for name in names})

    def allocate_group_maxima(self) -> tuple[Tensor, Tensor]:
        assert self.teacher is not None
        student_NG, teacher_NG = (
            allocate_group_maxima(side.values_NV, lanes=self.tiling.lanes, width=self.width)
            for side in (self.student, self.teacher)
        )
        return student_NG, teacher_NG

    def select_top_k(
        self, out: tuple[TopKBuffers, TopKBuffers], maxima: tuple[Tensor, Tensor] | None
    ) -> None:
        """The most likely tokens of both sides, with the logits of both."""
        assert self.teacher is not None
        sides = self.student.values_NV, self.teacher.values_NV
        with _launching(sides[0].device):
            for index, values_NV in enumerate(sides):
                other_NV = sides[1 - index]
                if maxima is None:
                    select_top_k_by_sorting(values_NV, other_NV, out[index])
                    continue
                select_top_k(
                    values_NV,
                    other_NV,
                    maxima[index],
                    out[index],
                    lanes=self.tiling.lanes,
                    width=self.width,
                    num_warps=self.tiling.num_warps,
                )

    def log_probs(self, side: RawLogits, raw_NK: Tensor, *, of: str) -> tuple[Tensor, Tensor]:
        """(log-probs, slope of the softcap) of a few tokens of each row from their raw logits."""
        # Rounded once, as in the kernel: 1 − Σ_S p is small and shows the difference.
        temperature_N1 = self.temperature_N[:, None]
        slope_NK = torch.ones_like(raw_NK, dtype=self.temperature_N.dtype)
        if side.softcap is None:
            z_NK = raw_NK.double() * (side.scale / temperature_N1).double()
        else:
            tanh_NK = torch.tanh(raw_NK.double() * (side.scale / side.softcap))
            slope_NK = (1 - tanh_NK.square()).to(slope_NK.dtype)
            z_NK = tanh_NK * (side.softcap / temperature_N1).double()
        shift_N, top_N, log_total_N = (
            self.output(f"{of}{name}") for name in ("shift", "top", "log_total")
        )
        x_NK = (z_NK - shift_N[:, None]).to(slope_NK.dtype)
        return x_NK - top_N[:, None] - (log_total_N * LN2.value)[:, None], slope_NK


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _SupportResult:
    stats: DivergenceStats
    sum_N: Tensor
    """Σ_S h, weighted."""
    gradient_NK: Tensor
    """By the logits of the tokens of S."""


def _pass_support(
    chunk: _Launch,
    teacher: TeacherLogits | TopKTarget,
    divergence: DivergenceSpec,
    spec: HeadLossSpec,
    rows: slice,
) -> tuple[TokenStatistics, DivergenceStats]:
    """Part by part what needs the teacher's logits: statistics, and the tokens that may be in the
    support. Everything on those few tokens once for all rows."""
    support, student = divergence.support, chunk.student
    assert support is not None and spec.weight_N is not None
    vocab_size = student.values_NV.shape[1]
    check_top_k(support.k, vocab_size)
    weight_N = spec.weight_N[rows]
    if isinstance(teacher, TopKTarget):
        chunk.run(None, weight_N=weight_N, statistics=True)
        selected = _select_given(chunk, teacher.select_rows(rows), support.k)
        other = RawLogits(values_NV=student.values_NV, scale=1.0, softcap=None)
    else:
        chunk, selected, other = _select(chunk, teacher, weight_N, rows, support.k)
    statistics = chunk.statistics(with_teacher=not isinstance(teacher, TopKTarget))
    coefficient_N = spec.coefficient(rows, statistics)
    with_kernel = TOP_K_KERNELS and has_support_kernel(divergence)
    differentiate = _differentiate_by_kernel if with_kernel else _differentiate_by_torch
    result = differentiate(chunk, other, selected, divergence, (weight_N, coefficient_N))
    # −π·(Σ_S h + c) everywhere, then the tokens of S once more. Set, not added: two roundings would
    # be one too many. The teacher's tokens go last: one of both sides has its h there.
    chunk.run(None, weight_N=result.sum_N, coefficient_N=coefficient_N, gradient=True)
    student_top, teacher_top = selected
    halves = {"teacher": [teacher_top], "student": [student_top]}
    halves["joint"] = [teacher_top, student_top]
    gradients = result.gradient_NK.split(support.k, dim=-1)
    for half, gradient_NK in reversed(list(zip(halves[support.of], gradients, strict=True))):
        student.values_NV.scatter_(-1, half.ids_NK, gradient_NK)
    return statistics, result.stats


def _select(
    chunk: _Launch, teacher: TeacherLogits, weight_N: Tensor, rows: slice, k: int
) -> tuple[_Launch, tuple[TopKBuffers, TopKBuffers], RawLogits]:
    """(launch for the gradient, top-k of student and teacher, teacher's scale and softcap)."""
    num_rows, vocab_size = chunk.student.values_NV.shape
    warps = None
    if TOP_K_KERNELS:
        warps = num_select_warps(vocab_size, k, least=chunk.tiling.num_warps, width=chunk.width)
    if warps is not None:
        chunk = replace(chunk, tiling=replace(chunk.tiling, num_warps=warps))
    device = chunk.student.values_NV.device
    student_top, teacher_top = (allocate_top_k(num_rows, k, device) for _ in range(2))
    other = chunk.student
    for part, launch in chunk.in_parts(teacher, rows):
        span = slice(part.start - rows.start, part.stop - rows.start)
        assert launch.teacher is not None
        other = launch.teacher  # for its scale and softcap, which all parts share
        maxima = None if warps is None else launch.allocate_group_maxima()
        launch.run(None, weight_N=weight_N[span], statistics=True, maxima=maxima)
        launch.select_top_k((student_top.rows(span), teacher_top.rows(span)), maxima)
    return chunk, (student_top, teacher_top), other


def _select_given(chunk: _Launch, target: TopKTarget, k: int) -> tuple[TopKBuffers, TopKBuffers]:
    """The same from a teacher's given tokens. Their log-probs times the temperature are its logits:
    the normalizer that `outputs` has for the teacher is 0."""
    values_NV = chunk.student.values_NV
    student_top, teacher_top = (allocate_top_k(len(values_NV), k, values_NV.device) for _ in "12")
    select_top_k_by_sorting(values_NV, values_NV, student_top)  # for the overlap only
    teacher_top.ids_NK.copy_(target.ids_NK[:, :k])
    teacher_top.logits_NK.copy_(target.logp_NK[:, :k] * chunk.temperature_N[:, None])
    teacher_top.other_logits_NK.copy_(values_NV.gather(-1, teacher_top.ids_NK))
    return student_top, teacher_top


def _differentiate_by_kernel(
    chunk: _Launch,
    teacher: RawLogits,
    selected: tuple[TopKBuffers, TopKBuffers],
    divergence: DivergenceSpec,
    per_row: tuple[Tensor, Tensor | None],
) -> _SupportResult:
    weight_N, coefficient_N = per_row
    temperature_N = chunk.temperature_N
    with _launching(weight_N.device):
        stats, sum_N, gradient_NK = reverse_kl_on_support(
            (chunk.student, teacher),
            selected,
            divergence,
            (
                chunk.ids_N,
                temperature_N,
                weight_N.to(temperature_N.dtype).contiguous(),
                chunk.zeros() if coefficient_N is None else coefficient_N.contiguous(),
                chunk.outputs,
            ),
        )
    return _SupportResult(stats=stats, sum_N=sum_N, gradient_NK=gradient_NK)


def _differentiate_by_torch(
    chunk: _Launch,
    teacher: RawLogits,
    selected: tuple[TopKBuffers, TopKBuffers],
    divergence: DivergenceSpec,
    per_row: tuple[Tensor, Tensor | None],
) -> _SupportResult:
    """Every divergence in every form."""
    support, (student_top, teacher_top), (weight_N, coefficient_N) = (
        divergence.support, selected, per_row,
    )  # fmt: skip
    assert support is not None
    ids_NK, keep_NK, overlap_N = combine_top_k(student_top.ids_NK, teacher_top.ids_NK, support.of)
    raw = {
        "student": (student_top.logits_NK, student_top.other_logits_NK),
        "teacher": (teacher_top.other_logits_NK, teacher_top.logits_NK),
    }
    student_NK, teacher_NK = (
        torch.cat([raw["teacher"][side], raw["student"][side]], dim=-1)
        if support.of == "joint"
        else raw[support.of][side]
        for side in (0, 1)
    )
    logp_NK, slope_NK = chunk.log_probs(chunk.student, student_NK, of="")
    logq_NK, _ = chunk.log_probs(teacher, teacher_NK, of="teacher_")
    stats, h_NK = support_divergence(logp_NK, logq_NK, keep_NK, divergence, weight_N, overlap_N)
    sum_N = h_NK.sum(-1)
    at_token_N = chunk.zeros() if coefficient_N is None else coefficient_N
    gradient_NK = h_NK - (sum_N + at_token_N)[:, None] * logp_NK.exp()
    gradient_NK += at_token_N[:, None] * (ids_NK == chunk.ids_N[:, None])
    gradient_NK *= slope_NK * (chunk.student.scale / chunk.temperature_N)[:, None]
    gradient_NK = gradient_NK.to(chunk.student.values_NV.dtype)
    return _SupportResult(stats=stats, sum_N=sum_N, gradient_NK=gradient_NK)
