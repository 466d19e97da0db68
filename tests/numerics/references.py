"""Textbook formulas, token by token in probability space. They share no code with the package.

Every function takes one position: lists of 0-dimensional tensors, so that autograd gives the
reference gradient too. A probability of exactly zero is skipped (0·log 0 = 0).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Probabilities = Sequence[Tensor]


def number(x: Tensor) -> float:
    return float(x.detach())


def softmax_by_hand(logits_V: Tensor) -> list[Tensor]:
    """Probabilities; a logit of −inf is an excluded token."""
    allowed = [v for v in range(len(logits_V)) if number(logits_V[v]) != -math.inf]
    largest = max(number(logits_V[v]) for v in allowed)
    weights = {v: torch.exp(logits_V[v] - largest) for v in allowed}
    total = sum(weights.values())
    zero = torch.zeros((), dtype=logits_V.dtype)
    return [weights[v] / total if v in weights else zero for v in range(len(logits_V))]


def kl_term(p: Tensor, r: Tensor) -> Tensor:
    return p * torch.log(p / r) if number(p) > 0 else torch.zeros_like(p)


def capped_sum(terms: Probabilities, clip: float | None) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for term in terms:
        total = total + (clip if clip is not None and number(term) > clip else term)
    return total


def reverse_kl(student: Probabilities, teacher: Probabilities, clip: float | None = None) -> Tensor:
    return capped_sum([kl_term(p, q) for p, q in zip(student, teacher, strict=True)], clip)


def forward_kl(student: Probabilities, teacher: Probabilities, clip: float | None = None) -> Tensor:
    return capped_sum([kl_term(q, p) for p, q in zip(student, teacher, strict=True)], clip)


def jsd(
    student: Probabilities, teacher: Probabilities, beta: float, clip: float | None = None
) -> Tensor:
    terms = []
    for p, q in zip(student, teacher, strict=True):
        m = beta * q + (1 - beta) * p
        terms.append(beta * kl_term(q, m) + (1 - beta) * kl_term(p, m))
    return capped_sum(terms, clip)


def skew_forward_kl(
    student: Probabilities, teacher: Probabilities, alpha: float, clip: float | None = None
) -> Tensor:
    pairs = zip(student, teacher, strict=True)
    return capped_sum([kl_term(q, alpha * q + (1 - alpha) * p) for p, q in pairs], clip)


def skew_reverse_kl(
    student: Probabilities, teacher: Probabilities, alpha: float, clip: float | None = None
) -> Tensor:
    pairs = zip(student, teacher, strict=True)
    return capped_sum([kl_term(p, alpha * p + (1 - alpha) * q) for p, q in pairs], clip)


def total_variation(
    student: Probabilities, teacher: Probabilities, clip: float | None = None
) -> Tensor:
    pairs = zip(student, teacher, strict=True)
    # The sign by hand: the derivative of |x| at 0 is 0.
    return capped_sum([(p - q) * _sign(p - q) / 2 for p, q in pairs], clip)


def _sign(x: Tensor) -> float:
    return float((number(x) > 0) - (number(x) < 0))


def sampled_reverse_kl(student_logp_T: Tensor, teacher_logp_T: Tensor) -> Tensor:
    """Surrogate: its expected gradient is that of KL(student ‖ teacher) at each prefix."""
    return (student_logp_T - teacher_logp_T).detach() * student_logp_T


def entropy(p: Probabilities) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for x in p:
        total = total - (x * torch.log(x) if number(x) > 0 else 0.0)
    return total


def bucketed(p: Probabilities, support: Sequence[int]) -> list[Tensor]:
    """The tokens of the support, then everything else as one class."""
    zero = torch.zeros((), dtype=torch.float64)
    tail = sum((p[v] for v in range(len(p)) if v not in support), zero)
    return [*(p[v] for v in support), tail]


def renormalized(p: Probabilities, support: Sequence[int]) -> list[Tensor]:
    total = sum((p[v] for v in support), torch.zeros((), dtype=torch.float64))
    return [p[v] / total for v in support]


def by_position(
    reference: Callable[[list[Tensor], list[Tensor]], Tensor],
    student_logits_TV: Tensor,
    teacher_logits_TV: Tensor,
) -> tuple[Tensor, Tensor]:
    """(values_T, gradient_TV of Σ_t (t + 1)·value_t by the student's logits)."""
    logits_TV = student_logits_TV.detach().clone().requires_grad_()
    rows = zip(logits_TV, teacher_logits_TV.detach(), strict=True)
    values = [reference(softmax_by_hand(s), softmax_by_hand(t)) for s, t in rows]
    total = sum(((t + 1) * value for t, value in enumerate(values)), torch.zeros(()))
    if not total.requires_grad:  # Every token capped: a constant.
        return torch.stack(values), torch.zeros_like(logits_TV)
    (gradient_TV,) = torch.autograd.grad(total, logits_TV)
    return torch.stack(values).detach(), gradient_TV


def of_ours(
    loss: Callable[[Tensor, Tensor], Tensor], student_logits_TV: Tensor, teacher_logits_TV: Tensor
) -> tuple[Tensor, Tensor]:
    """The same pair for a loss of the package, which takes log-probabilities.

    The teacher's logits ask for a gradient and must not get one.
    """
    student_TV = student_logits_TV.detach().clone().requires_grad_()
    teacher_TV = teacher_logits_TV.detach().clone().requires_grad_()
    values_T = loss(student_TV.log_softmax(-1), teacher_TV.log_softmax(-1))
    weights_T = torch.arange(1, len(values_T) + 1, dtype=values_T.dtype)
    gradient_TV, unwanted = torch.autograd.grad(
        (weights_T * values_T).sum(), (student_TV, teacher_TV), allow_unused=True
    )
    assert unwanted is None, "gradient reached the teacher"
    return values_T.detach(), gradient_TV
