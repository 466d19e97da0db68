"""From hidden states and two LM heads to loss and gradients, without the logits of a whole batch.

Rows (positions) go through in chunks. For a chunk: two matmuls make the logits of student and
teacher; one pass over the vocabulary gives every statistic and, in place of the student's logits,
the gradient by them, without a graph; two more matmuls take that gradient to the hidden states and
the head. [rows × vocabulary] exists for one chunk, in the dtype of the heads; softmax and sums are
float32 or better.

The pass over the vocabulary is `triton_backend` on a GPU where it has kernels for the divergence,
and `torch_backend` for everything else; both compute the same formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from typing import TypeVar

import torch
from torch import Tensor

from courtside.losses.fused.torch_backend import TorchVocabularyPass
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
    RowStats,
    Target,
    TokenStatistics,
    TopKTarget,
    VocabularyPass,
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
MAX_UPCAST_ROWS = 4096
"""Vocabulary rows of the gradient by logits that exist in float32 at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlan:
    """How many rows at once."""

    chunk: int
    """Rows whose gradient by the logits exists at once. Each chunk adds to all of the head's
    gradient, so a trained head wants few of them."""
    part: int
    """Rows of a chunk whose teacher's logits exist at once."""


MakePass = Callable[[RawLogits, HeadLossSpec, slice], VocabularyPass]


def fused_linear_divergence(
    student: Projection,
    target: Target | None,
    spec: HeadLossSpec,
    *,
    head_gradient: HeadGradient | None = None,
    plan: ChunkPlan | None = None,
    backend: Backend | MakePass | None = None,
) -> HeadLoss:
    """Gradient by the student's hidden states, with all by-products; the gradient by its head is
    added to `head_gradient`.

    What `head_gradient` leaves out is frozen; without the weight's that saves one of the four
    matmuls. `target` = None: only sampled tokens matter, which saves another. `plan`, `backend` =
    None: chosen by size and device.
    """
    spec = _check(student, target, spec)
    num_rows = len(student.hidden_ND)
    # All heads are cut to the vocabulary they share.
    vocab_size = min(len(side.weight_VD) for side in (student, *_projections(target)))
    head_gradient = head_gradient or HeadGradient()
    plan = plan or plan_chunks(
        student,
        teacher=bool(_projections(target)),
        trained=head_gradient.weight_VD is not None,
    )
    make_pass = load_backend(
        backend or choose_backend(student.weight_VD, spec.divergence, target=target)
    )
    results: list[RowStats] = []
    with torch.no_grad(), torch.autocast(student.weight_VD.device.type, enabled=False):
        # Allocated once, for all chunks: what outlives a chunk must not lie between its
        # temporaries.
        gradient_ND = torch.empty_like(student.hidden_ND)
        matmuls = _HeadMatmuls(student, min(plan.chunk, num_rows), vocab_size, for_backward=True)
        target_parts = _TargetParts(target, min(plan.part, num_rows), vocab_size)
        for start in range(0, max(1, num_rows), plan.chunk):
            rows = slice(start, min(start + plan.chunk, num_rows))
            logits = matmuls.logits(rows)
            vocabulary_pass = make_pass(logits, spec, rows)
            for part, part_target in target_parts.within(rows):
                vocabulary_pass.run_part(part, part_target)
            results += vocabulary_pass.finish()
            matmuls.backward(logits.values_NV, rows, gradient_ND, head_gradient)
        matmuls.adapter_backward(gradient_ND, head_gradient)
    stats = [stats for _, stats in results if stats is not None]
    return HeadLoss(
        hidden_gradient_ND=gradient_ND,
        statistics=_concatenate([statistics for statistics, _ in results]),
        divergence=_concatenate(stats) if stats else None,
    )


Rows = TypeVar("Rows", TokenStatistics, DivergenceStats)


def _concatenate(parts: list[Rows]) -> Rows:
    together = {
        field.name: torch.cat([getattr(part, field.name) for part in parts])
        for field in fields(parts[0])
        if getattr(parts[0], field.name) is not None
    }
    return replace(parts[0], **together)


# ── chunks and backends ──────────────────────────────────────────────────────────────────────────


def choose_backend(
    weight_VD: Tensor, divergence: DivergenceSpec | None = None, *, target: Target | None = None
) -> Backend:
    """Triton on a GPU, in the dtypes and for the divergences it has kernels for."""
    if isinstance(target, TopKTarget) and target.num_student:
        return "torch"
    fits = weight_VD.is_cuda and weight_VD.dtype in (torch.bfloat16, torch.float32)
    has_kernel = divergence is None or divergence.support or divergence.closed_form
    return "triton" if fits and has_kernel and find_spec("triton") is not None else "torch"


def load_backend(backend: Backend | MakePass) -> MakePass:
    if callable(backend):
        return backend
    if backend == "torch":
        return TorchVocabularyPass
    # Late: Triton is optional, and depends on the environment when it is imported.
    from courtside.losses.fused import triton_backend

    return triton_backend.TritonVocabularyPass


def plan_chunks(
    student: Projection, *, teacher: bool, trained: bool, device: str | None = None
) -> ChunkPlan:
    """As many rows as the budget allows, in chunks of about equal size. `device`: plan for another
    type of device than the student's."""
    num_rows = max(1, len(student.hidden_ND))
    row_bytes = student.weight_VD.element_size() * _padded_vocab_size(len(student.weight_VD))
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


def _padded_vocab_size(vocab_size: int) -> int:
    """Rows start at multiples of 128 bytes, for vectorized loads and for the matmuls."""
    return -(-vocab_size // 64) * 64


# ── matmuls ──────────────────────────────────────────────────────────────────────────────────────


class _HeadMatmuls:
    """An LM head's matmuls: logits of some rows in a buffer, and the gradient by them back.

    A LoRA adapter of rank R on the head is a second, narrow pair of matmuls. The [rows, R]
    activations between the two are small enough to be computed once for all chunks; their gradient
    is gathered chunk by chunk and goes on to the hidden states and the adapter once, at the end.
    The sum of weight and adapter is never formed.
    """

    def __init__(
        self, side: Projection, num_rows: int, vocab_size: int, *, for_backward: bool = False
    ):
        self.side, self.vocab_size = side, vocab_size
        self.weight_VD = side.weight_VD[:vocab_size]
        self.bias_V = None if side.bias_V is None else side.bias_V[:vocab_size]
        buffer_NV = side.weight_VD.new_empty(num_rows, _padded_vocab_size(vocab_size))
        # oneDNN's matmuls with AMX read past the end of a row and multiply by zero (oneDNN issue
        # 5717), which leaves the NaNs of memory that was never written.
        buffer_NV[:, vocab_size:].zero_()
        self.buffer_NV = buffer_NV[:, :vocab_size]
        if (low := side.low_rank) is not None:
            self.up_VR = low.up_VR[:vocab_size]
            self.low_NR = torch.mm(self._operand(slice(None)), low.down_RD.t()) * low.scale
            if for_backward:
                self.low_gradient_NR = torch.empty_like(self.low_NR, dtype=_wide_dtype(self.low_NR))

    def logits(self, rows: slice) -> RawLogits:
        side, values_NV = self.side, self.buffer_NV[: rows.stop - rows.start]
        if self.bias_V is None:
            torch.mm(self._operand(rows), self.weight_VD.t(), out=values_NV)
        else:
            torch.addmm(self.bias_V, self._operand(rows), self.weight_VD.t(), out=values_NV)
        if side.low_rank is not None:
            values_NV.addmm_(self.low_NR[rows], self.up_VR.t())
        return RawLogits(values_NV=values_NV, scale=side.scale, softcap=side.softcap)

    def backward(
        self, gradient_CV: Tensor, rows: slice, gradient_ND: Tensor, head_gradient: HeadGradient
    ) -> None:
        """From the gradient by logits to those by hidden states (set) and by the head (added)."""
        _multiply(gradient_CV, self.weight_VD, gradient_ND[rows], add=False)
        gradient_VC = gradient_CV.t()
        if head_gradient.weight_VD is not None:
            weight_VD = head_gradient.weight_VD[: self.vocab_size]
            _multiply(gradient_VC, self._operand(rows), weight_VD, add=True)
        if head_gradient.bias_V is not None:
            bias_V = head_gradient.bias_V[: self.vocab_size]
            bias_V.add_(gradient_CV.sum(0, dtype=bias_V.dtype))
        if self.side.low_rank is None:
            return
        _multiply(gradient_CV, self.up_VR, self.low_gradient_NR[rows], add=False)
        if head_gradient.up_VR is not None:
            up_VR = head_gradient.up_VR[: self.vocab_size]
            _multiply(gradient_VC, self.low_NR[rows], up_VR, add=True)

    def adapter_backward(self, gradient_ND: Tensor, head_gradient: HeadGradient) -> None:
        """From the gradient by the low-rank activations of all rows; both results are added to."""
        if (low := self.side.low_rank) is None:
            return
        gradient_NR = (self.low_gradient_NR * low.scale).to(low.down_RD.dtype)
        _multiply(gradient_NR, low.down_RD, gradient_ND, add=True)
        if head_gradient.down_RD is not None:
            hidden_ND = self._operand(slice(None))
            _multiply(gradient_NR.t(), hidden_ND, head_gradient.down_RD, add=True)

    def _operand(self, rows: slice) -> Tensor:
        return self.side.hidden_ND[rows].to(self.side.weight_VD.dtype)


def _multiply(first: Tensor, second: Tensor, out: Tensor, *, add: bool) -> None:
    if out.dtype == first.dtype:
        torch.addmm(out, first, second, out=out) if add else torch.mm(first, second, out=out)
    elif first.is_cuda and first.dtype == torch.bfloat16 and out.dtype == torch.float32:
        # One matmul that accumulates in float32, from operands that stay in bfloat16.
        if add:
            torch.addmm(out, first, second, out_dtype=torch.float32, out=out)
        else:
            torch.mm(first, second, out_dtype=torch.float32, out=out)
    elif add:
        second = second.to(out.dtype)
        blocks = zip(first.split(MAX_UPCAST_ROWS), out.split(MAX_UPCAST_ROWS), strict=True)
        for block, out_block in blocks:
            out_block.addmm_(block.to(out.dtype), second)
    else:
        out.copy_(torch.mm(first, second))


# ── targets ──────────────────────────────────────────────────────────────────────────────────────


class _TargetParts:
    """A target's logits, a part of the rows at a time; each part takes the memory of the last."""

    def __init__(self, target: Target | None, size: int, vocab_size: int):
        self.target, self.size = target, max(1, size)
        self.sides = [_HeadMatmuls(side, size, vocab_size) for side in _projections(target)]

    def within(self, rows: slice) -> Iterator[tuple[slice, RawLogits | TopKTarget | None]]:
        if self.target is None or isinstance(self.target, TopKTarget):
            yield rows, None if self.target is None else self.target[rows]
            return
        for first in range(rows.start, max(rows.start + 1, rows.stop), self.size):
            part = slice(first, min(first + self.size, rows.stop))
            logits = [side.logits(part) for side in self.sides]
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
    # q^λ is 0 where q is, also where ref^(1−λ) is infinite.
    mixed_NV.masked_fill_(teacher_NV == -math.inf, -math.inf)
    return RawLogits(values_NV=mixed_NV, scale=1.0, softcap=None)


def _wide_dtype(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


def _projections(target: Target | None) -> tuple[Projection, ...]:
    if isinstance(target, Extrapolation):
        return target.teacher, target.reference
    return (target,) if isinstance(target, Projection) else ()


def _check(student: Projection, target: Target | None, spec: HeadLossSpec) -> HeadLossSpec:
    """Per-row numbers in the dtype of the statistics."""
    num_rows = len(student.hidden_ND)
    assert spec.ids_N.shape == spec.temperature_N.shape == (num_rows,)
    assert spec.weight_N is None or spec.weight_N.shape == (num_rows,)
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
    assert spec.divergence is None or support is not None, (
        "the teacher gives its top-k tokens only, and a divergence over the whole vocabulary needs "
        "its hidden states; use support = { kind = 'top_k' }"
    )
    assert support is None or support.of == "teacher" or support.k <= target.num_student, (
        f"support.of = {support.of!r} needs the teacher's log-probs of the student's tokens, and "
        f"the teacher gives {target.num_student} of them; use of = 'teacher'"
    )
    assert support is None or support.of == "student" or support.k <= target.num_teacher, (
        f"support.k = {support.k}, and the teacher gives its {target.num_teacher} most likely "
        "tokens"
    )
    assert not any(loss.baseline for loss in spec.sampled), (
        "a baseline needs KL(π‖q) over the whole vocabulary, and the teacher gives its top-k only"
    )
