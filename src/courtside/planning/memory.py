"""Memory of one GPU by phase, as the code holds it.

Weights, gradients and moments are counted exactly. Activations follow from what the layer kernels
save (engines/kernels/layers_autograd.py), the LM head's logits from its chunks
(losses/fused/linear_divergence.py), the KV cache from its rows (engines/generation/kv_cache.py).
With several GPUs the student's states are sharded, and each rank has a whole sampler; teachers and
copies of the student are whole or in shards as `sharding.teachers` says (docs/distributed.md). Such
a plan was not compared with runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from courtside.planning.corrections import count_takeovers, list_questions
from courtside.planning.gpus import GIB
from courtside.planning.shapes import ModelShape
from courtside.planning.weights import (
    ITEM_SIZE,
    copy_bytes,
    held_teacher_bytes,
    is_in_shards,
    model_bytes,
    num_gathered_parameters,
)
from courtside.planning.workload import HINT_TOKENS, PASS_TOKENS, Workload
from courtside.recipe.teacher import SelfTeacherConfig
from courtside.training.kv_budget import DEFAULT_TOKENS, budget_kv_tokens, num_weight_copies

CUDA_CONTEXT = 0.55 * GIB
"""Driver, kernels and library handles: not in torch's numbers, and not for tensors."""
WORKSPACES = 0.25 * GIB
"""cuBLAS, Triton and CUDA graphs: above what tensors add up to in every measured phase."""
TURN_GRAPHS = 1.2 * GIB
"""CUDA graphs that prefill later turns: the memory that they work in stays theirs."""
ROW_STEP, POSITION_STEP = 8, 128
"""The KV cache's shape is rounded up to these."""
HEAD_ROWS = {True: 4608, False: 2048}
"""Rows of logits at once where the head is trained, and where it is frozen."""
MIN_HEAD_BYTES = 2**29
CPU_HEAD_BYTES = 9 * 2**24
STAGING_BYTES = 3 * 2 * 4 * 2**23
"""Of offloaded moments, on their way through the GPU."""
CPU_PROCESS_BYTES = 0.85 * GIB
"""Python, torch and the libraries of a run on a CPU, prepacked weights included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMemory:
    """What one GPU holds at the peak of a phase."""

    phase: str
    parts: Mapping[str, float]
    """Bytes by what they are for."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())


# ── what is always there ─────────────────────────────────────────────────────────────────────────


def resident_bytes(work: Workload) -> dict[str, float]:
    """Held in every phase."""
    models, recipe, shards = work.models, work.recipe, work.num_gpus
    student = model_bytes(models.student, models.base_dtype)
    parts = {
        "student weights": (student + 4 * (models.num_adapter or 0)) / shards,
        "sampler": sampler_bytes(work),
        "AdamW moments": 0.0 if _offloads(work) else 8 * models.num_trained / shards,
        "teacher weights": sum(held_teacher_bytes(work, t) for t in models.teachers),
        "copies of the student": num_copies(work) * copy_bytes(work),
    }
    if work.device.is_gpu:
        parts |= {"CUDA context": CUDA_CONTEXT, "workspaces": WORKSPACES}
        if work.lengths.turns > 1 and not recipe.tasks.is_recorded:
            parts["CUDA graphs of turns"] = TURN_GRAPHS
    else:
        parts["process"] = CPU_PROCESS_BYTES
    if recipe.train.optimizer_offload and not work.device.is_gpu:
        parts["AdamW moments"] = 8 * models.num_trained
    return {name: size for name, size in parts.items() if size}


def sampler_bytes(work: Workload) -> float:
    """The plain copy that samples and scores beside the shards, whole on each rank. With servers
    for rollouts it stays: it scores for a live teacher, and checks them."""
    if work.num_gpus == 1:
        return 0.0
    models = work.models
    item = 4 if _has_average(work) else ITEM_SIZE[models.dtype]
    return item * models.student.num_parameters + 4.0 * (models.num_adapter or 0)


def _has_average(work: Workload) -> bool:
    """Whether a teacher is a moving average, which takes float32 weights."""
    teachers = work.recipe.model_teachers
    return any(isinstance(t, SelfTeacherConfig) and t.weights == "ema" for t in teachers)


def num_copies(work: Workload) -> int:
    """Separate copies of the trained weights. With LoRA, frozen ones are the base without its
    adapter, and take none."""
    if work.models.num_adapter is None:
        return num_weight_copies(work.recipe)
    teachers = work.recipe.model_teachers
    return sum(isinstance(t, SelfTeacherConfig) and t.weights == "ema" for t in teachers)


def _offloads(work: Workload) -> bool:
    return work.recipe.train.optimizer_offload and work.device.is_gpu


def _casts(work: Workload) -> bool:
    """Whether bf16 copies of float32 weights are made: for decoding, and by autocast."""
    return work.models.dtype == "bfloat16" and work.models.num_adapter is None


# ── rollout ──────────────────────────────────────────────────────────────────────────────────────


def kv_cache_tokens(work: Workload) -> int:
    """`rollout.kv_cache_tokens`, resolved as the run would on this device."""
    if work.server_cache_tokens is not None:
        return int(work.server_cache_tokens)
    budget = work.recipe.rollout.kv_cache_tokens
    if budget != "auto":
        return budget
    if not work.device.is_gpu:
        return DEFAULT_TOKENS
    resident = resident_bytes(work)
    held = sum(
        resident.get(n, 0.0)
        for n in ("student weights", "sampler", "teacher weights", "AdamW moments")
    )
    # As the run counts them: a copy for each frozen or EMA teacher, LoRA or not.
    held += num_weight_copies(work.recipe) * 4 * work.models.num_trained
    return budget_kv_tokens(int(work.device.memory - held), kv_bytes_per_token(work))


def kv_bytes_per_token(work: Workload, shape: ModelShape | None = None) -> int:
    """Of the student, or a teacher of that shape. A CPU attends in float32; GPUs that decode
    together split the heads."""
    item = ITEM_SIZE[work.models.dtype] if work.device.is_gpu else 4
    shape = shape or work.models.student
    return max(1, shape.kv_elements_per_token * item // work.tensor_parallel)


def num_cache_rows(work: Workload, rows: float) -> int:
    """Of `rows` answers, those that are sampled at a time."""
    return min(max(1, round(rows)), max(1, int(kv_cache_tokens(work) // row_tokens(work))))


def row_tokens(work: Workload) -> float:
    """Positions that a row is given: an answer may be as long as `max_new_tokens`."""
    limits, lengths = work.recipe.rollout, work.lengths
    longest = max(lengths.new / lengths.turns, limits.max_new_tokens)
    return lengths.prompt + lengths.observed + lengths.turns * longest


def rollout_memory(work: Workload) -> PhaseMemory:
    parts = resident_bytes(work)
    num_student = work.num_student_rows if work.rollout_servers is None else 0.0
    num_teacher = work.num_teacher_rows * work.local_share
    is_teachers = num_student < num_teacher
    shape = work.models.scorer if is_teachers else work.models.student
    if num_sampled := max(num_student, num_teacher):
        rows = num_cache_rows(work, num_sampled / work.num_replicas)
        positions = row_tokens(work)
        if work.device.is_gpu:
            rows = -(-rows // ROW_STEP) * ROW_STEP
            positions = -(-int(positions) // POSITION_STEP) * POSITION_STEP
        parts["KV cache"] = rows * positions * kv_bytes_per_token(work, shape)
        # The sampler of several ranks is in bfloat16 already, unless an average keeps it float32.
        if _casts(work) and not is_teachers and (work.num_gpus == 1 or _has_average(work)):
            parts["bf16 weights"] = 2.0 * shape.num_parameters
        prefill = min(PASS_TOKENS[work.device.is_gpu], rows * work.lengths.prompt)
        parts["forward pass"] = max(
            prefill * pass_bytes_per_token(shape, work.models.dtype), 12.0 * rows * shape.vocab_size
        )
        if work.lengths.turns > 1:
            # A later turn's prefill gathers a layer's keys and values, and repeats them by head.
            repeats = 1 + shape.num_heads / shape.num_kv_heads
            parts["forward pass"] += repeats * parts["KV cache"] / shape.num_layers
        if work.num_mixed_rows:
            _add_teachers_cache(work, parts, rows)
    return PhaseMemory(phase="rollout", parts=parts)


def _add_teachers_cache(work: Workload, parts: dict[str, float], rows: int) -> None:
    """Mixed sampling holds two KV caches, within the budget of one where it is full, and the logits
    of both models."""
    shape, positions = work.models.scorer, row_tokens(work) + work.lengths.context
    rows = min(rows, max(1, int(kv_cache_tokens(work) // (row_tokens(work) + positions))))
    parts["teacher's KV cache"] = rows * positions * kv_bytes_per_token(work, shape)
    parts["KV cache"] = min(parts["KV cache"], rows * row_tokens(work) * kv_bytes_per_token(work))
    parts["forward pass"] += 12.0 * rows * shape.vocab_size


def writing_memory(
    work: Workload, phase: str, *, number: float, num_input: float, num_output: float
) -> PhaseMemory | None:
    """Of a teacher in this process that writes `number` texts. None: none does."""
    if not work.is_scored or not number:
        return None
    shape, parts = work.models.scorer, resident_bytes(work)
    positions = num_input + num_output
    on_rank = number * work.local_share / work.num_replicas
    rows = max(1, min(round(on_rank), int(kv_cache_tokens(work) // positions)))
    parts["KV cache"] = rows * positions * kv_bytes_per_token(work, shape)
    if _casts(work) and not work.models.teachers and (work.num_gpus == 1 or _has_average(work)):
        parts["bf16 weights"] = 2.0 * shape.num_parameters
    prefill = min(PASS_TOKENS[work.device.is_gpu], rows * num_input)
    parts["forward pass"] = max(
        prefill * pass_bytes_per_token(shape, work.models.dtype), 12.0 * rows * shape.vocab_size
    )
    return PhaseMemory(phase=phase, parts=parts)


def correction_memories(work: Workload) -> list[PhaseMemory]:
    """Of draft stages whose questions the teacher answers, and of take-overs."""
    memories = [
        writing_memory(
            work, "drafts", number=questions.number, num_input=questions.input_tokens,
            num_output=questions.output_tokens,
        )
        for questions in list_questions(work)
        if questions.num_concurrent is None
    ]  # fmt: skip
    largest = sorted(filter(None, memories), key=lambda memory: memory.total)[-1:]
    takeovers = count_takeovers(work)
    if takeovers is not None and takeovers.num_concurrent is None:
        taken_over = writing_memory(
            work, "take-over", number=takeovers.number,
            num_input=work.lengths.prompt + work.lengths.context + takeovers.prefix,
            num_output=takeovers.new + takeovers.observed,
        )  # fmt: skip
        return [*largest, *filter(None, [taken_over])]
    return largest


# ── teacher ──────────────────────────────────────────────────────────────────────────────────────


def target_bytes(work: Workload) -> float:
    """Hidden states of the teacher for each sampled token, until the update has used them."""
    if not work.is_scored or not work.needs_hidden or work.defers_hints:
        return 0.0
    if work.recipe.reader is None:
        tokens = sum(rows.number * rows.scored * rows.new for rows in work.rows)
    else:
        tokens = work.num_rows * work.lengths.context
        tokens += sum(r.number * r.scored * r.new for r in work.rows if not r.is_sampled)
    item = 4 if work.models.dtype == "float32" else 2
    return tokens * work.models.scorer.hidden_size * item / work.num_gpus


def pass_bytes_per_token(shape: ModelShape, dtype: str) -> float:
    """Of a forward pass without a backward pass: the widest point of one layer."""
    return ITEM_SIZE[dtype] * (3 * shape.intermediate_size + 4 * shape.hidden_size)


def branch_bytes(work: Workload, tokens: float) -> float:
    """Hints over a pass's trajectories: a layer's keys and values before each of them, gathered and
    repeated by head."""
    if work.recipe.reader is None:
        return 0.0
    shape, lengths = work.models.student, work.lengths
    turn = HINT_TOKENS + lengths.new / lengths.turns
    num_branches = lengths.context / turn * tokens / lengths.sequence
    repeats = 1 + shape.num_heads / shape.num_kv_heads
    item = ITEM_SIZE[work.models.dtype]
    return num_branches * lengths.sequence / 2 * 2 * shape.kv_size * item * repeats


def teacher_memory(work: Workload) -> PhaseMemory:
    parts = resident_bytes(work)
    if work.is_scored and work.num_scored_rows and not work.defers_hints:
        if _casts(work) and not work.models.teachers and work.num_gpus == 1:
            parts["bf16 weights"] = 2.0 * work.models.student.num_parameters
        parts["targets"] = target_bytes(work)
        extra = 0.0 if work.recipe.reader else work.lengths.context
        _, tokens = work.pack(PASS_TOKENS[work.device.is_gpu], work.num_scored_rows, extra)
        if work.recipe.reader is not None:
            parts["KV cache of trunks"] = tokens * kv_bytes_per_token(work)
            parts["keys of hints"] = branch_bytes(work, tokens)
        parts["forward pass"] = tokens * pass_bytes_per_token(work.models.scorer, work.models.dtype)
        parts["gathered layers"] = max(
            (
                2 * ITEM_SIZE[t.dtype] * t.shape.num_linear_parameters / t.shape.num_layers
                for t in work.models.teachers
                if is_in_shards(work, t)
            ),
            default=0.0,
        )
    return PhaseMemory(phase="teacher", parts={k: v for k, v in parts.items() if v})


# ── update ───────────────────────────────────────────────────────────────────────────────────────


def layer_bytes_per_token(work: Workload) -> float:
    """What one layer saves of a token for the backward pass."""
    shape, item = work.models.student, ITEM_SIZE[work.models.dtype]
    # float32 weights give a float32 residual stream; a frozen bf16 base gives a bf16 one.
    residual = 4 if work.models.num_adapter is None else item
    norms = shape.num_norms * shape.hidden_size * residual + 2 * shape.hidden_size * item
    # With norms of queries and keys, both are saved before and after.
    queries_keys = (2 if shape.head_norms else 1) * (shape.query_size + shape.kv_size) * item
    attention = (shape.kv_size + shape.query_size) * item
    mlp = 3 * shape.intermediate_size * item
    total = norms + queries_keys + attention + mlp
    if work.models.num_adapter is not None:
        # Each adapter saves its input in the dtype of the matmuls once more.
        total += item * sum(size for size, _ in shape.projections.values())
    return total


def activation_bytes(work: Workload, tokens: float) -> float:
    shape = work.models.student
    per_layer = layer_bytes_per_token(work)
    if not work.recipe.student.gradient_checkpointing:
        return shape.num_layers * per_layer * tokens
    residual = 4 if work.models.num_adapter is None else ITEM_SIZE[work.models.dtype]
    return shape.num_layers * residual * shape.hidden_size * tokens


def head_bytes(work: Workload, tokens: float) -> float:
    """Logits of student and teacher, a chunk at a time."""
    vocab, item = work.models.student.vocab_size, ITEM_SIZE[work.models.dtype]
    if not work.device.is_gpu:
        return CPU_HEAD_BYTES
    rows = 2 / item * HEAD_ROWS[work.models.trains_head]
    if work.recipe.train.logits_chunk_tokens is not None:
        rows = 2.0 * work.recipe.train.logits_chunk_tokens
    return min(max(rows * vocab * item, MIN_HEAD_BYTES), 2.0 * tokens * vocab * item)


def gradient_bytes(work: Workload, num_passes: int, tokens: float) -> float:
    """Held at the peak, where a pass's backward begins. Those of the first pass come into being as
    its activations go."""
    models = work.models
    gradients = 4.0 * models.num_trained
    if num_passes > 1:
        return gradients
    of_head = 4.0 * models.student.num_head_parameters if models.trains_head else 0.0
    return min(gradients, max(of_head, gradients - activation_bytes(work, tokens)))


def update_memory(work: Workload) -> PhaseMemory:
    parts = resident_bytes(work)
    models, shards = work.models, work.num_gpus
    num_passes, tokens = work.pack(work.micro_batch_tokens, work.num_trained_rows)
    parts["gradients"] = gradient_bytes(work, num_passes, tokens) / shards
    if _casts(work) and shards == 1:
        parts["bf16 weights"] = 2.0 * models.student.num_parameters
    if shards > 1:
        parts["gathered layers"] = gathered_bytes(work)
        if work.recipe.sharding.zero_stage == 1:  # whole until they are reduced
            parts["gradients"] += 4.0 * models.num_trained
        elif models.trains_head:
            # Reduced in the last pass, with the embedding's.
            parts["gradients"] += 4.0 * num_gathered_parameters(models.student)
    if work.defers_hints:
        parts["KV cache of trunks"] = tokens * kv_bytes_per_token(work)
    parts["targets"] = target_bytes(work)
    parts["activations"] = activation_bytes(work, tokens)
    # The head's chunks are gone before the layers' backward pass, where one layer is recomputed.
    transient = head_bytes(work, tokens)
    if work.defers_hints:
        transient = max(transient, branch_bytes(work, tokens))
    if work.recipe.student.gradient_checkpointing:
        transient = max(transient, layer_bytes_per_token(work) * tokens)
    parts["LM head and transients"] = transient
    if _offloads(work):
        parts["staged moments"] = STAGING_BYTES
    return PhaseMemory(phase="update", parts={k: v for k, v in parts.items() if v})


def gathered_bytes(work: Workload) -> float:
    """Sharded weights in use: two layers (one is prefetched) or all, and embedding with LM head, in
    the dtype that they are stored in, with bfloat16 copies of float32 ones."""
    shape = work.models.student
    num_layers = 2 if work.recipe.sharding.zero_stage == 3 else shape.num_layers
    layers = num_layers * shape.num_linear_parameters / shape.num_layers
    item = ITEM_SIZE.get(work.models.base_dtype, 2) + (2 if _casts(work) else 0)
    return item * (layers + num_gathered_parameters(shape))


def phase_memories(work: Workload) -> tuple[PhaseMemory, ...]:
    corrections = correction_memories(work)
    return (rollout_memory(work), *corrections, teacher_memory(work), update_memory(work))


def host_bytes(work: Workload) -> float:
    """Pinned main memory of offloaded moments."""
    return 8.0 * work.models.num_trained if _offloads(work) else 0.0
