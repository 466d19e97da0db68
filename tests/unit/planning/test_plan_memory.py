"""Memory by hand count, and the numbers that the plan shares with the code it plans."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.plan_rows import REVERSE_KL, distillation_work
from transformers import AutoModelForCausalLM, Qwen3Config

from courtside.engines.forward.batching import (
    MIN_PREFIX_FRACTION,
    MIN_PREFIX_TOKENS,
    default_pass_tokens,
)
from courtside.engines.generation import kv_cache
from courtside.engines.precision import quantize_linear_layers
from courtside.losses.fused import linear_divergence
from courtside.planning import memory, workload
from courtside.planning.gpus import GIB, GPUS
from courtside.planning.memory import (
    kv_cache_tokens,
    phase_memories,
    resident_bytes,
    update_memory,
)
from courtside.planning.presets import PRESETS
from courtside.planning.shapes import shape_from_config
from courtside.planning.timing import default_utilisation, estimate_seconds
from courtside.planning.weights import teacher_bytes
from courtside.planning.workload import Lengths, TeacherModel, Workload
from courtside.recipe.load import parse_recipe
from courtside.training import kv_budget, optimizer

P, Q = PRESETS["qwen3-1.7b"].num_parameters, PRESETS["qwen3-4b"].num_parameters


def make_work(**overrides: Any) -> Workload:
    lengths = Lengths(prompt=128, new=512)
    return distillation_work(
        "qwen3-1.7b", "qwen3-4b", lengths, prompts=64, samples=4, device=GPUS["h200"], **overrides
    )


def parts_of(work: Workload, phase: str) -> dict[str, float]:
    return dict(next(m for m in phase_memories(work) if m.phase == phase).parts)


def test_all_weights_by_hand() -> None:
    work = make_work()
    update = parts_of(work, "update")
    assert update["student weights"] == 4 * P
    assert update["AdamW moments"] == 8 * P
    assert update["gradients"] == 4 * P
    assert update["bf16 weights"] == 2 * P
    assert update["teacher weights"] == 2 * Q
    # Hidden states of the teacher for every sampled token.
    assert update["targets"] == 64 * 4 * 512 * 2560 * 2
    # Seven groups of 128 + 4 · 512 tokens are a pass of at most 16,384.
    per_token = (2 * 4 + 2 * 2) * 2048 + 2 * 2 * (2048 + 1024) + 2 * (1024 + 2048) + 2 * 3 * 6144
    assert update["activations"] == 28 * per_token * 7 * 2176
    rollout = parts_of(work, "rollout")
    assert rollout["KV cache"] == 256 * 640 * 2 * 2 * 28 * 8 * 128
    assert "gradients" not in rollout and "KV cache" not in update


def test_lora_by_hand() -> None:
    work = make_work(student__lora={"rank": 16})
    adapter = PRESETS["qwen3-1.7b"].num_lora_parameters(16, "all-linear")
    update = parts_of(work, "update")
    assert update["student weights"] == 2 * P + 4 * adapter
    assert update["AdamW moments"] == 8 * adapter and update["gradients"] == 4 * adapter
    assert "bf16 weights" not in update and "bf16 weights" not in parts_of(work, "rollout")


def test_settings_take_away_what_they_say() -> None:
    plain = make_work()
    offloaded = make_work(train__optimizer_offload=True)
    assert "AdamW moments" not in resident_bytes(offloaded)
    assert memory.host_bytes(offloaded) == 8 * P and memory.host_bytes(plain) == 0
    checkpointed = make_work(student__gradient_checkpointing=True)
    assert parts_of(checkpointed, "update")["activations"] == 28 * 4 * 2048 * 7 * 2176
    halved = make_work(rollout__kv_cache_tokens=128 * 640)
    assert 2 * parts_of(halved, "rollout")["KV cache"] == parts_of(plain, "rollout")["KV cache"]
    smaller = make_work(train__micro_batch_tokens=4352)
    ratio = parts_of(plain, "update")["activations"] / parts_of(smaller, "update")["activations"]
    assert ratio == 7 / 2


def test_states_are_divided_among_ranks_that_have_a_sampler_and_teacher_each() -> None:
    """docs/distributed.md has the same table."""
    whole, shards = (parts_of(replace(make_work(), num_gpus=n), "update") for n in (1, 4))
    for name in ("student weights", "AdamW moments", "targets"):
        assert shards[name] == whole[name] / 4
    for name in ("activations", "teacher weights"):
        assert shards[name] == whole[name]
    assert shards["sampler"] == 2 * P and "sampler" not in whole
    head = PRESETS["qwen3-1.7b"].num_head_parameters
    assert shards["gradients"] == P + 4 * head, "the head's is whole"
    layer = PRESETS["qwen3-1.7b"].num_linear_parameters / 28
    assert shards["gathered layers"] == (4 + 2) * (2 * layer + head)
    assert "gathered layers" not in whole and "bf16 weights" not in shards
    by_stage = {
        stage: parts_of(replace(make_work(sharding__zero_stage=stage), num_gpus=4), "update")
        for stage in (1, 2)
    }
    for parts in by_stage.values():
        assert parts["gathered layers"] == (4 + 2) * (28 * layer + head)
    assert by_stage[2]["gradients"] == shards["gradients"]
    assert by_stage[1]["gradients"] == P + 4 * P, "all are whole until the last pass"


def plan_large_teacher(teachers: str, *, dtype: str = "bfloat16", num_gpus: int = 8) -> Workload:
    work = distillation_work(
        "qwen3-1.7b", "qwen3-32b", Lengths(prompt=128, new=512), prompts=64, samples=4,
        device=GPUS["h200"], sharding__teachers=teachers,
    )  # fmt: skip
    (teacher,) = work.models.teachers
    models = replace(work.models, teachers=(replace(teacher, dtype=dtype),))
    return replace(work, models=models, num_gpus=num_gpus)


def test_a_large_teacher_is_in_shards_as_in_the_run() -> None:
    shape = PRESETS["qwen3-32b"]
    whole, auto, shards = (plan_large_teacher(name) for name in ("whole", "auto", "shards"))
    assert resident_bytes(whole)["teacher weights"] == 2 * shape.num_parameters
    assert resident_bytes(auto) == resident_bytes(shards)
    head = 2 * shape.num_head_parameters
    assert resident_bytes(auto)["teacher weights"] == shape.num_parameters / 4 + 2 * head
    layer = shape.num_linear_parameters / shape.num_layers
    assert parts_of(auto, "teacher")["gathered layers"] == 2 * 2 * layer
    assert "gathered layers" not in parts_of(whole, "teacher")
    for alone in (
        plan_large_teacher("auto", num_gpus=1),
        plan_large_teacher("auto", dtype="nf4"),
        replace(make_work(), num_gpus=8),  # 8 GB
    ):
        (teacher,) = alone.models.teachers
        assert resident_bytes(alone)["teacher weights"] == teacher_bytes(teacher)
    seconds = [estimate_seconds(work, default_utilisation(work)) for work in (whole, auto)]
    assert seconds[1].phases["teacher"] > seconds[0].phases["teacher"]
    assert seconds[1].phases["update"] == seconds[0].phases["update"]
    assert seconds[1].teacher_evaluation > 2 * seconds[0].teacher_evaluation > 0


@pytest.mark.parametrize(("teachers", "parts"), [("auto", 1), ("whole", 1), ("shards", 4)])
def test_copies_of_the_student_are_in_shards_as_in_the_run(teachers: str, parts: int) -> None:
    context = {"kind": "system", "text": "be brief"}
    recipe = parse_recipe(
        {
            "student": {"model": "qwen3-1.7b"},
            "tasks": {"kind": "arithmetic"},
            "teacher": {"kind": "self", "weights": "frozen", "context": context},
            "losses": [REVERSE_KL],
            "sharding": {"teachers": teachers},
        }
    )
    work = make_work()
    models = replace(work.models, teachers=())
    work = replace(work, recipe=recipe, models=models, num_gpus=4)
    assert resident_bytes(work)["copies of the student"] == 4 * P / parts


def test_ranks_sample_rows_of_their_own() -> None:
    single, sharded = (parts_of(replace(make_work(), num_gpus=n), "rollout") for n in (1, 4))
    assert sharded["KV cache"] == single["KV cache"] / 4
    assert "bf16 weights" not in sharded, "the sampler has no other dtype"
    adapted = parts_of(replace(make_work(student__lora={"rank": 16}), num_gpus=4), "update")
    adapter = PRESETS["qwen3-1.7b"].num_lora_parameters(16, "all-linear")
    assert adapted["student weights"] == (2 * P + 4 * adapter) / 4
    assert adapted["sampler"] == 2 * P + 4 * adapter


def test_frozen_and_moving_average_teachers_take_a_copy() -> None:
    for weights, copies in (("live", 0), ("frozen", 1), ("ema", 1)):
        context = {"kind": "system", "text": "Well."}
        teacher = {"kind": "self", "weights": weights, "context": context}
        work = make_work()
        recipe = work.recipe.model_copy(
            update={"teacher": type(work.recipe).model_validate(
                {**work.recipe.model_dump(mode="json"), "teacher": teacher}, strict=False
            ).teacher}
        )  # fmt: skip
        models = replace(work.models, teachers=())
        changed = replace(work, recipe=recipe, models=models)
        assert resident_bytes(changed).get("copies of the student", 0.0) == copies * 4 * P


def test_int8_weights_take_what_the_quantized_model_takes() -> None:
    config = Qwen3Config(
        vocab_size=1000, hidden_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, intermediate_size=512, tie_word_embeddings=False,
    )  # fmt: skip
    model = quantize_linear_layers(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
    size = sum(p.nbytes for p in model.parameters())
    shape = shape_from_config("a model", config)
    # The scales, one a row, are left out.
    int8 = TeacherModel(model="teacher", shape=shape, dtype="int8")
    assert teacher_bytes(int8) == pytest.approx(size, rel=0.02)
    large = TeacherModel(model="teacher", shape=PRESETS["qwen3-32b"], dtype="bfloat16")
    assert teacher_bytes(replace(large, dtype="nf4")) < 0.36 * teacher_bytes(large)


@pytest.mark.parametrize("gib", [24, 79.1, 139.8])
@pytest.mark.parametrize("overrides", [{}, {"train__optimizer_offload": True}])
def test_the_automatic_kv_cache_is_that_of_the_run(gib: float, overrides: dict[str, Any]) -> None:
    shape = PRESETS["qwen3-0.6b"]
    config = Qwen3Config(
        vocab_size=shape.vocab_size, hidden_size=1024, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, intermediate_size=3072,
        tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        student = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        teacher = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    device = replace(GPUS["h200"], memory=int(gib * GIB))
    work = distillation_work(
        "qwen3-0.6b", "qwen3-0.6b", Lengths(prompt=128, new=512), prompts=64, samples=4,
        device=device, **overrides,
    )  # fmt: skip
    weights: Any = SimpleNamespace(
        model=student, trained=dict(student.named_parameters()), autocast=torch.bfloat16
    )
    expected = kv_budget.kv_cache_tokens(work.recipe, weights, [teacher], total=int(device.memory))
    assert kv_cache_tokens(work) == expected


def test_numbers_are_those_of_the_code() -> None:
    assert {
        True: default_pass_tokens(torch.device("cuda")),
        False: default_pass_tokens(torch.device("cpu")),
    } == workload.PASS_TOKENS
    assert (workload.MIN_PREFIX_TOKENS, workload.MIN_PREFIX_FRACTION) == (
        MIN_PREFIX_TOKENS, MIN_PREFIX_FRACTION,
    )  # fmt: skip
    assert (memory.ROW_STEP, memory.POSITION_STEP) == (kv_cache.ROW_STEP, kv_cache.POSITION_STEP)
    assert memory.HEAD_ROWS == {
        True: linear_divergence.CUDA_ROWS, False: linear_divergence.CUDA_FROZEN_ROWS,
    }  # fmt: skip
    assert memory.MIN_HEAD_BYTES == linear_divergence.CUDA_BYTES
    assert memory.CPU_HEAD_BYTES == linear_divergence.CPU_BYTES
    assert memory.STAGING_BYTES == (optimizer.NUM_STAGING_BUFFERS * 2 * 4 * optimizer.CHUNK_SIZE)
    assert update_memory(make_work(train__optimizer_offload=True)).parts["staged moments"] == (
        memory.STAGING_BYTES
    )


def test_gradients_of_a_single_pass_come_as_its_activations_go() -> None:
    shape = PRESETS["qwen3-1.7b"]
    several, single = make_work(), replace(make_work(), lengths=Lengths(prompt=16, new=16))
    assert parts_of(several, "update")["gradients"] == 4 * P
    parts = parts_of(single, "update")
    assert parts["activations"] > 4 * P
    assert parts["gradients"] == 4 * shape.num_head_parameters
    tiny = replace(single, recipe=make_work(train__prompts_per_step=1).recipe)
    parts = parts_of(tiny, "update")
    assert parts["gradients"] == 4 * P - parts["activations"]
