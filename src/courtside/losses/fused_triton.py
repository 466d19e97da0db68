"""`fused_words` on a GPU: the kernel of `fused_kernels`, and what lies between its two halves.

Where the gradient depends on the statistics through the caller (`Asked.sampled` as a function) or
on a support, the kernel runs twice, once for each half; otherwise once. Nothing here waits for the
GPU. A kernel that cannot be compiled or started is an error, never a reason to go another way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from subprocess import CalledProcessError

import torch
import triton
from torch import Tensor
from triton.errors import TritonError

from courtside.errors import RunError
from courtside.losses.fused_kernels import FORMS, JSD, LN2, LOG2E, NONE, OUTPUTS, rows_kernel
from courtside.losses.fused_records import Asked, Divergence, Found, Raw, Statistics
from courtside.losses.fused_select import fits, likeliest
from courtside.losses.fused_words import log_shares, on_support, refuse_too_many, support_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How a row is laid out on the GPU; `benchmarks/head_variants.py` measures several."""

    num_warps: int = 8
    lanes_per_thread: int = 1


TILING = Tiling()


def words_in_triton(
    student: Raw,
    teacher: Raw | None,
    asked: Asked,
    rows: slice,
    *,
    tiling: Tiling = TILING,
) -> tuple[Statistics, Found | None]:
    """All about `rows`, whose logits these are; the student's are replaced by the gradient."""
    divergence = None if asked.divergence is None else asked.divergence.without_ends()
    launch = _Launch(
        student=student,
        teacher=teacher,
        ids_N=asked.ids_N[rows],
        temperature_N=asked.temperature_N[rows],
        outputs=asked.temperature_N.new_zeros(len(OUTPUTS), len(student.values_NV)),
        tiling=tiling,
    )
    weight_N = launch.zeros() if asked.weight_N is None else asked.weight_N[rows]
    if divergence is not None and divergence.support is not None:
        launch.run(None, weight_N=weight_N, statistics=True)
        statistics = launch.statistics()
        coefficient_N = asked.coefficient(rows, statistics)
        return statistics, _on_support(launch, divergence, weight_N, coefficient_N)
    found = None if divergence is None else Found(value_N=launch.output("value"))
    if divergence is not None and divergence.is_zero:
        divergence, weight_N = None, launch.zeros()
    fixed_N = asked.sampled[rows] if isinstance(asked.sampled, Tensor) else None
    at_once = asked.sampled is None or fixed_N is not None
    launch.run(
        divergence, weight_N=weight_N, coefficient_N=fixed_N, statistics=True, gradient=at_once
    )
    statistics = launch.statistics()
    if not at_once:
        coefficient_N = asked.coefficient(rows, statistics)
        launch.run(divergence, weight_N=weight_N, coefficient_N=coefficient_N, gradient=True)
    return statistics, found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launch:
    """The kernel with everything that its two halves share."""

    student: Raw
    teacher: Raw | None
    ids_N: Tensor
    temperature_N: Tensor
    outputs: Tensor
    """[what, row]: see `OUTPUTS`."""
    tiling: Tiling

    def output(self, name: str) -> Tensor:
        return self.outputs[OUTPUTS.index(name)]

    def zeros(self) -> Tensor:
        return torch.zeros_like(self.temperature_N)

    def run(
        self,
        divergence: Divergence | None,
        *,
        weight_N: Tensor,
        coefficient_N: Tensor | None = None,
        statistics: bool = False,
        gradient: bool = False,
    ) -> None:
        num_rows, num_words = self.student.values_NV.shape
        if not num_rows:
            return
        teacher = self.teacher or self.student
        for side in (self.student, teacher):
            assert side.values_NV.stride(1) == 1, "a row's words lie side by side"
        device = self.student.values_NV.device
        mixes = divergence is not None and FORMS[divergence.name].value >= JSD.value
        shares = log_shares(divergence) if divergence is not None and mixes else (0.0, 0.0)
        weight_N = weight_N.to(self.temperature_N.dtype).contiguous()
        coefficient_N = (self.zeros() if coefficient_N is None else coefficient_N).contiguous()
        with _starting(device):
            rows_kernel[(num_rows,)](
                self.student.values_NV,
                teacher.values_NV,
                self.ids_N,
                self.temperature_N,
                weight_N,
                coefficient_N,
                self.outputs,
                self.student.values_NV.stride(0),
                teacher.values_NV.stride(0),
                num_rows,
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
                STUDENT_CAPPED=self.student.softcap is not None,
                TEACHER_CAPPED=teacher.softcap is not None,
                NUM_WORDS=num_words,
                LANES=32 * self.tiling.num_warps * self.tiling.lanes_per_thread,
                WIDTH=16 // self.student.values_NV.element_size(),
                num_warps=self.tiling.num_warps,
            )

    def statistics(self) -> Statistics:
        names = ["student_logp", "student_entropy"]
        if self.teacher is not None:
            names += ["teacher_logp", "teacher_entropy", "reverse_kl"]
        return Statistics(**{f"{name}_N": self.output(name) for name in names})

    def likeliest(self, side: Raw, k: int) -> Tensor:
        """Ids [N, k]; of equally likely words any."""
        num_words = side.values_NV.shape[-1]
        refuse_too_many(k, num_words)
        width, warps = 16 // side.values_NV.element_size(), self.tiling.num_warps
        if not fits(num_words, k, num_warps=warps, width=width):
            return side.values_NV.topk(k, dim=-1).indices
        with _starting(side.values_NV.device):
            return likeliest(side.values_NV, k, num_warps=warps)

    def log_probs(self, side: Raw, ids_NK: Tensor, *, of: str) -> tuple[Tensor, Tensor]:
        """(log-probs, slope of the cap) of a few words of each row."""
        # As the kernel has them, which rounds once: 1 − Σ_S p is small and shows the difference.
        raw_NK, temperature_N1 = side.values_NV.gather(-1, ids_NK), self.temperature_N[:, None]
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


def _on_support(
    launch: _Launch, divergence: Divergence, weight_N: Tensor, coefficient_N: Tensor | None
) -> Found:
    """The second half for a support: −π·(Σ_S h + c) everywhere, then the words of S once more."""
    student, teacher, support = launch.student, launch.teacher, divergence.support
    assert teacher is not None and support is not None
    picked = support_of(
        launch.likeliest(student, support.k), launch.likeliest(teacher, support.k), support
    )
    ids_NK = picked[0]
    logp_NK, slope_NK = launch.log_probs(student, ids_NK, of="")
    logq_NK, _ = launch.log_probs(teacher, ids_NK, of="teacher_")
    here = on_support(logp_NK, logq_NK, picked, divergence, weight_N)
    sum_N = here.gradient_NK.sum(-1)
    launch.run(None, weight_N=sum_N, coefficient_N=coefficient_N, gradient=True)
    at_word_N = launch.zeros() if coefficient_N is None else coefficient_N
    gradient_NK = here.gradient_NK - (sum_N + at_word_N)[:, None] * logp_NK.exp()
    gradient_NK += at_word_N[:, None] * (ids_NK == launch.ids_N[:, None])
    gradient_NK *= slope_NK * (student.scale / launch.temperature_N)[:, None]
    values_NK = gradient_NK.to(student.values_NV.dtype)
    # Set, not added: two roundings would be one too many. Of a joint support the teacher's half
    # goes last, because a word in both halves has its h there.
    for half in range(ids_NK.shape[-1] // support.k - 1, -1, -1):
        words = slice(half * support.k, (half + 1) * support.k)
        student.values_NV.scatter_(-1, ids_NK[:, words], values_NK[:, words])
    return here.found
