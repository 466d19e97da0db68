"""One path from hidden states and two heads to loss and gradients: the divergence head.

Rows go through in chunks. For a chunk: two matrix products make the logits of student and teacher;
one pass over them gives every statistic and, in place of the student's logits, the gradient by
them, in closed form and without a graph; two more products take that gradient to the hidden states
and the head. [rows × words] exists for one chunk, in the dtype of the heads; softmax and sums are
float32 or better.

The pass over the words is `fused_triton` on a GPU and `fused_words` (torch) elsewhere, or
where Triton is not installed; both compute the same formulas, which `fused_words` states.

Not here: words masked with −inf, a cap on the contribution of each of all words, targets mixed from
several models. `full` and `top_k` have those, as functions of log-probs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch
from torch import Tensor

from courtside.losses.fused.matmuls import (
    LowRankActivations,
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
    DivergenceStats,
    HeadGradient,
    HeadLoss,
    HeadLossSpec,
    Projection,
    RawLogits,
    TeacherLogits,
    TokenStatistics,
    concatenate_fields,
)

CPU_BYTES = 9 * 2**24
"""For the logits of one chunk: 512 + 256 rows of 49152 words in float32. Products run well."""
CUDA_ROWS = 4608
"""On a GPU: so many rows of logits in 16 bits where the head trains, 1.3 GiB of 151936 words. Each
chunk reads and writes the head's whole gradient once, which at hidden size 1024 costs as much as a
fifth of the products."""
CUDA_FROZEN_ROWS = 2048
"""And where it does not: nothing is gained by more."""
CUDA_BYTES = 2**29
"""But at least this: a chunk of a small head must be worth its launches."""
CUDA_PART_BYTES = 5 * 2**25
"""The teacher's part of it: 512 rows of 151936 words in bfloat16. Products of fewer run worse, and
four rows for each multiprocessor of an H200 are what its kernel has at a time."""


VocabularyPass = Callable[
    [RawLogits, TeacherLogits | None, HeadLossSpec, slice],
    tuple[TokenStatistics, DivergenceStats | None],
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlan:
    """How many rows at once."""

    chunk: int
    """Whose gradient by the logits is held. Each chunk adds to all of the head's gradient once,
    so a trained head wants few of them."""
    part: int
    """Of a chunk: whose teacher's logits are held."""


def fused_linear_divergence(
    student: Projection,
    teacher: Projection | None,
    asked: HeadLossSpec,
    *,
    into: HeadGradient | None = None,
    plan: ChunkPlan | None = None,
    backend: Backend | None = None,
) -> HeadLoss:
    """Gradient by the student's hidden states, with all by-products; `into` gets the head's own.

    What `into` leaves out is frozen; without the weight's that saves one of the four matrix
    products. `teacher` = None: only sampled words matter, which saves another. `plan`, `backend` =
    None: chosen here.
    """
    student, teacher = _same_words(student, teacher)
    asked = _checked(student, teacher, asked)
    num_rows = len(student.hidden_ND)
    into = into or HeadGradient()
    trained = into.weight_VD is not None
    plan = plan or plan_chunks(student, teacher=teacher is not None, trained=trained)
    backend = backend or choose_backend(student.weight_VD)
    words = load_backend(backend)
    # Reserved at once, for all chunks: see the module's contract.
    gradient_ND = torch.empty_like(student.hidden_ND)
    chunk_CV = allocate_logits(student, min(plan.chunk, num_rows))
    teacher_PV = allocate_logits(teacher or student, min(plan.part, num_rows) if teacher else 0)
    statistics: list[TokenStatistics] = []
    found: list[DivergenceStats] = []
    with torch.no_grad(), torch.autocast(gradient_ND.device.type, enabled=False):
        narrow = project_low_rank(student, gradient=True)
        teacher_narrow = None if teacher is None else project_low_rank(teacher)
        for start in range(0, max(1, num_rows), plan.chunk):
            end = min(start + plan.chunk, num_rows)
            rows = slice(start, end)
            own = compute_logits(student, narrow, rows, chunk_CV)
            parts = None
            if teacher is not None:
                parts = _in_parts(teacher, teacher_narrow, rows, plan.part, teacher_PV)
            here, there = words(own, parts, asked, rows)
            statistics.append(here)
            found += [] if there is None else [there]
            head_backward(student, narrow, own.values_NV, rows, gradient_ND=gradient_ND, into=into)
        if narrow is not None:
            adapter_backward(student, narrow, gradient_ND=gradient_ND, into=into)
    return HeadLoss(
        hidden_gradient_ND=gradient_ND,
        statistics=concatenate_fields(statistics),
        found=concatenate_fields(found) if found else None,
    )


def _in_parts(
    teacher: Projection, narrow: LowRankActivations | None, rows: slice, size: int, room_PV: Tensor
) -> TeacherLogits:
    for first in range(rows.start, max(rows.start + 1, rows.stop), size):
        part = slice(first, min(first + size, rows.stop))
        yield part, compute_logits(teacher, narrow, part, room_PV)


def choose_backend(weight_VD: Tensor) -> Backend:
    """Kernels on a GPU, in the dtypes they are written for."""
    fits = weight_VD.is_cuda and weight_VD.dtype in (torch.bfloat16, torch.float32)
    return "triton" if fits and find_spec("triton") is not None else "torch"


def plan_chunks(
    student: Projection, *, teacher: bool, trained: bool, device: str | None = None
) -> ChunkPlan:
    """As many rows as the budget allows, in chunks of about equal size. `device`: a kind of device
    other than the student's own."""
    vocab_size = student.weight_VD.shape[0]
    num_rows = max(1, len(student.hidden_ND))
    row_bytes = student.weight_VD.element_size() * padded_vocab_size(vocab_size)
    if (device or student.weight_VD.device.type) == "cuda":
        tile, part_bytes = 128, CUDA_PART_BYTES
        rows = CUDA_ROWS if trained else CUDA_FROZEN_ROWS
        held = max(2 * rows // student.weight_VD.element_size(), CUDA_BYTES // row_bytes)
    else:
        tile, part_bytes = 16, CPU_BYTES
        held = CPU_BYTES // row_bytes
    # A trained head wants large chunks; its teacher's logits can come in smaller parts.
    part = 0
    if teacher:
        part = min(held // 4, part_bytes // row_bytes) if trained else held // 2
        part = _whole_tiles(part, tile)
    most = _whole_tiles(held - part, tile)
    num_chunks = -(-num_rows // most)
    chunk = -(-num_rows // (num_chunks * tile)) * tile
    return ChunkPlan(chunk=chunk, part=min(part, chunk) if teacher else chunk)


def _whole_tiles(num_rows: int, tile: int) -> int:
    """Of the matrix products: as many as fit, but one."""
    return max(1, num_rows // tile) * tile


def _same_words(
    student: Projection, teacher: Projection | None
) -> tuple[Projection, Projection | None]:
    """Both heads cut to the words they share."""
    if teacher is None:
        return student, None
    vocab_size = min(len(student.weight_VD), len(teacher.weight_VD))
    cut_student, cut_teacher = (
        replace(
            side,
            weight_VD=side.weight_VD[:vocab_size],
            bias_V=None if side.bias_V is None else side.bias_V[:vocab_size],
            low_rank=side.low_rank
            and replace(side.low_rank, up_VR=side.low_rank.up_VR[:vocab_size]),
        )
        for side in (student, teacher)
    )
    return cut_student, cut_teacher


def _checked(student: Projection, teacher: Projection | None, asked: HeadLossSpec) -> HeadLossSpec:
    """Per-row numbers in the dtype of the statistics."""
    num_rows = len(student.hidden_ND)
    assert asked.ids_N.shape == asked.temperature_N.shape == (num_rows,)
    assert teacher is None or len(teacher.hidden_ND) == num_rows
    assert asked.divergence is None or teacher is not None, "a divergence needs a teacher"
    for side in (student, teacher):
        if side is not None and side.weight_VD.dtype == torch.float16:
            raise ValueError(
                "a head in float16: gradients by its logits are too small for float16. Use "
                "bfloat16 or float32"
            )
    dtype = torch.promote_types(student.weight_VD.dtype, torch.float32)
    sampled = asked.sampled
    return replace(
        asked,
        temperature_N=asked.temperature_N.to(dtype),
        weight_N=None if asked.weight_N is None else asked.weight_N.detach().to(dtype),
        sampled=sampled.detach().to(dtype) if isinstance(sampled, Tensor) else sampled,
    )


def load_backend(backend: Backend) -> VocabularyPass:
    """The pass over the words: statistics, and the gradient in place of the student's logits."""
    if backend == "torch":
        return vocabulary_pass_torch
    # Late: Triton is optional, and reads its environment when it is imported.
    from courtside.losses.fused.triton_backend import vocabulary_pass_triton

    return vocabulary_pass_triton
