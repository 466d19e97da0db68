"""The estimate of activation memory against what a forward pass allocates on the device."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gpu_models import VOCAB_SIZE, save_qwen3
from support.small_runs import small_recipe
from torch import Tensor

from courtside.assemble import assemble
from courtside.runtime import Runtime
from courtside.training.memory import (
    activation_bytes_per_token,
    free_bytes,
)

LENGTH = 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Deep enough that one layer's temporary memory is small against all saved activations."""
    return save_qwen3(tmp_path_factory.mktemp("deep"), layers=8, size=128)


def assemble_with(
    folder: Path, device: torch.device, samples: int, free: int | None, **student: Any
) -> Any:
    recipe = small_recipe(
        folder,
        folder,
        student={"model": str(folder), "device": device.type, **student},
        rollout={"samples_per_prompt": samples, "max_new_tokens": 6},
    )
    return assemble(recipe, free=lambda device: free)


def sequences(samples: int) -> list[list[int]]:
    """16 of LENGTH tokens, the first half of which is that of the group."""
    draw = random.Random(0)

    def ids() -> list[int]:
        return [draw.randrange(VOCAB_SIZE) for _ in range(LENGTH // 2)]

    prompts = [ids() for _ in range(16 // samples)]
    return [[*prompt, *ids()] for prompt in prompts for _ in range(samples)]


def allocated_bytes(device: torch.device, forward: Callable[[], Tensor]) -> int:
    """Peak memory of the forward pass, with the activations that it saves."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = forward()
    torch.cuda.synchronize()
    assert out.requires_grad
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("samples", [1, 4], ids=["alone", "groups"])
@pytest.mark.parametrize(
    "student",
    [{"dtype": "bfloat16"}, {"dtype": "float32"}, {"dtype": "bfloat16", "lora": {"rank": 8}}],
    ids=["autocast", "float32", "lora"],
)
def test_the_estimate_is_near_the_allocated_memory(
    student: dict[str, Any], samples: int, folder: Path, device: torch.device
) -> None:
    if device.type != "cuda":
        pytest.skip("a CPU does not count its allocations")
    runtime: Runtime = assemble_with(folder, device, samples, None, **student)
    passes, weights = runtime.student.passes, runtime.student.weights
    assert passes.padding_reason is None and passes.unshared_reason is None
    batch = sequences(samples)
    with runtime.student.training(0):
        out, _ = passes.forward(batch)  # shadow weights and workspaces are allocated here
        num_tokens = len(out)
        del out
        allocated = allocated_bytes(device, lambda: passes.forward(batch)[0])
    assert num_tokens == (16 + 16 // samples) * LENGTH // 2
    estimate = activation_bytes_per_token(weights.model, weights.autocast) * num_tokens
    # Prefix sharing gathers keys and values; the formula omits them: 0.65 on an H200.
    assert 0.6 * allocated < estimate < 1.4 * allocated


def test_free_bytes_counts_cached_memory(device: torch.device) -> None:
    if device.type != "cuda":
        assert free_bytes(device) is None
        return
    before = free_bytes(device)
    total = torch.cuda.get_device_properties(device).total_memory
    assert before is not None and 0 < before <= total
    block = torch.empty(2**30, dtype=torch.uint8, device=device)
    during = free_bytes(device)
    assert during is not None and abs(before - during - 2**30) < 2**26
    del block
    after = free_bytes(device)  # the allocator caches it
    assert after is not None and abs(before - after) < 2**26


def test_the_update_is_the_same_with_checkpointing(folder: Path, device: torch.device) -> None:
    updates = {}
    for free in (2**50, 0):
        runtime: Runtime = assemble_with(folder, device, 2, free, dtype="float32")
        assert runtime.student.weights.uses_gradient_checkpointing == (free == 0)
        assert any("activations" in note for note in runtime.notes) == (free == 0)
        scored = runtime.teacher(runtime.rollout(runtime.tasks.batch(0, 2), 0))
        update = runtime.student.step(0, scored)
        updates[free] = (update.loss, update.metrics["grad_norm"])
    assert updates[0] == pytest.approx(updates[2**50], rel=1e-3, abs=1e-6)
