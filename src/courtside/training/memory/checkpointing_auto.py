"""Whether passes of the update keep their activations, or compute them again on the way back.

Keeping is faster, where it fits. What a pass keeps is measured on a few tokens of the student as it
trains, so nothing here knows what a layer looks like. Values do not depend on it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from courtside.engines.forward.batching import default_pass_tokens
from courtside.engines.forward.logprobs import default_chunk_size
from courtside.engines.generation.kv_cache import MAX_IDLE_CACHE_BYTES
from courtside.engines.lm_head import LMHead
from courtside.losses.fused.linear_divergence import plan_chunks
from courtside.losses.fused.matmuls import padded_vocab_size
from courtside.losses.fused.types import Projection
from courtside.recipe import Recipe, SelfTeacherConfig, teachers_of
from courtside.training.offloaded_adamw import OffloadedAdamW
from courtside.training.student import Student

MARGIN = 0.1
"""Of what is left for activations: the way back has temporaries, and allocators waste some."""
TRIED_LENGTH = 128
"""Of the sequences that are tried."""
TRIED_SAMPLES = 8
"""At most, of a prompt as long as an answer: the keys that are laid out for each are then almost
as many more as they can be there, one for every token that is computed."""
HEAD_COPIES = 8
"""Of a chunk's logits in float32, where a loss goes through the head in autograd."""
ROWS = 3
"""In float32: the hidden states that are trained, their gradient, and the teacher's."""

FreeBytes = Callable[[torch.device], int | None]


def free_bytes(device: torch.device) -> int | None:
    """What a process can still have of its GPU; None: a CPU's is not asked for."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free) + unused


def choose_gradient_checkpointing(
    student: Student, free: FreeBytes, *, context_length: int
) -> str | None:
    """Where the recipe leaves it open: activations are computed again if they would not fit, and
    the reason is returned. Before the first step; other models are on the device already."""
    recipe, weights = student.recipe, student.weights
    if recipe.student.gradient_checkpointing != "auto":
        return None
    available = free(weights.device)
    if available is None:
        return None
    tokens = largest_pass(recipe, weights.device, context_length)
    kept = student_bytes_per_token(student, tokens, context_length)
    reserved = reserved_bytes(student, tokens)
    if not needs_checkpointing(kept, tokens, available, reserved):
        return None
    left = max(0, available - reserved)
    why = (
        f"a pass of {tokens:,} tokens would keep {_gib(kept * tokens)}, and {_gib(left)} are free "
        "for it"
    )
    if not weights.model.supports_gradient_checkpointing:
        return f"{why}; this model cannot compute activations again: lower train.micro_batch_tokens"
    weights.recompute()
    return f"activations are computed again: {why}"


def needs_checkpointing(kept: float, tokens: int, free: int, reserved: int) -> bool:
    """Whether a pass of so many tokens that keeps `kept` bytes of each does not fit into `free`
    bytes, of which `reserved` are for something else."""
    return kept * tokens > (1 - MARGIN) * (free - reserved)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"


# ── how large a pass can be ──────────────────────────────────────────────────────────────────────


def largest_pass(recipe: Recipe, device: torch.device, context_length: int) -> int:
    """Tokens: what was asked for, or the longest sequence (pair) that the recipe speaks of."""
    asked = recipe.train.micro_batch_tokens or default_pass_tokens(device)
    longest = min(recipe.rollout.limits.tokens or recipe.rollout.max_new_tokens, context_length)
    pair = any(loss.kind == "preference" for loss in recipe.losses)
    return max(asked, 2 * longest if pair else longest)


# ── what a pass keeps ────────────────────────────────────────────────────────────────────────────


class _Saved:
    """A tensor that some operation wants on the way back; gone when that is."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


def kept_bytes(forward: Callable[[], Tensor]) -> tuple[int, int]:
    """Bytes that a pass keeps for its way back, weights among them, each piece of memory once; and
    how many rows it gave."""
    saved: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def keep(tensor: Tensor) -> _Saved:
        # What an operation gave knows the operation, which would hold itself in memory so.
        held = _Saved(tensor.detach())
        saved.add(held)
        return held

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda s: s.tensor):
        out = forward()
    stores = (held.tensor.untyped_storage() for held in saved if held.tensor.device == out.device)
    sizes = {store.data_ptr(): store.nbytes() for store in stores}
    return sum(sizes.values()), len(out)


def kept_bytes_per_token(
    read: Callable[[Sequence[Sequence[int]]], Tensor],
    *,
    vocab_size: int,
    samples: int = 1,
    longest: int | None = None,
    length: int = TRIED_LENGTH,
) -> float:
    """Bytes that one more token keeps. `read`: sequences to hidden states [tokens computed, D].

    From passes over one group and over two, whose `samples` have the first half of their ids in
    common: so weights, buffers and rounded copies, which are kept once, cancel out. `longest`:
    measure, too, how it grows with the length of sequences, and say it of ones so long; None: it
    does not.
    """

    def kept(num_groups: int, length: int) -> tuple[int, int]:
        groups = (_group(n, samples, length, vocab_size) for n in range(num_groups))
        sequences = [ids for group in groups for ids in group]
        return kept_bytes(lambda: read(sequences))

    (once, few), (twice, more) = kept(1, length), kept(2, length)
    found = (twice - once) / (more - few)
    if longest is None:
        return found
    longer, as_many = kept(1, 2 * length)  # as many tokens as two groups, in longer sequences
    growth = max(0.0, (longer - twice) / (as_many * length))
    return found + growth * max(0, longest - length)


def _group(number: int, samples: int, length: int, vocab_size: int) -> list[list[int]]:
    """Sequences that have one half in common and nothing with other groups."""
    common = [(number + 7 * i) % vocab_size for i in range(length // 2)]
    return [
        [
            *common,
            *((number + 5 * n + 11 * i + 1) % vocab_size for i in range(length - len(common))),
        ]
        for n in range(samples)
    ]


def student_bytes_per_token(student: Student, tokens: int, context_length: int) -> float:
    """Of the student as it trains, whatever its layers, adapters and arithmetic."""
    passes = student.passes
    with student.training(step=0):
        return kept_bytes_per_token(
            lambda sequences: passes.forward(sequences)[0],
            vocab_size=student.head.vocab_size,
            samples=min(student.recipe.rollout.samples_per_prompt, TRIED_SAMPLES),
            # How long sequences become is not known: at worst a pass is one of them. That matters
            # where attention keeps scores or masks, and a GPU's own kernels keep neither.
            longest=min(tokens, context_length),
            length=min(TRIED_LENGTH, context_length // 2),
        )


# ── what else will want memory ───────────────────────────────────────────────────────────────────


def reserved_bytes(student: Student, tokens: int) -> int:
    """What does not exist yet and will while a later pass keeps its activations."""
    recipe, weights, head = student.recipe, student.weights, student.head
    trained = weights.trained().values()
    hidden_size = head.parameters()[0].shape[1]
    return (
        _steps_bytes(trained, student.optimizer)
        + num_weight_copies(recipe) * sum(p.nbytes for p in trained)
        + _rounded_bytes(weights.model, weights.autocast)
        + _head_bytes(head, tokens, weights.autocast, recipe.train.logits_chunk_tokens)
        + ROWS * 4 * tokens * hidden_size
        + MAX_IDLE_CACHE_BYTES
    )


def _steps_bytes(trained: Iterable[nn.Parameter], optimiser: torch.optim.Optimizer) -> int:
    """Gradients and the optimiser's two moments, where they do not exist yet."""
    trained = list(trained)
    gradients = sum(p.nbytes for p in trained if p.grad is None)
    if isinstance(optimiser, OffloadedAdamW):
        return gradients + optimiser.room_bytes
    return gradients + sum(2 * p.nbytes for p in trained if not optimiser.state.get(p))


def num_weight_copies(recipe: Recipe) -> int:
    """Teachers that are the student at another time: each a copy of what is trained, at most."""
    others = [
        t for t in teachers_of(recipe) if isinstance(t, SelfTeacherConfig) and t.weights != "live"
    ]
    return len(others) + recipe.needs_reference


def _rounded_bytes(model: Any, autocast: torch.dtype | None) -> int:
    """Rounded weights: autocast's, for the length of a step, and the sampler's, which stay."""
    if autocast is None:
        return 0
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    copies: int = sum(p.numel() * (1 + (p.dtype != autocast)) for p in matrices)
    return copies * autocast.itemsize


def _head_bytes(head: LMHead, tokens: int, autocast: torch.dtype | None, chunk: int | None) -> int:
    """Logits of a chunk, whichever way the losses go through the head."""
    weight_VD, _ = head.parameters()
    dtype = autocast or weight_VD.dtype
    size = min(tokens, chunk or default_chunk_size(head.vocab_size, weight_VD.device))
    in_autograd = HEAD_COPIES * 4 * size * head.vocab_size
    shapes = Projection(
        hidden_ND=torch.empty(tokens, weight_VD.shape[1], dtype=dtype, device="meta"),
        weight_VD=torch.empty(weight_VD.shape, dtype=dtype, device="meta"),
    )
    plan = plan_chunks(shapes, teacher=True, trained=True, device=weight_VD.device.type)
    rows = 2 * size if chunk else plan.chunk + plan.part
    return max(in_autograd, rows * padded_vocab_size(head.vocab_size) * dtype.itemsize)
