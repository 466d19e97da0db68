"""Weights that a GPU holds: whole, in shards or gathered, and the seconds that gathering takes."""

from __future__ import annotations

from courtside.planning.shapes import ModelShape
from courtside.planning.workload import GPUS_PER_MACHINE, TeacherModel, Workload

ITEM_SIZE = {"float32": 4, "bfloat16": 2}
NF4_BYTES = 0.5 + 4 / 64
"""Of a weight: four bits, and a float32 scale for each block of 64."""
NETWORK = 50e9
"""Bytes/s between machines, for each GPU: 400 Gbit/s."""


def model_bytes(shape: ModelShape, dtype: str) -> float:
    """Quantized are the linear layers; embedding and LM head stay in bfloat16."""
    if dtype in ITEM_SIZE:
        return shape.num_parameters * ITEM_SIZE[dtype]
    per_weight = 1.0 if dtype == "int8" else NF4_BYTES
    return shape.num_linear_parameters * per_weight + 2.0 * (
        shape.num_parameters - shape.num_linear_parameters
    )


def teacher_bytes(teacher: TeacherModel) -> float:
    return model_bytes(teacher.shape, teacher.dtype)


# ── models that never train ──────────────────────────────────────────────────────────────────────


def is_in_shards(work: Workload, teacher: TeacherModel) -> bool:
    config, size = work.recipe.sharding, teacher_bytes(teacher)
    is_whole = work.num_gpus == 1 or teacher.dtype not in ITEM_SIZE
    return not is_whole and config.shards_teacher(size, num_ranks=work.num_gpus)


def held_teacher_bytes(work: Workload, teacher: TeacherModel) -> float:
    """On one rank: embedding and LM head are whole from the first scores on."""
    size = teacher_bytes(teacher)
    if not is_in_shards(work, teacher):
        return size
    return size / work.num_gpus + ITEM_SIZE[teacher.dtype] * num_gathered_parameters(teacher.shape)


def copy_bytes(work: Workload) -> float:
    """Of a moving average, a frozen student or the reference, on one rank. Averages of an adapter
    are always in shards."""
    models, num_ranks = work.models, work.num_gpus
    size = 4.0 * models.num_trained
    in_shards = models.num_adapter is not None or (
        work.recipe.sharding.shards_teacher(size, num_ranks=num_ranks)
    )
    return size / num_ranks if in_shards else size


def find_sharded_scorer(work: Workload) -> TeacherModel | None:
    """The teacher that scores, if its weights are gathered for each of its passes."""
    scorers = (t for t in work.models.teachers if t.shape is work.models.scorer)
    return next((teacher for teacher in scorers if is_in_shards(work, teacher)), None)


# ── gathered weights ─────────────────────────────────────────────────────────────────────────────


def num_gathered_parameters(shape: ModelShape) -> int:
    """Of embedding and LM head, whole during an update."""
    return (1 if shape.tied else 2) * shape.num_head_parameters


def seconds_to_gather(work: Workload, model: TeacherModel) -> float:
    if work.num_gpus == 1:
        return 0.0
    item = ITEM_SIZE.get(model.dtype, 2)
    remote = (work.num_gpus - 1) / work.num_gpus * item * model.shape.num_parameters
    is_one_machine = work.num_gpus <= GPUS_PER_MACHINE
    link = work.device.link if is_one_machine else min(work.device.link, NETWORK)
    return remote / link
