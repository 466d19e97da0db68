"""What a pass is said to keep against what it takes of the device's memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_models import NUM_WORDS, saved
from small_runs import small_recipe
from torch import Tensor

from courtside.assemble import assemble
from courtside.runtime import Runtime
from courtside.training.memory.checkpointing_auto import (
    free_bytes,
    kept_bytes,
    student_bytes_per_token,
)

LENGTH = 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Deep enough for what a layer needs for itself to be little beside what all keep."""
    return saved(tmp_path_factory.mktemp("deep"), layers=8, size=128)


def made(folder: Path, device: torch.device, samples: int, free: int | None, **student: Any) -> Any:
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
        return [draw.randrange(NUM_WORDS) for _ in range(LENGTH // 2)]

    prompts = [ids() for _ in range(16 // samples)]
    return [[*prompt, *ids()] for prompt in prompts for _ in range(samples)]


def rise(device: torch.device, forward: Callable[[], Tensor]) -> int:
    """Bytes that the device holds more at most while it reads. A CPU does not say: there it is
    what autograd keeps, which tells at least that the test itself is right."""
    if device.type != "cuda":
        return kept_bytes(forward)[0]
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
def test_a_pass_takes_what_was_measured(
    student: dict[str, Any], samples: int, folder: Path, device: torch.device
) -> None:
    parts: Runtime = made(folder, device, samples, None, **student)
    passes = parts.student.passes
    assert passes.padding_reason is None and passes.unshared_reason is None
    read = sequences(samples)
    with parts.student.training(0):
        out, _ = passes.forward(read)  # weights are rounded, workspaces made
        num_tokens = len(out)
        del out
        measured = rise(device, lambda: passes.forward(read)[0])
    assert num_tokens == (16 + 16 // samples) * LENGTH // 2
    said = student_bytes_per_token(parts.student, num_tokens, LENGTH) * num_tokens
    assert 0.75 * measured < said < 1.25 * measured


def test_what_is_free(device: torch.device) -> None:
    if device.type != "cuda":
        assert free_bytes(device) is None
        return
    before = free_bytes(device)
    total = torch.cuda.get_device_properties(device).total_memory
    assert before is not None and 0 < before <= total
    held = torch.empty(2**30, dtype=torch.uint8, device=device)
    during = free_bytes(device)
    assert during is not None and abs(before - during - 2**30) < 2**26
    del held
    after = free_bytes(device)  # the allocator still has it
    assert after is not None and abs(before - after) < 2**26


def test_a_step_by_what_is_free(folder: Path, device: torch.device) -> None:
    found = {}
    for free in (2**50, 0):
        parts: Runtime = made(folder, device, 2, free, dtype="float32")
        assert parts.student.weights.recomputes == (free == 0)
        assert any("activations" in note for note in parts.notes) == (free == 0)
        scored = parts.teacher(parts.rollout(parts.tasks.batch(0, 2), 0))
        update = parts.student.step(0, scored)
        found[free] = (update.loss, update.metrics["grad_norm"])
    assert found[0] == pytest.approx(found[2**50], rel=1e-3, abs=1e-6)
