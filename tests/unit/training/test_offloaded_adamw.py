"""AdamW with its moments in the host's memory is AdamW."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_runs import small_recipe
from torch import Tensor, nn

from courtside.assemble import assemble
from courtside.run import restore
from courtside.training import checkpoints
from courtside.training.memory.checkpointing_auto import reserved_bytes
from courtside.training.memory.kv_budget import MIN_TOKENS, kv_bytes_per_token, kv_cache_tokens
from courtside.training.offloaded_adamw import CHUNK_SIZE, NUM_STAGING_BUFFERS, OffloadedAdamW

SHAPES = ((7, 5), (3,), (16, 16), (1,), (40, 3))
SETTINGS: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.95)}


def drawn_parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in parameters if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]


def pushed(parameters: list[nn.Parameter], step: int, *, without: int | None = None) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for number, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = None if number == without else gradient


def states(optimiser: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> dict[str, Tensor]:
    return checkpoints.optimiser_tensors(optimiser, {str(i): p for i, p in enumerate(parameters)})


@pytest.mark.parametrize("piece", [1, 8, 37, 256, 10_000])
def test_weights_and_moments_are_those_of_adamw(piece: int) -> None:
    """Whether a piece holds many parameters or a part of one, and with a gradient missing."""
    own, plain = drawn_parameters(), drawn_parameters()
    ours = OffloadedAdamW(groups(own), piece=piece, **SETTINGS)
    theirs = torch.optim.AdamW(groups(plain), fused=True, **SETTINGS)
    for step in range(4):
        for optimiser, parameters in ((ours, own), (theirs, plain)):
            pushed(parameters, step, without=2 if step == 1 else None)
            for group in optimiser.param_groups:
                group["lr"] = 0.02 / (1 + step)
            optimiser.step()
    for mine, its in zip(own, plain, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-7)
    found, expected = states(ours, own), states(theirs, plain)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)
    assert found["2/step"] == 3 and found["0/step"] == 4


def test_every_piece_but_the_last_of_a_group_is_full() -> None:
    own = drawn_parameters()
    ours = OffloadedAdamW(groups(own), piece=64, **SETTINGS)
    pushed(own, 0)
    ours.step()
    sizes = [piece.moments.shape[1] for piece in ours._pieces]
    assert sizes == [64] * 6 + [35 + 256 + 120 - 6 * 64, 4]


@pytest.mark.parametrize("first", [OffloadedAdamW, torch.optim.AdamW])
@pytest.mark.parametrize("second", [OffloadedAdamW, torch.optim.AdamW])
def test_a_run_goes_on_from_either_kind(first: Any, second: Any) -> None:
    def made(kind: Any, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        more = {"piece": 50} if kind is OffloadedAdamW else {"fused": True}
        optimiser: torch.optim.Optimizer = kind(groups(parameters), **SETTINGS, **more)
        return optimiser

    through = drawn_parameters()
    whole = made(torch.optim.AdamW, through)
    stopped = drawn_parameters()
    before = made(first, stopped)
    assert states(before, stopped) == {}
    for optimiser, parameters in ((whole, through), (before, stopped)):
        for step in range(2):
            pushed(parameters, step)
            optimiser.step()
    saved = {name: tensor.clone() for name, tensor in states(before, stopped).items()}
    resumed = [nn.Parameter(p.detach().clone()) for p in stopped]
    after = made(second, resumed)
    checkpoints.restore_optimiser(after, {str(i): p for i, p in enumerate(resumed)}, saved)
    for optimiser, parameters in ((whole, through), (after, resumed)):
        pushed(parameters, 2)
        optimiser.step()
    for mine, its in zip(resumed, through, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-7)


def test_a_recipe_offloads_them(tiny_folder: Any, tiny_teacher_folder: Any) -> None:
    """Two steps of a run, saved and restored, against the same with moments beside the weights."""
    found: dict[bool, dict[str, Tensor]] = {}
    for offload in (False, True):
        recipe = small_recipe(
            tiny_folder, tiny_teacher_folder, train={"optimizer_offload": offload}
        )
        parts = assemble(recipe)
        assert isinstance(parts.student.optimizer, OffloadedAdamW) == offload
        for step in range(2):
            trajectories = parts.rollout(parts.tasks.batch(step, 2), step)
            parts.student.step(step, parts.teacher(trajectories, ()))
            if step == 0:
                trained = parts.student.weights.trained()
                saved = {
                    "weights": {name: p.detach().clone() for name, p in trained.items()},
                    "optimiser": {
                        name: tensor.clone()
                        for name, tensor in checkpoints.optimiser_tensors(
                            parts.student.optimizer, trained
                        ).items()
                    },
                }
                parts = assemble(recipe)
                restore(parts, checkpoints.Checkpoint(num_steps=1, tensors=saved))
        found[offload] = {n: p.detach() for n, p in parts.student.weights.trained().items()}
    for name, expected in found[False].items():
        torch.testing.assert_close(found[True][name], expected, rtol=1e-5, atol=1e-7)


def test_memory_is_planned_without_them(tiny_folder: Any, tiny_teacher_folder: Any) -> None:
    planned, room = {}, {}
    for offload in (False, True):
        recipe = small_recipe(
            tiny_folder, tiny_teacher_folder, train={"optimizer_offload": offload}
        )
        student = assemble(recipe).student
        planned[offload] = reserved_bytes(student, tokens=128)
        trained = sum(p.nbytes for p in student.weights.trained().values())
        held = sum(p.nbytes for p in student.weights.model.parameters())
        # A byte too little for twice the least number of tokens, if moments are on the device.
        place = kv_bytes_per_token(student.weights.model, student.weights.autocast)
        total = held + 2 * trained + 4 * MIN_TOKENS * place - 1
        room[offload] = kv_cache_tokens(recipe, student.weights, (), total=total)
    assert planned[False] - planned[True] == 2 * trained - NUM_STAGING_BUFFERS * 2 * 4 * CHUNK_SIZE
    assert room == {False: MIN_TOKENS, True: 2 * MIN_TOKENS}
