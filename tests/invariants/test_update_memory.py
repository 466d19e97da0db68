"""What an update holds on a CPU, and that holding less changes no number."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from one_step import batch_of, gradients
from small_runs import small_recipe
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from courtside.assemble import assemble
from courtside.engines.patches import lean_layers
from courtside.runtime import Runtime
from courtside.training.cpu.gradient_buffers import GradientBuffers, add_embedding_gradient
from courtside.types import Scored

SETTINGS: list[dict[str, Any]] = [
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "lora": {"rank": 2}},
    {"dtype": "bfloat16", "gradient_checkpointing": True},
]
EACH = pytest.mark.parametrize("settings", SETTINGS, ids=["float32", "bfloat16", "lora", "again"])


@contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()  # nothing may wait for it
    try:
        yield
    finally:
        gc.enable()


def parts_of(student: Path, teacher: Path, **settings: Any) -> Runtime:
    recipe = small_recipe(
        student,
        teacher,
        student={"model": str(student), **settings},
        train={"prompts_per_step": 3, "micro_batch_tokens": 32},
    )
    parts = assemble(recipe)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in parts.student.weights.trained().values():  # half of an adapter is zero
            parameter += 0.05 * torch.randn_like(parameter)
    return parts


@EACH
def test_gradients_are_those_of_the_models_own_layers(
    settings: dict[str, Any],
    tiny_folder: Path,
    tiny_teacher_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = parts_of(tiny_folder, tiny_teacher_folder, **settings)
    scored = batch_of(parts)
    ours = gradients(parts, scored)
    monkeypatch.setattr(parts.student, "_reuse_buffers", nullcontext)
    theirs = gradients(parts, scored)
    assert ours.keys() == theirs.keys() == parts.student.weights.trained().keys()
    for name, gradient in ours.items():
        assert gradient.any() and torch.equal(gradient, theirs[name]), name


@EACH
def test_gradients_lie_in_one_piece_that_the_next_step_uses_again(
    settings: dict[str, Any],
    tiny_folder: Path,
    tiny_teacher_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = parts_of(tiny_folder, tiny_teacher_folder, **settings)
    scored, student = batch_of(parts), parts.student
    trained = student.weights.trained()
    head = student.head.module.weight
    pieces: list[set[int]] = []
    real = student.optimizer.step

    def step() -> None:
        found = [p.grad for p in trained.values() if p is not head and p.grad is not None]
        assert len(found) >= len(trained) - 1
        pieces.append({gradient.untyped_storage().data_ptr() for gradient in found})
        real()

    monkeypatch.setattr(student.optimizer, "step", step)
    for number in range(2):
        student.step(number, scored)
        assert all(p.grad is None for p in trained.values())
    assert len(pieces[0]) == 1 and pieces[0] == pieces[1]
    assert all(not p._post_accumulate_grad_hooks for p in trained.values())
    assert not any("forward" in vars(module) for module in student.weights.model.modules())


def test_a_weight_that_no_pass_uses_has_no_gradient(
    tiny_folder: Path, tiny_teacher_folder: Path
) -> None:
    parts = parts_of(tiny_folder, tiny_teacher_folder)
    extra = nn.Parameter(torch.ones(3))
    parts.student.weights.model.register_parameter("extra", extra)
    assert "extra" in parts.student.weights.trained()
    assert "extra" not in gradients(parts, batch_of(parts))


class Made(TorchDispatchMode):
    """What operations made, as long as somebody holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: set[str] = set()
        self.storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.add(str(func.overloadpacket))
        for one in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(one, Tensor):
                storage = one.untyped_storage()
                self.storages[storage.data_ptr()] = weakref.ref(storage)
        return out

    def num_bytes(self) -> int:
        return sum(s.nbytes() for ref in self.storages.values() if (s := ref()) is not None)


def held_by_a_pass(parts: Runtime, scored: list[Scored]) -> tuple[int, set[str]]:
    """Bytes of what one pass made and keeps for the way back, and what the way back called."""
    student = parts.student
    ids = [s.trajectory.token_ids for s in scored]
    assert student.passes is not None
    student.weights.model.train()
    with student.passes.patch_model(), student._autocast(), student._reuse_buffers():
        student.passes.forward(ids)  # weights that autocast rounds are no part of a pass
        with Made() as there, without_collector():
            hidden_ND, _ = student.passes.forward(ids)
            num_bytes = there.num_bytes()
        with Made() as back:
            hidden_ND.sum().backward()
    student.weights.model.eval()
    torch.clear_autocast_cache()
    student.optimizer.zero_grad(set_to_none=True)
    return num_bytes, back.calls


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_pass_keeps_less_and_makes_no_gradient_of_all_words(
    dtype: str,
    tiny_folder: Path,
    tiny_teacher_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = parts_of(tiny_folder, tiny_teacher_folder, dtype=dtype)
    scored = batch_of(parts)
    ours, calls = held_by_a_pass(parts, scored)
    assert "aten.embedding_dense_backward" not in calls
    monkeypatch.setattr(parts.student, "_reuse_buffers", nullcontext)
    theirs, calls = held_by_a_pass(parts, scored)
    assert "aten.embedding_dense_backward" in calls
    assert 0 < ours < 0.75 * theirs


@pytest.mark.parametrize("padding_id", [None, 3])
def test_rows_of_an_embedding_are_added_as_torch_adds_them(padding_id: int | None) -> None:
    torch.manual_seed(0)
    module = nn.Embedding(50, 8, padding_idx=padding_id)
    ids_N = torch.tensor([3, 7, 3, 3, 49, 7, 0, 3, 7])
    expected = torch.randn(50, 8)
    module.weight.grad = expected.clone()
    gradient_ND = torch.randn(len(ids_N), 8)
    module(ids_N).backward(gradient_ND)
    found, module.weight.grad = module.weight.grad, expected.clone()
    add_embedding_gradient(module.weight, ids_N, gradient_ND, padding_id)
    assert torch.equal(module.weight.grad, found)
    module.weight.grad = None
    add_embedding_gradient(module.weight, ids_N, gradient_ND, padding_id)
    assert module.weight.grad is not None and not module.weight.grad[1].any()


def test_a_gradient_is_widened_while_it_is_added() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    rooms = GradientBuffers([parameter])
    small = torch.full((4,), 2.0**-12, dtype=torch.bfloat16)
    rooms.add(parameter, torch.ones(4, dtype=torch.bfloat16))
    rooms.add(parameter, small)
    assert parameter.grad is not None and parameter.grad.dtype == torch.float32
    assert bool((parameter.grad == 1 + 2.0**-12).all())
    rooms.move(parameter)
    assert bool((parameter.grad == 1 + 2.0**-12).all()), "it lies there already"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_behind_a_gate_does_not_keep_what_it_read(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(6, 4, dtype=dtype)
    given = [torch.randn(2, 5, 6, dtype=dtype) for _ in range(2)]
    read: list[weakref.ref[Any]] = []

    def watched(product: Tensor) -> Tensor:
        read.append(weakref.ref(product.untyped_storage()))
        return layer(product)

    found = []
    for lean in (True, False):
        gate, up = (x.clone().requires_grad_() for x in given)
        if lean:
            with without_collector():
                out = lean_layers.swiglu_linear(watched, gate, up)
                assert read[0]() is None
        else:
            out = layer(nn.functional.silu(gate) * up)
        layer.zero_grad()
        out.square().sum().backward()
        found.append((out, gate.grad, up.grad, layer.weight.grad, layer.bias.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
