"""The batch and the gradients of one step, for tests that look into it."""

from __future__ import annotations

from torch import Tensor

from courtside.runtime import Runtime
from courtside.training.loss_terms import make_loss_terms
from courtside.training.metrics import MetricAccumulator
from courtside.types import Scored


def batch_of(parts: Runtime) -> list[Scored]:
    return parts.teacher(parts.rollout(parts.tasks.batch(0, 3), 0))


def gradients(parts: Runtime, scored: list[Scored]) -> dict[str, Tensor]:
    """Copies: the weights have none afterwards."""
    chosen = make_loss_terms(parts.recipe.losses, parts.recipe.loss_names(), scored)
    parts.student.accumulate(0, scored, chosen, MetricAccumulator())
    trained = parts.student.weights.trained
    found = {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}
    parts.student.optimizer.zero_grad(set_to_none=True)
    return found
