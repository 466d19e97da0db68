from __future__ import annotations

import math

import pytest
import torch
from support.small_runs import small_recipe
from torch import nn

from courtside.assemble import assemble
from courtside.training.loss_terms import make_loss_terms
from courtside.training.metrics import MetricAccumulator
from courtside.training.optimizer import make_optimizer


def recipe_with(tiny_folder, **train):
    return small_recipe(
        tiny_folder,
        teacher={"kind": "self", "context": {"kind": "system", "text": "x"}},
        train=train,
    )


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.1, 0.2, 0.2, 0.2, 0.2, 0.2]),
        ("linear", [0.1, 0.2, 0.2, 0.15, 0.1, 0.05]),
        ("cosine", [0.1, 0.2, *(0.1 * (1 + math.cos(math.pi * i / 4)) for i in range(4))]),
    ],
)
def test_the_schedule(schedule, expected, tiny_folder):
    recipe = recipe_with(
        tiny_folder, steps=6, warmup_steps=2, lr_schedule=schedule, learning_rate=0.2
    )
    assert [recipe.learning_rate_at(step) for step in range(6)] == pytest.approx(expected)


def test_without_warm_up_the_first_step_has_the_full_rate(tiny_folder):
    for schedule in ("constant", "linear", "cosine"):
        recipe = recipe_with(tiny_folder, steps=4, lr_schedule=schedule, learning_rate=0.2)
        assert recipe.learning_rate_at(0) == 0.2


def test_weight_decay_is_for_matrices_only(tiny_folder):
    recipe = recipe_with(tiny_folder, weight_decay=0.5, learning_rate=0.1)
    trained = {"matrix": nn.Parameter(torch.ones(2, 2)), "gain": nn.Parameter(torch.ones(2))}
    optimizer = make_optimizer(trained, recipe)
    for parameter in trained.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert trained["matrix"].tolist() == [[pytest.approx(0.95)] * 2] * 2
    assert trained["gain"].tolist() == [1.0, 1.0]


def test_the_update_is_adamw_by_hand(tiny_folder, tiny_teacher_folder):
    """Three steps with warm-up, decay and a clip that acts, against the formulas of the paper."""
    train = {
        "steps": 4, "prompts_per_step": 2, "warmup_steps": 2, "lr_schedule": "linear",
        "learning_rate": 3e-3,
        "weight_decay": 0.1, "betas": [0.8, 0.9], "max_grad_norm": 0.5,
    }  # fmt: skip
    parts = assemble(small_recipe(tiny_folder, tiny_teacher_folder, train=train))
    student = parts.student
    trained = student.weights.trained
    expected = {name: p.detach().double().clone() for name, p in trained.items()}
    first = {name: torch.zeros_like(p) for name, p in expected.items()}
    second = {name: torch.zeros_like(p) for name, p in expected.items()}
    for step, rate in enumerate([1.5e-3, 3e-3, 3e-3]):
        scored = parts.teacher(parts.rollout(parts.tasks.batch(step, 2), step))
        chosen = make_loss_terms(parts.recipe.losses, parts.recipe.loss_names(), scored)
        student.accumulate(step, scored, chosen, MetricAccumulator())
        gradient = {name: p.grad.double() for name, p in trained.items()}
        student.optimizer.zero_grad(set_to_none=True)
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradient.values()))
        assert norm > 0.5
        update = student.step(step, scored)
        assert update.metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert update.metrics["learning_rate"] == pytest.approx(rate)
        for name, weight in expected.items():
            g = gradient[name] * 0.5 / norm
            first[name] = 0.8 * first[name] + 0.2 * g
            second[name] = 0.9 * second[name] + 0.1 * g.square()
            m, v = first[name] / (1 - 0.8 ** (step + 1)), second[name] / (1 - 0.9 ** (step + 1))
            decay = 0.1 if weight.ndim == 2 else 0.0
            expected[name] = weight * (1 - rate * decay) - rate * m / (v.sqrt() + 1e-8)
            torch.testing.assert_close(
                trained[name].detach().double(), expected[name], rtol=0, atol=2e-5
            )
        assert all(p.grad is None for p in trained.values())
        # From our own numbers, so that float32 errors do not add up.
        expected = {name: p.detach().double().clone() for name, p in trained.items()}


def test_gradients_below_the_clip_are_left_alone(tiny_folder, tiny_teacher_folder):
    weights = []
    for max_grad_norm in (1e3, 1e6):
        train = {"learning_rate": 1e-3, "max_grad_norm": max_grad_norm}
        parts = assemble(small_recipe(tiny_folder, tiny_teacher_folder, train=train))
        scored = parts.teacher(parts.rollout(parts.tasks.batch(0, 2), 0))
        parts.student.step(0, scored)
        weights.append([p.detach().clone() for p in parts.student.weights.trained.values()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
