"""The batch of one step and the gradients of its losses."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from support.float64 import double
from torch import Tensor

from courtside.runtime import Runtime
from courtside.training.metrics import MetricAccumulator
from courtside.types import Scored

Gradients = dict[str, Tensor]


def score_batch(parts: Runtime, num_tasks: int = 3, *, step: int = 0) -> list[Scored]:
    return parts.teacher(parts.rollout(parts.tasks.batch(step, num_tasks), step))


def accumulate(parts: Runtime, scored: list[Scored]) -> tuple[Gradients, MetricAccumulator]:
    """Gradients of the recipe's losses, and their metrics; the weights have none afterwards."""
    terms = parts.student.make_terms(scored)
    metrics = MetricAccumulator()
    parts.student.accumulate(0, scored, terms, metrics)
    return take_gradients(parts.student.weights.trained), metrics


def compute_gradients(parts: Runtime, scored: list[Scored]) -> Gradients:
    return accumulate(parts, scored)[0]


def take_gradients(parameters: Mapping[str, Tensor]) -> Gradients:
    """Copies, because gradient buffers are reused; the parameters have none afterwards."""
    gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    for parameter in parameters.values():
        parameter.grad = None
    return gradients


def flatten_gradients(gradients: Gradients) -> Tensor:
    return torch.cat([gradients[name].cpu().double().flatten() for name in sorted(gradients)])


def assert_equal_gradients(gradients: Gradients, expected: Gradients) -> None:
    """Up to float64 rounding, and not all zero."""
    assert gradients.keys() == expected.keys() and gradients
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-8, atol=1e-11)
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 1e-4


def make_float64(parts: Runtime) -> Runtime:
    """All models in float64, the student moved away from its reference."""
    for scorer in (parts, parts.teacher.teacher, parts.teacher.reference):
        for route in getattr(scorer, "routes", {"": scorer}).values():
            if route is not None:
                double(route.engine.model)
    perturb_weights(parts)
    return parts


def perturb_weights(parts: Runtime, scale: float = 0.05) -> None:
    """Half of a new adapter is zero, and a new student is its own reference."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in parts.student.weights.trained.values():
            parameter += scale * torch.randn(parameter.shape, dtype=parameter.dtype).to(parameter)
