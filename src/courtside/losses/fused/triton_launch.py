"""Launching the kernel of the vocabulary, and what an error of a launch means.

Nothing here synchronizes with the GPU. A kernel that cannot be compiled or launched is an error,
never a reason to fall back.
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
from courtside.losses.fused.kernels import FORMS, JSD, LOG2E, NONE, OUTPUTS, vocabulary_kernel
from courtside.losses.fused.types import DivergenceSpec, RawLogits, TokenStatistics


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How a row is tiled; `benchmarks/head_variants.py` measures several."""

    num_warps: int = 8
    lanes_per_thread: int = 1

    @property
    def lanes(self) -> int:
        return 32 * self.num_warps * self.lanes_per_thread


TILING = Tiling()


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The kernel with what its statistics run and its gradient run share."""

    student: RawLogits
    teacher: RawLogits | None
    ids_N: Tensor
    temperature_N: Tensor
    outputs: Tensor
    """[output, row]: see `OUTPUTS`."""
    tiling: Tiling

    def in_part(self, span: slice, teacher: RawLogits | None) -> Launch:
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
        with guard_launch(self.student.values_NV.device):
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
def guard_launch(device: torch.device) -> Iterator[None]:
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
