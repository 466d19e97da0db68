"""AdamW with a schedule that is a function of the step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from courtside.recipe import Recipe
from courtside.training.offloaded_adamw import OffloadedAdamW


def make_optimizer(trained: Mapping[str, nn.Parameter], recipe: Recipe) -> torch.optim.AdamW:
    # Gains and biases are not decayed: pulling them to zero is no regularizer.
    matrices = [p for p in trained.values() if p.ndim >= 2]
    vectors = [p for p in trained.values() if p.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": recipe.train.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    settings: dict[str, Any] = {"lr": recipe.learning_rate, "betas": recipe.train.betas}
    if recipe.train.optimizer_offload:
        return OffloadedAdamW(groups, **settings)
    return torch.optim.AdamW(groups, fused=True, **settings)


def learning_rate_at(step: int, recipe: Recipe) -> float:
    """Linear warm-up, then constant, linear or cosine to zero after the last step."""
    train = recipe.train
    if step < train.warmup_steps:
        return recipe.learning_rate * (step + 1) / train.warmup_steps
    done = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    factor = {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
    }[train.lr_schedule]
    return recipe.learning_rate * factor
