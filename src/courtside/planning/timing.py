"""Seconds of a step: decoding by a roofline over memory bandwidth, all else by matmul throughput.

Seven numbers say how well a device is used. Those of GPUs were fitted on measurements of one H200,
those of CPUs on two cores; docs/plan.md has every row and what it was off by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from courtside.planning.corrections import count_takeovers, list_questions, ranks_by_teacher
from courtside.planning.flops import (
    PhaseFlops,
    answer_flops,
    attention_flops,
    local_scoring_flops,
    ranking_flops,
    reader_flops,
    served_scoring_flops,
    update_flops,
)
from courtside.planning.memory import kv_bytes_per_token, kv_cache_tokens, num_cache_rows
from courtside.planning.servers import list_teacher_places, on_servers
from courtside.planning.shapes import ModelShape
from courtside.planning.weights import ITEM_SIZE, find_sharded_scorer, seconds_to_gather
from courtside.planning.workload import PASS_TOKENS, Lengths, TeacherModel, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilisation:
    """How well a kind of device is used, whatever the model."""

    matmul: float
    """Share of the dense bf16 rate in the matmuls of prefill, scoring and update."""
    attention: float
    """The same for attention over whole sequences."""
    bandwidth: float
    """Share of the memory bandwidth at which a decode step reads weights and KV cache."""
    decode_layer_seconds: float
    """Of a decode step, for each layer: kernels that do not grow with the model."""
    pass_layer_seconds: float
    """Of a forward pass, for each layer; a backward pass takes twice that, and so on. Norms,
    gathers and launches, which do not grow with the model's width."""
    sampler_passes: float
    """How often a decode step goes through its float32 logits."""
    shared_reads: float
    """Of a prompt that several rows share, the share that each row reads again: all but the first
    find the rest in the L2 cache."""
    source: str


GPU_UTILISATION = Utilisation(
    matmul=0.65,
    attention=0.28,
    bandwidth=0.9,
    decode_layer_seconds=56e-6,
    pass_layer_seconds=1.1e-3,
    sampler_passes=16.0,
    shared_reads=0.3,
    source="defaults, fitted on one H200",
)
CPU_UTILISATION = Utilisation(
    matmul=0.6,
    attention=0.6,
    bandwidth=0.6,
    decode_layer_seconds=0.6e-3,
    pass_layer_seconds=0.5e-3,
    sampler_passes=10.0,
    shared_reads=1.0,
    source="defaults, fitted on two cores of an EPYC with avx512_bf16",
)
RECORD_SECONDS = 1.2e-6
"""A token, for storing trajectories and metrics after a step."""
TURN_SECONDS = 1e-3
"""Of an episode, for each later turn: its environment and the rendering of its messages."""
HOST_LINK_SHARE = 0.8
ALL_REDUCE_SECONDS = 20e-6
"""Latency of one between the GPUs of a machine; two a layer and decode step."""


def default_utilisation(work: Workload) -> Utilisation:
    return GPU_UTILISATION if work.device.is_gpu else CPU_UTILISATION


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of each phase of a step, and of one evaluation."""

    phases: Mapping[str, float]
    evaluation: float
    teacher_evaluation: float


def matmul_rate(work: Workload, use: Utilisation) -> float:
    """FLOP/s of all GPUs together. float32 takes twice the time, on CPUs as by TF32."""
    slower = 2.0 if work.models.dtype == "float32" else 1.0
    return use.matmul * work.device.flops * work.num_gpus / slower


def find_sampler(work: Workload) -> Workload:
    """The GPUs that sample."""
    return work if work.rollout_servers is None else on_servers(work, work.rollout_servers)


def execution_seconds(flops: PhaseFlops, work: Workload, use: Utilisation) -> float:
    """Of matmuls and attention, each at its rate."""
    matmuls = flops.executed - flops.attention
    return (matmuls + flops.attention * use.matmul / use.attention) / matmul_rate(work, use)


def decode_seconds(
    shape: ModelShape,
    work: Workload,
    use: Utilisation,
    *,
    rows: float,
    new: float,
    group_size: int,
) -> float:
    """`rows` answers of `new` tokens, as many of them at a time as the KV cache holds."""
    device, shards = work.device, work.tensor_parallel
    rows = rows / work.num_replicas
    item = ITEM_SIZE[work.models.dtype]
    busy = min(float(num_cache_rows(work, rows)), rows)
    rounds = rows / busy if busy else 0.0
    if new / work.lengths.turns >= work.recipe.rollout.max_new_tokens:
        rounds = ceil(rounds)  # rows that all end together leave none free in between
    steps = new * rounds
    weights = item * (shape.num_linear_parameters + shape.num_head_parameters)
    read_again = 1 / group_size + (1 - 1 / group_size) * use.shared_reads
    after_prompt = new / 2 + work.lengths.observed / 2
    positions = busy * (work.lengths.prompt * read_again + after_prompt)
    cached = positions * kv_bytes_per_token(work, shape)
    sampled = use.sampler_passes * 4 * busy * shape.vocab_size / shards
    read = (weights / shards + cached) / (use.bandwidth * device.bandwidth)
    seconds = read + sampled / device.bandwidth + shape.num_layers * use.decode_layer_seconds
    per_row = 2.0 * (shape.num_linear_parameters + shape.num_head_parameters)
    per_row += attention_flops(shape, work.lengths.prompt + after_prompt)
    seconds += busy * per_row * work.num_replicas / matmul_rate(work, use)
    if shards > 1:
        seconds += 2 * shape.num_layers * ALL_REDUCE_SECONDS
    return steps * seconds


def _prefill_seconds(
    shape: ModelShape, work: Workload, use: Utilisation, *, prompts: float, rows: float
) -> float:
    """Prompts, and later the messages of an environment, a pass or more for each turn."""
    lengths = work.lengths
    tokens = prompts * lengths.prompt + rows * lengths.observed
    flops = PhaseFlops(
        layers=2.0 * shape.num_linear_parameters * tokens,
        attention=attention_flops(shape, prompts * lengths.prompt**2 / 2),
    )
    in_pass = PASS_TOKENS[work.device.is_gpu]
    passes = max(lengths.turns, tokens / in_pass / work.num_gpus)
    overhead = passes * shape.num_layers * use.pass_layer_seconds
    return execution_seconds(flops, work, use) + overhead


def rollout_seconds(work: Workload, use: Utilisation) -> float:
    total = mixed_sampling_seconds(work, use)
    num_student = work.num_student_rows - work.num_mixed_rows
    samplers = [
        (find_sampler(work), work.models.student, num_student),
        *((p.work, p.shape, p.share * work.num_teacher_rows) for p in list_teacher_places(work)),
    ]
    for place, shape, rows in samplers:
        if rows:
            total += _prefill_seconds(shape, place, use, prompts=rows / work.group_size, rows=rows)
            total += TURN_SECONDS * rows * (work.lengths.turns - 1)
            total += decode_seconds(
                shape, place, use, rows=rows, new=work.lengths.new,
                group_size=work.group_size,
            )  # fmt: skip
    return total


def mixed_sampling_seconds(work: Workload, use: Utilisation) -> float:
    """Two models decode eagerly, one after the other; each layer is launched as in a forward pass.
    Both KV caches share one budget, so half as many rows are decoded at a time."""
    if not (rows := work.num_mixed_rows):
        return 0.0
    eager = replace(use, decode_layer_seconds=max(use.decode_layer_seconds, use.pass_layer_seconds))
    lengths, rollout = work.lengths, work.recipe.rollout
    halved = rollout.model_copy(update={"kv_cache_tokens": max(1, kv_cache_tokens(work) // 2)})
    half = replace(work, recipe=work.recipe.model_copy(update={"rollout": halved}))
    total = 0.0
    for shape, context in ((work.models.student, 0.0), (work.models.scorer, lengths.context)):
        alone = replace(half, lengths=replace(lengths, prompt=lengths.prompt + context))
        total += _prefill_seconds(shape, alone, use, prompts=rows / work.group_size, rows=rows)
        total += decode_seconds(shape, alone, eager, rows=rows, new=lengths.new, group_size=1)
    return total


def _pass_seconds(
    flops: PhaseFlops, shape: ModelShape, work: Workload, use: Utilisation, *, limit: int,
    num_rows: float,
    num_forward: float,
    extra: float = 0.0,
) -> float:  # fmt: skip
    """`num_forward`: forward passes that one costs as much as; a backward pass counts as two."""
    passes, _ = work.pack(limit, num_rows, extra)
    overhead = passes * shape.num_layers * use.pass_layer_seconds * num_forward
    return execution_seconds(flops, work, use) + overhead


def reader_seconds(work: Workload, use: Utilisation) -> float:
    config = work.student_reader
    if config is None:
        return 0.0
    flops = reader_flops(work)
    prefill = flops.executed * flops.input_tokens / (flops.input_tokens + flops.output_tokens)
    return prefill / matmul_rate(work, use) + decode_seconds(
        work.models.student, work, use, rows=work.num_rows,
        new=config.max_new_tokens, group_size=1,
    )  # fmt: skip


def drafts_seconds(work: Workload, use: Utilisation) -> float:
    """Of draft stages. An endpoint's calls take what `call_seconds` says."""
    seconds = 0.0
    if ranks_by_teacher(work):
        seconds += served_scoring_seconds(work, use, work.num_student_rows)
    if ranks_by_teacher(work) and work.local_share:
        seconds += (
            _pass_seconds(
                ranking_flops(replace(work, teacher_servers=None)),
                work.models.scorer,
                work,
                use,
                limit=PASS_TOKENS[work.device.is_gpu],
                num_rows=work.num_student_rows,
                num_forward=1,
                extra=work.lengths.context,
            )
            * work.local_share
        )
    for questions in list_questions(work):
        if questions.num_concurrent is not None:
            rounds = questions.number / questions.num_concurrent
            seconds += rounds * (work.rates.call_seconds or 0.0)
        else:
            lengths = Lengths(prompt=questions.input_tokens, new=max(1, questions.output_tokens))
            seconds += _writing_seconds(work, use, questions.number, lengths)
    return seconds


def takeover_seconds(work: Workload, use: Utilisation) -> float:
    if (takeovers := count_takeovers(work)) is None:
        return 0.0
    if takeovers.num_concurrent is not None:
        rounds = takeovers.number * takeovers.turns / takeovers.num_concurrent
        return rounds * (work.rates.call_seconds or 0.0)
    lengths = work.lengths
    share = takeovers.new / lengths.new
    played = Lengths(
        prompt=lengths.prompt + lengths.context + takeovers.prefix,
        new=max(1.0, takeovers.new),
        observed=takeovers.observed,
        turns=max(1.0, lengths.turns * share),
    )
    seconds = _writing_seconds(work, use, takeovers.number, played)
    return seconds + TURN_SECONDS * takeovers.number * (played.turns - 1)


def _writing_seconds(work: Workload, use: Utilisation, number: float, lengths: Lengths) -> float:
    """Of teachers, here or on their servers, that write `number` texts after prompts of their
    own."""
    seconds = 0.0
    for place in list_teacher_places(work):
        if rows := place.share * number:
            shape, alone = place.shape, replace(place.work, lengths=lengths)
            seconds += _prefill_seconds(shape, alone, use, prompts=rows, rows=rows)
            seconds += decode_seconds(shape, alone, use, rows=rows, new=lengths.new, group_size=1)
            if not place.is_served:
                seconds += sharded_decode_seconds(alone, rows=rows, new=lengths.new)
    return seconds


def teacher_seconds(work: Workload, use: Utilisation) -> float:
    served = served_scoring_seconds(work, use, work.num_scored_rows)
    scores = work.is_scored and work.num_scored_rows > 0
    if not scores and not work.recipe.needs_reference:
        return served
    limit = PASS_TOKENS[work.device.is_gpu]
    # Hints before the update: the trunks' passes, and those of their branches.
    is_tree = work.recipe.reader is not None and not work.defers_hints
    num_rows = work.num_scored_rows * work.local_share if scores else work.num_all_rows
    seconds = _pass_seconds(
        local_scoring_flops(work),
        work.models.scorer,
        work,
        use,
        limit=limit,
        num_rows=num_rows,
        num_forward=2 if is_tree else 1,
        extra=0.0 if work.recipe.reader else work.lengths.context,
    )
    if (sharded := find_sharded_scorer(work)) is not None:
        seconds += _gather_seconds(work, sharded, limit, num_rows, times=1)
    return served + seconds


def served_scoring_seconds(work: Workload, use: Utilisation, num_rows: float) -> float:
    if work.teacher_servers is None:
        return 0.0
    servers = on_servers(work, work.teacher_servers)
    return execution_seconds(served_scoring_flops(work, num_rows), servers, use)


def update_seconds(work: Workload, use: Utilisation) -> float:
    shape, recipe, device = work.models.student, work.recipe, work.device
    num_forward = 4 if recipe.student.gradient_checkpointing else 3
    limit = work.micro_batch_tokens
    num_rows = work.num_trained_rows
    seconds = _pass_seconds(
        update_flops(work), shape, work, use, limit=limit, num_rows=num_rows,
        num_forward=num_forward,
    )  # fmt: skip
    trained = work.models.num_trained / work.num_gpus
    # Weight, gradient and two moments in float32, read and written.
    seconds += 28.0 * trained / (use.bandwidth * device.bandwidth)
    if recipe.train.optimizer_offload and device.is_gpu:
        seconds += 8.0 * trained / (HOST_LINK_SHARE * device.host_link)
    # Forward, backward and the reduced gradients.
    student = TeacherModel(model="student", shape=shape, dtype=work.models.base_dtype)
    return seconds + _gather_seconds(work, student, limit, num_rows, times=num_forward)


def _gather_seconds(
    work: Workload, model: TeacherModel, limit: int, num_rows: float, *, times: float
) -> float:
    """Sharded weights are gathered in every pass; nothing of it is hidden behind the matmuls."""
    passes, _ = work.pack(limit, num_rows)
    return passes * times * seconds_to_gather(work, model)


def sharded_decode_seconds(work: Workload, *, rows: float, new: float) -> float:
    """A sharded teacher that samples gathers all of its weights for each token."""
    if (teacher := find_sharded_scorer(work)) is None or not rows:
        return 0.0
    on_rank = rows / work.num_gpus
    batches = -(-on_rank // num_cache_rows(work, on_rank))
    return batches * new * seconds_to_gather(work, teacher)


def evaluation_seconds(work: Workload, use: Utilisation, *, by_teacher: bool) -> float:
    if not by_teacher:
        return _answer_seconds(work.models.student, find_sampler(work), use)
    places = list_teacher_places(work)
    seconds = sum(p.share * _answer_seconds(p.shape, p.work, use) for p in places)
    rows = float(work.recipe.evaluate.num_tasks * work.recipe.evaluate.samples_per_task)
    new = work.lengths.evaluated or work.lengths.new
    return seconds + sharded_decode_seconds(work, rows=rows * work.local_share, new=new)


def _answer_seconds(shape: ModelShape, work: Workload, use: Utilisation) -> float:
    """Of a model that answers the tasks of an evaluation."""
    config = work.recipe.evaluate
    rows = float(config.num_tasks * config.samples_per_task)
    lengths = work.lengths
    new = lengths.new if lengths.evaluated is None else lengths.evaluated
    tokens = rows * lengths.prompt
    flops = answer_flops(work, shape, 0)
    prefill = flops.layers * lengths.prompt / (lengths.prompt + new) / matmul_rate(work, use)
    passes = max(lengths.turns, tokens / PASS_TOKENS[work.device.is_gpu])
    prefill += passes * shape.num_layers * use.pass_layer_seconds
    return prefill + decode_seconds(shape, work, use, rows=rows, new=new, group_size=1)


def estimate_seconds(work: Workload, use: Utilisation) -> Timing:
    recipe = work.recipe
    phases = {
        "rollout": rollout_seconds(work, use),
        "drafts": drafts_seconds(work, use),
        "reader": reader_seconds(work, use),
        "teacher": takeover_seconds(work, use) + teacher_seconds(work, use),
        "update": update_seconds(work, use),
        "record": RECORD_SECONDS * work.num_all_rows * work.lengths.sequence,
    }
    has_teacher = recipe.evaluate.teacher and recipe.reader is None
    return Timing(
        phases={name: seconds for name, seconds in phases.items() if seconds},
        evaluation=evaluation_seconds(work, use, by_teacher=False),
        teacher_evaluation=evaluation_seconds(work, use, by_teacher=True) if has_teacher else 0.0,
    )
