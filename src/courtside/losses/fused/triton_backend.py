"""The pass over the vocabulary on a GPU: the Triton kernels, and what runs between their launches.

Where the gradient depends on the statistics (an importance ratio, a baseline) or on a support
(`triton_support.py`), the vocabulary's kernel runs twice, for statistics and for the gradient;
otherwise once. Nothing here synchronizes with the GPU.
"""

from __future__ import annotations

from courtside.losses.fused.kernels import OUTPUTS
from courtside.losses.fused.triton_launch import TILING, Launch, Tiling
from courtside.losses.fused.triton_support import SupportPass
from courtside.losses.fused.types import (
    DivergenceStats,
    HeadLossSpec,
    RawLogits,
    RowStats,
    TopKTarget,
)


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
        self.chunk = Launch(
            student=student,
            teacher=None,
            ids_N=spec.ids_N[rows],
            temperature_N=spec.temperature_N[rows],
            outputs=spec.temperature_N.new_zeros(len(OUTPUTS), len(student.values_NV)),
            tiling=tiling,
        )
        self.weight_N = self.chunk.zeros() if spec.weight_N is None else spec.weight_N[rows]
        self.support: SupportPass | None = None
        if spec.divergence is None:
            return
        if spec.divergence.support is not None:
            self.support = SupportPass(
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
