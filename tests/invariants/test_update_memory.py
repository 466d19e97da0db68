"""Memory of an update on a CPU: gradient buffers and bf16 linear layers change no value."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gradients import compute_gradients, perturb_weights, score_batch
from support.small_runs import small_recipe
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from courtside.assemble import assemble
from courtside.runtime import Runtime
from courtside.training.cpu_patches import GradientBuffers, add_embedding_gradient
from courtside.types import Scored

SETTINGS: list[dict[str, Any]] = [
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "lora": {"rank": 2}},
    {"dtype": "bfloat16", "gradient_checkpointing": True},
]
EACH = pytest.mark.parametrize(
    "settings", SETTINGS, ids=["float32", "bfloat16", "lora", "checkpointing"]
)


@contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()  # memory must be freed by reference counts alone
    try:
        yield
    finally:
        gc.enable()


def assemble_perturbed(student: Path, teacher: Path, **settings: Any) -> Runtime:
    recipe = small_recipe(
        student,
        teacher,
        student={"model": str(student), **settings},
        train={"prompts_per_step": 3, "micro_batch_tokens": 32},
    )
    parts = assemble(recipe)
    perturb_weights(parts)
    return parts


@EACH
def test_gradients_are_those_of_unpatched_layers(
    settings: dict[str, Any],
    tiny_folder: Path,
    tiny_teacher_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = assemble_perturbed(tiny_folder, tiny_teacher_folder, **settings)
    scored = score_batch(parts)
    patched = compute_gradients(parts, scored)
    parts.student.uses_cpu_patches = False
    plain = compute_gradients(parts, scored)
    assert patched.keys() == plain.keys() == parts.student.weights.trained.keys()
    for name, gradient in patched.items():
        assert gradient.any() and torch.equal(gradient, plain[name]), name


@EACH
def test_gradients_share_a_buffer_that_the_next_step_reuses(
    settings: dict[str, Any],
    tiny_folder: Path,
    tiny_teacher_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = assemble_perturbed(tiny_folder, tiny_teacher_folder, **settings)
    scored, student = score_batch(parts), parts.student
    trained = student.weights.trained
    head = student.head.module.weight
    buffers: list[set[int]] = []
    optimizer_step = student.optimizer.step

    def step() -> None:
        in_buffer = [p.grad for p in trained.values() if p is not head and p.grad is not None]
        assert len(in_buffer) >= len(trained) - 1
        buffers.append({gradient.untyped_storage().data_ptr() for gradient in in_buffer})
        optimizer_step()

    monkeypatch.setattr(student.optimizer, "step", step)
    for number in range(2):
        student.step(number, scored)
        assert all(p.grad is None for p in trained.values())
    assert len(buffers[0]) == 1 and buffers[0] == buffers[1]
    assert all(not p._post_accumulate_grad_hooks for p in trained.values())
    assert not any("forward" in vars(module) for module in student.weights.model.modules())


def test_an_unused_weight_has_no_gradient(tiny_folder: Path, tiny_teacher_folder: Path) -> None:
    parts = assemble_perturbed(tiny_folder, tiny_teacher_folder)
    extra = nn.Parameter(torch.ones(3))
    parts.student.weights.model.register_parameter("extra", extra)
    assert "extra" in parts.student.weights.trained
    assert "extra" not in compute_gradients(parts, score_batch(parts))


class Allocations(TorchDispatchMode):
    """Storages that operations allocated and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: set[str] = set()
        self.storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.add(str(func.overloadpacket))
        for output in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(output, Tensor):
                storage = output.untyped_storage()
                self.storages[storage.data_ptr()] = weakref.ref(storage)
        return out

    def num_bytes(self) -> int:
        return sum(s.nbytes() for ref in self.storages.values() if (s := ref()) is not None)


def measure_pass(parts: Runtime, scored: list[Scored]) -> tuple[int, int, set[str]]:
    """Positions of a forward pass, bytes that it saves for the backward pass, and the ops of the
    backward pass."""
    student = parts.student
    ids = [s.trajectory.token_ids for s in scored]
    assert student.passes is not None
    student.weights.model.train()
    with student._autocast(), student._patch_model(student.passes):
        student.passes.forward(ids)  # shadow weights are no part of a pass
        with Allocations() as saved, without_collector():
            hidden_ND, _ = student.passes.forward(ids)
            num_bytes = saved.num_bytes()
        with Allocations() as backward:
            hidden_ND.sum().backward()
    student.weights.model.eval()
    torch.clear_autocast_cache()
    student.optimizer.zero_grad(set_to_none=True)
    return len(hidden_ND), num_bytes, backward.calls


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_pass_saves_shared_casts_once_and_allocates_no_gradient_of_the_vocabulary(
    dtype: str,
    tiny_folder: Path,
    tiny_teacher_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = assemble_perturbed(tiny_folder, tiny_teacher_folder, dtype=dtype)
    scored = score_batch(parts)
    _, patched, calls = measure_pass(parts, scored)
    assert "aten.embedding_dense_backward" not in calls
    parts.student.uses_cpu_patches = False
    num_positions, plain, calls = measure_pass(parts, scored)
    assert "aten.embedding_dense_backward" in calls
    # In each layer q, k and v share the cast of one input, gate and up that of another; the
    # activated gate and the normalized input of each norm, with its scale, are computed again.
    config = parts.student.weights.model.config
    itemsize, num_layers = getattr(torch, dtype).itemsize, config.num_hidden_layers
    num_casts = 3 * config.hidden_size if dtype == "bfloat16" else 0
    saved = itemsize * (num_casts + config.intermediate_size) * num_layers
    saved += torch.float32.itemsize * (config.hidden_size + 1) * (2 * num_layers + 1)
    assert plain - patched == saved * num_positions and patched > 0


@pytest.mark.parametrize("padding_id", [None, 3])
def test_embedding_gradients_are_added_as_torch_adds_them(padding_id: int | None) -> None:
    torch.manual_seed(0)
    module = nn.Embedding(50, 8, padding_idx=padding_id)
    ids_N = torch.tensor([3, 7, 3, 3, 49, 7, 0, 3, 7])
    before = torch.randn(50, 8)
    module.weight.grad = before.clone()
    gradient_ND = torch.randn(len(ids_N), 8)
    module(ids_N).backward(gradient_ND)
    accumulated, module.weight.grad = module.weight.grad, before.clone()
    add_embedding_gradient(module.weight, ids_N, gradient_ND, padding_id)
    assert torch.equal(module.weight.grad, accumulated)
    module.weight.grad = None
    add_embedding_gradient(module.weight, ids_N, gradient_ND, padding_id)
    assert module.weight.grad is not None and not module.weight.grad[1].any()


def test_a_bf16_gradient_is_added_in_float32() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    buffers = GradientBuffers([parameter])
    small = torch.full((4,), 2.0**-12, dtype=torch.bfloat16)
    buffers.accumulate(parameter, torch.ones(4, dtype=torch.bfloat16))
    buffers.accumulate(parameter, small)
    assert parameter.grad is not None and parameter.grad.dtype == torch.float32
    assert bool((parameter.grad == 1 + 2.0**-12).all())
    buffers.move(parameter)
    assert bool((parameter.grad == 1 + 2.0**-12).all()), "it is in the buffer already"
