"""AdamW with offloaded state computes what AdamW computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.small_runs import small_recipe
from torch import Tensor, nn

from courtside.assemble import assemble
from courtside.run_state import restore
from courtside.training import checkpoints
from courtside.training.kv_budget import MIN_TOKENS, kv_bytes_per_token, kv_cache_tokens
from courtside.training.optimizer import OffloadedAdamW

SHAPES = ((7, 5), (3,), (16, 16), (1,), (40, 3))
SETTINGS: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.95)}


def random_parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in parameters if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]


def set_gradients(parameters: list[nn.Parameter], step: int, *, without: int | None = None) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for number, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = None if number == without else gradient


def states(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> dict[str, Tensor]:
    return checkpoints.optimizer_tensors(optimizer, {str(i): p for i, p in enumerate(parameters)})


@pytest.mark.parametrize("chunk_size", [1, 8, 37, 256, 10_000])
def test_weights_and_moments_are_those_of_adamw(chunk_size: int) -> None:
    """With many parameters in a chunk or a part of one, and with a gradient missing."""
    offloaded, reference = random_parameters(), random_parameters()
    optimizer = OffloadedAdamW(groups(offloaded), chunk_size=chunk_size, **SETTINGS)
    adamw = torch.optim.AdamW(groups(reference), fused=True, **SETTINGS)
    for step in range(4):
        for stepped, parameters in ((optimizer, offloaded), (adamw, reference)):
            set_gradients(parameters, step, without=2 if step == 1 else None)
            for group in stepped.param_groups:
                group["lr"] = 0.02 / (1 + step)
            stepped.step()
    for actual, expected in zip(offloaded, reference, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)
    state, expected_state = states(optimizer, offloaded), states(adamw, reference)
    assert state.keys() == expected_state.keys()
    for name, tensor in expected_state.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-6, atol=1e-7)
    assert state["2/step"] == 3 and state["0/step"] == 4


def test_every_chunk_but_the_last_of_a_group_is_full() -> None:
    parameters = random_parameters()
    optimizer = OffloadedAdamW(groups(parameters), chunk_size=64, **SETTINGS)
    set_gradients(parameters, 0)
    optimizer.step()
    sizes = [chunk.moments.shape[1] for chunk in optimizer._chunks]
    assert sizes == [64] * 6 + [35 + 256 + 120 - 6 * 64, 4]


@pytest.mark.parametrize("first", [OffloadedAdamW, torch.optim.AdamW])
@pytest.mark.parametrize("second", [OffloadedAdamW, torch.optim.AdamW])
def test_either_kind_resumes_from_either_kind(first: Any, second: Any) -> None:
    def make(kind: Any, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        options = {"chunk_size": 50} if kind is OffloadedAdamW else {"fused": True}
        optimizer: torch.optim.Optimizer = kind(groups(parameters), **SETTINGS, **options)
        return optimizer

    uninterrupted, stopped = random_parameters(), random_parameters()
    adamw, before = make(torch.optim.AdamW, uninterrupted), make(first, stopped)
    assert states(before, stopped) == {}
    for optimizer, parameters in ((adamw, uninterrupted), (before, stopped)):
        for step in range(2):
            set_gradients(parameters, step)
            optimizer.step()
    saved = {name: tensor.clone() for name, tensor in states(before, stopped).items()}
    resumed = [nn.Parameter(p.detach().clone()) for p in stopped]
    after = make(second, resumed)
    checkpoints.restore_optimizer(after, {str(i): p for i, p in enumerate(resumed)}, saved)
    for optimizer, parameters in ((adamw, uninterrupted), (after, resumed)):
        set_gradients(parameters, 2)
        optimizer.step()
    for actual, expected in zip(resumed, uninterrupted, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)


def test_a_run_with_offload_is_the_run_without(tiny_folder: Any, tiny_teacher_folder: Any) -> None:
    """Two steps, with a checkpoint saved and restored after the first."""
    weights: dict[bool, dict[str, Tensor]] = {}
    for offload in (False, True):
        recipe = small_recipe(
            tiny_folder, tiny_teacher_folder, train={"optimizer_offload": offload}
        )
        runtime = assemble(recipe)
        assert isinstance(runtime.student.optimizer, OffloadedAdamW) == offload
        for step in range(2):
            trajectories = runtime.rollout(runtime.tasks.batch(step, 2), step)
            runtime.student.step(step, runtime.teacher(trajectories, ()))
            if step == 0:
                trained = runtime.student.weights.trained
                saved = {
                    "weights": {name: p.detach().clone() for name, p in trained.items()},
                    "optimizer": {
                        name: tensor.clone()
                        for name, tensor in checkpoints.optimizer_tensors(
                            runtime.student.optimizer, trained
                        ).items()
                    },
                }
                runtime = assemble(recipe)
                restore(runtime, checkpoints.Checkpoint(num_steps=1, tensors=saved))
        weights[offload] = {n: p.detach() for n, p in runtime.student.weights.trained.items()}
    for name, expected in weights[False].items():
        torch.testing.assert_close(weights[True][name], expected, rtol=1e-5, atol=1e-7)


def test_offloaded_state_is_not_in_the_memory_plan(
    tiny_folder: Any, tiny_teacher_folder: Any
) -> None:
    kv_tokens = {}
    for offload in (False, True):
        recipe = small_recipe(
            tiny_folder, tiny_teacher_folder, train={"optimizer_offload": offload}
        )
        student = assemble(recipe).student
        trained = sum(p.nbytes for p in student.weights.trained.values())
        model_bytes = sum(p.nbytes for p in student.weights.model.parameters())
        # A byte too little for twice the minimum of tokens, if the moments are on the device.
        per_token = kv_bytes_per_token(student.weights.model, student.weights.autocast)
        total = model_bytes + 2 * trained + 4 * MIN_TOKENS * per_token - 1
        kv_tokens[offload] = kv_cache_tokens(recipe, student.weights, (), total=total)
    assert kv_tokens == {False: MIN_TOKENS, True: 2 * MIN_TOKENS}
