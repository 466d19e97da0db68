"""`fused_words` on a GPU: the kernel of `fused_kernels`, and what lies between its two halves.

Where the gradient depends on the statistics through the caller (`Asked.sampled` as a function) or
on a support, the kernel runs twice, once for each half; otherwise once. The second half for a
support needs no teacher's logits, and waits for all parts of the rows. Nothing here waits for the
GPU. A kernel that cannot be compiled or started is an error, never a reason to go another way.
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
from courtside.losses.fused.topk_select import (
    TopKBuffers,
    allocate_group_maxima,
    allocate_top_k,
    num_select_warps,
    select_top_k,
    select_top_k_by_sorting,
)
from courtside.losses.fused.topk_support import has_support_kernel, reverse_kl_on_support
from courtside.losses.fused.torch_backend import (
    check_support_size,
    combine_supports,
    log_mixture_weights,
    support_divergence,
)
from courtside.losses.fused.types import (
    DivergenceSpec,
    DivergenceStats,
    HeadLossSpec,
    RawLogits,
    TeacherLogits,
    TokenStatistics,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How a row is laid out on the GPU; `benchmarks/head_variants.py` measures several."""

    num_warps: int = 8
    lanes_per_thread: int = 1

    @property
    def lanes(self) -> int:
        return 32 * self.num_warps * self.lanes_per_thread


TILING = Tiling()


def vocabulary_pass_triton(
    student: RawLogits,
    teacher: TeacherLogits | None,
    asked: HeadLossSpec,
    rows: slice,
    *,
    tiling: Tiling = TILING,
) -> tuple[TokenStatistics, DivergenceStats | None]:
    """All about `rows`, whose logits these are; the student's are replaced by the gradient."""
    divergence = None if asked.divergence is None else asked.divergence.without_ends()
    whole = _Launch(
        student=student,
        teacher=None,
        ids_N=asked.ids_N[rows],
        temperature_N=asked.temperature_N[rows],
        outputs=asked.temperature_N.new_zeros(len(OUTPUTS), len(student.values_NV)),
        tiling=tiling,
    )
    if divergence is not None and divergence.support is not None:
        assert teacher is not None
        return _on_support(whole, teacher, divergence, asked, rows)
    if divergence is None or divergence.is_zero:
        weight_N = whole.zeros()
    else:
        assert asked.weight_N is not None
        weight_N = asked.weight_N[rows]
    formed = None if divergence is None or divergence.is_zero else divergence
    for part, launch in whole.in_parts(teacher, rows):
        own = slice(part.start - rows.start, part.stop - rows.start)
        fixed_N = asked.sampled[part] if isinstance(asked.sampled, Tensor) else None
        at_once = asked.sampled is None or fixed_N is not None
        launch.run(
            formed, weight_N=weight_N[own], coefficient_N=fixed_N, statistics=True, gradient=at_once
        )
        if not at_once:
            coefficient_N = asked.coefficient(part, launch.statistics())
            launch.run(formed, weight_N=weight_N[own], coefficient_N=coefficient_N, gradient=True)
    found = None if divergence is None else DivergenceStats(value_N=whole.output("value"))
    return whole.statistics(with_teacher=teacher is not None), found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launch:
    """The kernel with everything that its two halves share."""

    student: RawLogits
    teacher: RawLogits | None
    ids_N: Tensor
    temperature_N: Tensor
    outputs: Tensor
    """[what, row]: see `OUTPUTS`."""
    tiling: Tiling

    def in_parts(
        self, teacher: TeacherLogits | None, rows: slice
    ) -> Iterator[tuple[slice, _Launch]]:
        """With the teacher's logits, a part of the rows at a time; all leave their numbers here."""
        if teacher is None:
            yield rows, self
            return
        for part, logits in teacher:
            own = slice(part.start - rows.start, part.stop - rows.start)
            yield (
                part,
                replace(
                    self,
                    student=replace(self.student, values_NV=self.student.values_NV[own]),
                    teacher=logits,
                    ids_N=self.ids_N[own],
                    temperature_N=self.temperature_N[own],
                    outputs=self.outputs[:, own],
                ),
            )

    @property
    def width(self) -> int:
        """Words that a thread loads at once."""
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
        tops: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """`tops` of both sides get the largest logit of every few words."""
        num_rows, vocab_size = self.student.values_NV.shape
        if not num_rows:
            return
        teacher = self.teacher or self.student
        for side in (self.student, teacher):
            assert side.values_NV.stride(1) == 1, "a row's words lie side by side"
        device = self.student.values_NV.device
        mixes = divergence is not None and FORMS[divergence.name].value >= JSD.value
        shares = log_mixture_weights(divergence) if divergence is not None and mixes else (0.0, 0.0)
        weight_N = weight_N.to(self.temperature_N.dtype).contiguous()
        if coefficient_N is None:
            coefficient_N = self.zeros() if gradient else weight_N  # looked at for gradients only
        coefficient_N = coefficient_N.contiguous()
        with _starting(device):
            vocabulary_kernel[(num_rows,)](
                self.student.values_NV,
                teacher.values_NV,
                self.ids_N,
                self.temperature_N,
                weight_N,
                coefficient_N,
                self.outputs,
                *(tops or (self.outputs, self.outputs)),
                self.student.values_NV.stride(0),
                teacher.values_NV.stride(0),
                self.outputs.stride(0),
                float(self.student.scale),
                float(teacher.scale),
                float(self.student.softcap or 1.0),
                float(teacher.softcap or 1.0),
                shares[0] * LOG2E.value,
                shares[1] * LOG2E.value,
                float((divergence and divergence.beta) or 0.0),
                FORM=(NONE if divergence is None else FORMS[divergence.name]).value,
                TEACHER=self.teacher is not None,
                STATISTICS=statistics,
                GRADIENT=gradient,
                TOPS=tops is not None,
                STUDENT_CAPPED=self.student.softcap is not None,
                TEACHER_CAPPED=teacher.softcap is not None,
                NUM_WORDS=vocab_size,
                LANES=self.tiling.lanes,
                WIDTH=self.width,
                num_warps=self.tiling.num_warps,
            )

    def statistics(self, *, with_teacher: bool | None = None) -> TokenStatistics:
        """`with_teacher`: whether some part had one; None: whether this is such a part."""
        names = ["student_logp", "student_entropy"]
        if self.teacher is not None if with_teacher is None else with_teacher:
            names += ["teacher_logp", "teacher_entropy", "reverse_kl"]
        return TokenStatistics(**{f"{name}_N": self.output(name) for name in names})

    def room_for_tops(self) -> tuple[Tensor, Tensor]:
        assert self.teacher is not None
        own_NG, other_NG = (
            allocate_group_maxima(side.values_NV, lanes=self.tiling.lanes, width=self.width)
            for side in (self.student, self.teacher)
        )
        return own_NG, other_NG

    def pick(
        self, out: tuple[TopKBuffers, TopKBuffers], tops: tuple[Tensor, Tensor] | None
    ) -> None:
        """The likeliest words of both sides, with the logits of both."""
        assert self.teacher is not None
        both = self.student.values_NV, self.teacher.values_NV
        with _starting(both[0].device):
            for side, values_NV in enumerate(both):
                other_NV = both[1 - side]
                if tops is None:
                    select_top_k_by_sorting(values_NV, other_NV, out[side])
                    continue
                select_top_k(
                    values_NV,
                    other_NV,
                    tops[side],
                    out[side],
                    lanes=self.tiling.lanes,
                    width=self.width,
                    num_warps=self.tiling.num_warps,
                )

    def log_probs(self, side: RawLogits, raw_NK: Tensor, *, of: str) -> tuple[Tensor, Tensor]:
        """(log-probs, slope of the cap) of a few words of each row, whose logits these are."""
        # As the kernel has them, which rounds once: 1 − Σ_S p is small and shows the difference.
        temperature_N1 = self.temperature_N[:, None]
        slope_NK = torch.ones_like(raw_NK, dtype=self.temperature_N.dtype)
        if side.softcap is None:
            z_NK = raw_NK.double() * (side.scale / temperature_N1).double()
        else:
            bent_NK = torch.tanh(raw_NK.double() * (side.scale / side.softcap))
            slope_NK = (1 - bent_NK.square()).to(slope_NK.dtype)
            z_NK = bent_NK * (side.softcap / temperature_N1).double()
        shift_N, top_N, log_total_N = (
            self.output(f"{of}{name}") for name in ("shift", "top", "log_total")
        )
        x_NK = (z_NK - shift_N[:, None]).to(slope_NK.dtype)
        return x_NK - top_N[:, None] - (log_total_N * LN2.value)[:, None], slope_NK


@contextmanager
def _starting(device: torch.device) -> Iterator[None]:
    """Around kernels: on the GPU of their tensors, which need not be the current one."""
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
        f"the kernel of the divergence head could not be compiled or started on {name} with Triton "
        f"{triton.__version__}: {type(error).__name__}: {error}. Triton compiles at first use and "
        "needs a C compiler and Python's headers; where Triton is not installed at all, the head "
        "runs in plain torch, more slowly"
    )


# ── a support of a few words ─────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class _Support:
    """What is found on the words of a support, and what the gradient needs of them."""

    found: DivergenceStats
    sum_N: Tensor
    """Σ_S h."""
    values_NK: Tensor
    """The gradient by the logits of these words."""


def _on_support(
    whole: _Launch,
    teacher: TeacherLogits,
    divergence: DivergenceSpec,
    asked: HeadLossSpec,
    rows: slice,
) -> tuple[TokenStatistics, DivergenceStats]:
    """Part by part what needs the teacher's logits: statistics, and the words that may be in the
    support. Everything on those few words once for all rows."""
    support, student = divergence.support, whole.student
    assert support is not None and asked.weight_N is not None
    num_rows, vocab_size = student.values_NV.shape
    check_support_size(support.k, vocab_size)
    least = whole.tiling.num_warps
    warps = num_select_warps(vocab_size, support.k, least=least, width=whole.width)
    if warps is not None:
        whole = replace(whole, tiling=replace(whole.tiling, num_warps=warps))
    device = student.values_NV.device
    mine, theirs = (allocate_top_k(num_rows, support.k, device) for _ in range(2))
    weight_N, other = asked.weight_N[rows], student
    for part, launch in whole.in_parts(teacher, rows):
        own = slice(part.start - rows.start, part.stop - rows.start)
        assert launch.teacher is not None
        other = launch.teacher  # for its scale and cap, which all parts share
        tops = None if warps is None else launch.room_for_tops()
        launch.run(None, weight_N=weight_N[own], statistics=True, tops=tops)
        launch.pick((mine.rows(own), theirs.rows(own)), tops)
    statistics = whole.statistics(with_teacher=True)
    coefficient_N = asked.coefficient(rows, statistics)
    words = _by_kernel if has_support_kernel(divergence) else _by_torch
    here = words(whole, other, (mine, theirs), divergence, (weight_N, coefficient_N))
    # −π·(Σ_S h + c) everywhere, then the words of S once more. Set, not added: two roundings would
    # be one too many. The teacher's words go last: one of both sides has its h there.
    whole.run(None, weight_N=here.sum_N, coefficient_N=coefficient_N, gradient=True)
    halves = {"teacher": [theirs], "student": [mine], "joint": [theirs, mine]}[support.of]
    values = here.values_NK.split(support.k, dim=-1)
    for half, values_NK in reversed(list(zip(halves, values, strict=True))):
        student.values_NV.scatter_(-1, half.ids_NK, values_NK)
    return statistics, here.found


def _by_kernel(
    whole: _Launch,
    teacher: RawLogits,
    picked: tuple[TopKBuffers, TopKBuffers],
    divergence: DivergenceSpec,
    per_row: tuple[Tensor, Tensor | None],
) -> _Support:
    weight_N, coefficient_N = per_row
    temperature_N = whole.temperature_N
    with _starting(weight_N.device):
        found, sum_N, values_NK = reverse_kl_on_support(
            (whole.student, teacher),
            picked,
            divergence,
            (
                whole.ids_N,
                temperature_N,
                weight_N.to(temperature_N.dtype).contiguous(),
                whole.zeros() if coefficient_N is None else coefficient_N.contiguous(),
                whole.outputs,
            ),
        )
    return _Support(found=found, sum_N=sum_N, values_NK=values_NK)


def _by_torch(
    whole: _Launch,
    teacher: RawLogits,
    picked: tuple[TopKBuffers, TopKBuffers],
    divergence: DivergenceSpec,
    per_row: tuple[Tensor, Tensor | None],
) -> _Support:
    """Every divergence in every form."""
    support, (mine, theirs), (weight_N, coefficient_N) = divergence.support, picked, per_row
    assert support is not None
    ids = combine_supports(mine.ids_NK, theirs.ids_NK, support)
    raw = {
        "student": (mine.own_NK, mine.other_NK),
        "teacher": (theirs.other_NK, theirs.own_NK),
    }
    student_NK, teacher_NK = (
        torch.cat([raw["teacher"][side], raw["student"][side]], dim=-1)
        if support.of == "joint"
        else raw[support.of][side]
        for side in (0, 1)
    )
    logp_NK, slope_NK = whole.log_probs(whole.student, student_NK, of="")
    logq_NK, _ = whole.log_probs(teacher, teacher_NK, of="teacher_")
    here = support_divergence(logp_NK, logq_NK, ids, divergence, weight_N)
    sum_N = here.gradient_NK.sum(-1)
    at_word_N = whole.zeros() if coefficient_N is None else coefficient_N
    gradient_NK = here.gradient_NK - (sum_N + at_word_N)[:, None] * logp_NK.exp()
    gradient_NK += at_word_N[:, None] * (here.ids_NK == whole.ids_N[:, None])
    gradient_NK *= slope_NK * (whole.student.scale / whole.temperature_N)[:, None]
    values_NK = gradient_NK.to(whole.student.values_NV.dtype)
    return _Support(found=here.found, sum_N=sum_N, values_NK=values_NK)
