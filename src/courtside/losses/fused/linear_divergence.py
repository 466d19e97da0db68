"""From hidden states and two LM heads to loss and gradients, without the logits of a whole batch.

Rows (positions) go through in chunks. For a chunk: two matmuls make the logits of student and
teacher; one pass over the vocabulary gives every statistic and, in place of the student's logits,
the gradient by them, without a graph; two more matmuls take that gradient to the hidden states and
the head. [rows × vocabulary] exists for one chunk, in the dtype of the heads; softmax and sums are
float32 or better.

The pass over the vocabulary is `triton_backend` on a GPU where it has kernels for the divergence,
and `torch_backend` for everything else; both compute the formulas of `closed_forms`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch
from torch import Tensor

from courtside.losses.fused.closed_forms import as_closed_form
from courtside.losses.fused.matmuls import (
    adapter_backward,
    allocate_logits,
    compute_logits,
    head_backward,
    padded_vocab_size,
    project_low_rank,
)
from courtside.losses.fused.torch_backend import vocabulary_pass_torch
from courtside.losses.fused.types import (
    Backend,
    DivergenceSpec,
    DivergenceStats,
    Extrapolation,
    HeadGradient,
    HeadLoss,
    HeadLossSpec,
    Projection,
    RawLogits,
    Target,
    TeacherLogits,
    TokenStatistics,
    TopKTarget,
    concatenate_rows,
)

CPU_BYTES = 9 * 2**24
"""For the logits of one chunk: 512 + 256 rows of a vocabulary of 49152 in float32, which is enough
for the matmuls."""
CUDA_ROWS = 4608
"""On a GPU: rows of 16-bit logits where the head trains, 1.3 GiB for a vocabulary of 151936. Each
chunk loads and stores the head's whole gradient once, which at hidden size 1024 costs a fifth of
the matmuls."""
CUDA_FROZEN_ROWS = 2048
"""And where it is frozen: nothing is gained by more."""
CUDA_BYTES = 2**29
"""At least this: a chunk of a small head must be worth its kernel launches."""
CUDA_PART_BYTES = 5 * 2**25
"""Of the teacher: 512 rows of a vocabulary of 151936 in bfloat16. Smaller matmuls run worse, and
the kernel runs four rows per multiprocessor of an H200 at a time."""


VocabularyPass = Callable[
    [RawLogits, TeacherLogits | TopKTarget | None, HeadLossSpec, slice],
    tuple[TokenStatistics, DivergenceStats | None],
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlan:
    """How many rows at once."""

    chunk: int
    """Rows whose gradient by the logits exists at once. Each chunk adds to all of the head's
    gradient, so a trained head wants few of them."""
    part: int
    """Rows of a chunk whose teacher's logits exist at once."""


def fused_linear_divergence(
    student: Projection,
    target: Target | None,
    spec: HeadLossSpec,
    *,
    head_gradient: HeadGradient | None = None,
    plan: ChunkPlan | None = None,
    backend: Backend | None = None,
) -> HeadLoss:
    """Gradient by the student's hidden states, with all by-products; the gradient by its head is
    added to `head_gradient`.

    What `head_gradient` leaves out is frozen; without the weight's that saves one of the four
    matmuls. `target` = None: only sampled tokens matter, which saves another. `plan`, `backend` =
    None: chosen here.
    """
    student, target = _share_vocabulary(student, target)
    spec = _check(student, target, spec)
    num_rows = len(student.hidden_ND)
    head_gradient = head_gradient or HeadGradient()
    has_logits = isinstance(target, Projection | Extrapolation)
    plan = plan or plan_chunks(
        student, teacher=has_logits, trained=head_gradient.weight_VD is not None
    )
    pass_vocabulary = load_backend(backend or choose_backend(student.weight_VD, spec.divergence))
    # Allocated once, for all chunks: what outlives a chunk must not lie between its temporaries.
    gradient_ND = torch.empty_like(student.hidden_ND)
    chunk_CV = allocate_logits(student, min(plan.chunk, num_rows))
    statistics: list[TokenStatistics] = []
    stats: list[DivergenceStats] = []
    with torch.no_grad(), torch.autocast(gradient_ND.device.type, enabled=False):
        low_rank = project_low_rank(student, gradient=True)
        teacher = None
        if isinstance(target, Projection | Extrapolation):
            teacher = _TargetLogits(target, min(plan.part, num_rows))
        for start in range(0, max(1, num_rows), plan.chunk):
            rows = slice(start, min(start + plan.chunk, num_rows))
            logits = compute_logits(student, low_rank, rows, chunk_CV)
            chunk_target = target if isinstance(target, TopKTarget) else None
            chunk_statistics, chunk_stats = pass_vocabulary(
                logits, chunk_target if teacher is None else teacher.parts(rows), spec, rows
            )
            statistics.append(chunk_statistics)
            stats += [] if chunk_stats is None else [chunk_stats]
            head_backward(
                student, low_rank, logits.values_NV, rows,
                gradient_ND=gradient_ND, head_gradient=head_gradient,
            )  # fmt: skip
        if low_rank is not None:
            adapter_backward(
                student, low_rank, gradient_ND=gradient_ND, head_gradient=head_gradient
            )
    return HeadLoss(
        hidden_gradient_ND=gradient_ND,
        statistics=concatenate_rows(statistics),
        divergence=concatenate_rows(stats) if stats else None,
    )


class _TargetLogits:
    """Logits of a target, a part of the rows at a time; each part takes the memory of the last."""

    def __init__(self, target: Projection | Extrapolation, size: int):
        self.target, self.size = target, size
        self.sides = _projections(target)
        self.low_rank = [project_low_rank(side) for side in self.sides]
        self.buffers = [allocate_logits(side, size) for side in self.sides]

    def parts(self, rows: slice) -> TeacherLogits:
        for first in range(rows.start, max(rows.start + 1, rows.stop), max(1, self.size)):
            part = slice(first, min(first + self.size, rows.stop))
            logits = [
                compute_logits(side, low_rank, part, buffer_PV)
                for side, low_rank, buffer_PV in zip(
                    self.sides, self.low_rank, self.buffers, strict=True
                )
            ]
            if isinstance(self.target, Extrapolation):
                yield part, _extrapolate(*logits, lam=self.target.lam)
            else:
                yield part, logits[0]


def _extrapolate(teacher: RawLogits, reference: RawLogits, *, lam: float) -> RawLogits:
    """Mixed logits: the normalizers of both cancel in the softmax of the mixture."""
    teacher_NV, reference_NV = (
        values_NV if side.softcap is None else side.softcap * (values_NV / side.softcap).tanh()
        for side in (teacher, reference)
        for values_NV in [side.scale * side.values_NV.to(_wide_dtype(side.values_NV))]
    )
    mixed_NV = lam * teacher_NV + (1 - lam) * reference_NV
    return RawLogits(values_NV=mixed_NV, scale=1.0, softcap=None)


def _wide_dtype(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


def choose_backend(weight_VD: Tensor, divergence: DivergenceSpec | None = None) -> Backend:
    """Triton on a GPU, in the dtypes and for the divergences it has kernels for."""
    fits = weight_VD.is_cuda and weight_VD.dtype in (torch.bfloat16, torch.float32)
    has_kernel = divergence is None or divergence.support or as_closed_form(divergence)
    return "triton" if fits and has_kernel and find_spec("triton") is not None else "torch"


def plan_chunks(
    student: Projection, *, teacher: bool, trained: bool, device: str | None = None
) -> ChunkPlan:
    """As many rows as the budget allows, in chunks of about equal size. `device`: plan for another
    type of device than the student's."""
    vocab_size = student.weight_VD.shape[0]
    num_rows = max(1, len(student.hidden_ND))
    row_bytes = student.weight_VD.element_size() * padded_vocab_size(vocab_size)
    if (device or student.weight_VD.device.type) == "cuda":
        tile, part_bytes = 128, CUDA_PART_BYTES
        rows = CUDA_ROWS if trained else CUDA_FROZEN_ROWS
        budget = max(2 * rows // student.weight_VD.element_size(), CUDA_BYTES // row_bytes)
    else:
        tile, part_bytes = 16, CPU_BYTES
        budget = CPU_BYTES // row_bytes
    # A trained head wants large chunks; the teacher's logits can come in smaller parts.
    part = 0
    if teacher:
        part = min(budget // 4, part_bytes // row_bytes) if trained else budget // 2
        part = _whole_tiles(part, tile)
    largest = _whole_tiles(budget - part, tile)
    num_chunks = -(-num_rows // largest)
    chunk = -(-num_rows // (num_chunks * tile)) * tile
    return ChunkPlan(chunk=chunk, part=min(part, chunk) if teacher else chunk)


def _whole_tiles(num_rows: int, tile: int) -> int:
    """Round down to whole GEMM tiles, at least one."""
    return max(1, num_rows // tile) * tile


def _projections(target: Target | None) -> tuple[Projection, ...]:
    if isinstance(target, Extrapolation):
        return target.teacher, target.reference
    return (target,) if isinstance(target, Projection) else ()


def _share_vocabulary(
    student: Projection, target: Target | None
) -> tuple[Projection, Target | None]:
    """All heads cut to the vocabulary they share."""
    vocab_size = min(len(side.weight_VD) for side in (student, *_projections(target)))

    def cut(side: Projection) -> Projection:
        low = side.low_rank
        return replace(
            side,
            weight_VD=side.weight_VD[:vocab_size],
            bias_V=None if side.bias_V is None else side.bias_V[:vocab_size],
            low_rank=low and replace(low, up_VR=low.up_VR[:vocab_size]),
        )

    if isinstance(target, Extrapolation):
        target = replace(target, teacher=cut(target.teacher), reference=cut(target.reference))
    elif isinstance(target, Projection):
        target = cut(target)
    return cut(student), target


def _check(student: Projection, target: Target | None, spec: HeadLossSpec) -> HeadLossSpec:
    """Per-row numbers in the dtype of the statistics."""
    num_rows = len(student.hidden_ND)
    assert spec.ids_N.shape == spec.temperature_N.shape == (num_rows,)
    assert spec.divergence is None or target is not None, "a divergence needs a teacher"
    if isinstance(target, TopKTarget):
        _check_top_k_target(target, spec, num_rows)
    for side in (student, *_projections(target)):
        assert len(side.hidden_ND) == num_rows
        if side.weight_VD.dtype == torch.float16:
            raise ValueError(
                "a head in float16: gradients by its logits are too small for float16. Use "
                "bfloat16 or float32"
            )
    dtype = _wide_dtype(student.weight_VD)
    return replace(
        spec,
        temperature_N=spec.temperature_N.to(dtype),
        weight_N=None if spec.weight_N is None else spec.weight_N.detach().to(dtype),
    )


def _check_top_k_target(target: TopKTarget, spec: HeadLossSpec, num_rows: int) -> None:
    assert len(target.ids_NK) == len(target.logp_NK) == num_rows
    support = None if spec.divergence is None else spec.divergence.support
    num_given = target.ids_NK.shape[-1]
    assert spec.divergence is None or support is not None, (
        "the teacher gives its top-k tokens only, and a divergence over the whole vocabulary needs "
        "its hidden states; use support = { kind = 'top_k' }"
    )
    assert support is None or support.of == "teacher", (
        f"support.of = {support.of!r} needs the teacher's log-probs of the student's tokens, and "
        "the teacher gives its own top-k only; use of = 'teacher'"
    )
    assert support is None or support.k <= num_given, (
        f"support.k = {support.k}, and the teacher gives its {num_given} most likely tokens"
    )
    assert not any(loss.baseline for loss in spec.sampled), (
        "a baseline needs KL(π‖q) over the whole vocabulary, and the teacher gives its top-k only"
    )


def load_backend(backend: Backend) -> VocabularyPass:
    """The pass over the vocabulary: statistics, and the gradient in place of the logits."""
    if backend == "torch":
        return vocabulary_pass_torch
    # Late: Triton is optional, and depends on the environment when it is imported.
    from courtside.losses.fused.triton_backend import vocabulary_pass_triton

    return vocabulary_pass_triton
