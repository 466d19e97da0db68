"""The LM head with a loss as in a textbook, and cases to compare it on. No code is shared with the
package.

One graph in float64 from hidden states to the loss, whole logits, log_softmax, autograd.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from courtside.losses.fused.linear_divergence import fused_linear_divergence
from courtside.losses.fused.types import (
    DivergenceSpec,
    HeadGradient,
    HeadLoss,
    HeadLossSpec,
    Projection,
    Support,
)
from courtside.losses.policy_gradient import SampledTokenLoss
from courtside.types import LowRank

FULL = [
    DivergenceSpec(name="reverse_kl"),
    DivergenceSpec(name="forward_kl"),
    DivergenceSpec(name="jsd", parameters={"beta": 0.3}),
    DivergenceSpec(name="skew_forward_kl", parameters={"alpha": 0.2}),
    DivergenceSpec(name="skew_reverse_kl", parameters={"alpha": 0.2}),
]
ENDS = [
    DivergenceSpec(name="jsd", parameters={"beta": 0.0}),
    DivergenceSpec(name="jsd", parameters={"beta": 1.0}),
    *(DivergenceSpec(name=f"skew_{kl}_kl", parameters={"alpha": alpha})
      for kl in ("forward", "reverse") for alpha in (0.0, 1.0)),
]  # fmt: skip
ON_SUPPORT = [
    DivergenceSpec(name=name, parameters=parameters, support=Support(k=3, of=of, form=form))
    for of in ("teacher", "student", "joint")
    for name, parameters, form in (
        ("reverse_kl", {}, "tail"),
        ("forward_kl", {}, "tail"),
        ("jsd", {"beta": 0.3}, "tail"),
        ("reverse_kl", {}, "stop_gradient"),
        ("reverse_kl", {}, "renormalized"),
    )
]
WITHOUT_CLOSED_FORM = [
    DivergenceSpec(name="total_variation"),
    DivergenceSpec(name="reverse_kl", clip=0.05),
    DivergenceSpec(name="jsd", parameters={"beta": 0.3}, clip=0.01),
]
TOTAL_VARIATION_ON_SUPPORT = [
    DivergenceSpec(name="total_variation", support=Support(k=3, of=of, form=form))
    for of in ("teacher", "joint")
    for form in ("tail", "renormalized")
]


def label(divergence: DivergenceSpec) -> str:
    share = next(iter(divergence.parameters.values()), None)
    on = divergence.support
    where = f"-{on.of}-{on.form}" if on else ""
    clip = "" if divergence.clip is None else f"-clip {divergence.clip}"
    return divergence.name + (f"-{share}" if share is not None else "") + where + clip


@dataclass(frozen=True, kw_only=True)
class Case:
    student: Projection
    teacher: Projection
    ids_N: Tensor
    temperature_N: Tensor
    weight_N: Tensor
    coefficient_N: Tensor

    def spec(self, divergence: DivergenceSpec | None, *, sampled: bool = True) -> HeadLossSpec:
        return HeadLossSpec(
            ids_N=self.ids_N,
            temperature_N=self.temperature_N,
            divergence=divergence,
            weight_N=None if divergence is None else self.weight_N,
            sampled=(self.sampled_loss(),) if sampled else (),
        )

    def sampled_loss(self) -> SampledTokenLoss:
        """coefficient · log π."""
        ones_N = torch.ones_like(self.coefficient_N)
        return SampledTokenLoss(weight_N=ones_N, advantage_N=-self.coefficient_N)

    def to(self, dtype: torch.dtype, device: str = "cpu") -> Case:
        """All tensors of the two heads in that dtype; per-row numbers in float32 or better."""

        def side(p: Projection) -> Projection:  # fmt: skip
            tensors = {k: getattr(p, k) for k in ("hidden_ND", "weight_VD", "bias_V")}
            low = p.low_rank
            if low is not None:
                down_RD, up_VR = (x.to(device, dtype) for x in (low.down_RD, low.up_VR))
                p = replace(p, low_rank=replace(low, down_RD=down_RD, up_VR=up_VR))
            return replace(
                p, **{k: v if v is None else v.to(device, dtype) for k, v in tensors.items()}
            )

        rows = torch.promote_types(dtype, torch.float32)
        return Case(
            student=side(self.student),
            teacher=side(self.teacher),
            ids_N=self.ids_N.to(device),
            temperature_N=self.temperature_N.to(device, rows),
            weight_N=self.weight_N.to(device, rows),
            coefficient_N=self.coefficient_N.to(device, rows),
        )


def make_case(
    *,
    num_rows: int = 7,
    vocab_size: int = 23,
    sizes: tuple[int, int] = (5, 9),
    spread: float = 1.0,
    bias: bool = False,
    ranks: tuple[int, int] = (0, 0),
    seed: int = 0,
    **options: Any,
) -> Case:
    """Random heads and rows; rows 1 and 4 have no divergence, row 2 no sampled term. `ranks`: of
    the adapters on the heads of student and teacher."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def adapter(size: int, vocab_size: int, rank: int) -> LowRank | None:
        if not rank:
            return None
        down_RD = normal(rank, size) / math.sqrt(size)
        return LowRank(down_RD=down_RD, up_VR=normal(vocab_size, rank) / math.sqrt(rank), scale=1.5)

    def side(size: int, extra: int, rank: int) -> Projection:
        return Projection(
            hidden_ND=normal(num_rows, size),
            weight_VD=normal(vocab_size + extra, size) * spread / math.sqrt(size),
            bias_V=normal(vocab_size + extra) if bias else None,
            low_rank=adapter(size, vocab_size + extra, rank),
            **options,
        )

    weight_N = torch.rand(num_rows, generator=generator, dtype=torch.float64) + 0.5
    coefficient_N = normal(num_rows)
    if num_rows > 4:
        weight_N[[1, 4]] = 0.0
        coefficient_N[2] = 0.0
    return Case(
        student=side(sizes[0], 0, ranks[0]),
        teacher=side(sizes[1], 3, ranks[1]),  # a teacher with more tokens: cut
        ids_N=torch.randint(vocab_size, (num_rows,), generator=generator),
        temperature_N=torch.rand(num_rows, generator=generator, dtype=torch.float64) + 0.6,
        weight_N=weight_N / num_rows,
        coefficient_N=coefficient_N / num_rows,
    )


def exact_case(num_rows: int = 24, vocab_size: int = 60) -> Case:
    """Heads that copy their hidden states, which are logits that bfloat16 holds exactly."""
    case = make_case(num_rows=num_rows, vocab_size=vocab_size, sizes=(vocab_size, vocab_size))

    def copying(side: Projection) -> Projection:
        logits_NV = (side.hidden_ND * 2).bfloat16().double()
        return replace(side, hidden_ND=logits_NV, weight_VD=torch.eye(vocab_size).double())

    rounded = {name: getattr(case, name).float().double() for name in
               ("temperature_N", "weight_N", "coefficient_N")}  # fmt: skip
    return replace(case, student=copying(case.student), teacher=copying(case.teacher), **rounded)


def exclude(
    case: Case, tokens: list[int], *, sides: str = "both", logit: float = -math.inf
) -> Case:
    """Those tokens have this bias, on one side or both."""

    def excluding(side: Projection) -> Projection:
        bias_V = side.bias_V
        if bias_V is None:
            bias_V = side.weight_VD.new_zeros(len(side.weight_VD))
        bias_V = bias_V.clone()
        bias_V[tokens] = logit
        return replace(side, bias_V=bias_V)

    return replace(
        case,
        student=case.student if sides == "teacher" else excluding(case.student),
        teacher=case.teacher if sides == "student" else excluding(case.teacher),
    )


@dataclass(frozen=True, kw_only=True)
class Expected:
    value_N: Tensor
    student_logp_N: Tensor
    teacher_logp_N: Tensor
    student_entropy_N: Tensor
    teacher_entropy_N: Tensor
    reverse_kl_N: Tensor
    hidden_ND: Tensor
    weight_VD: Tensor
    bias_V: Tensor
    down_RD: Tensor | None
    up_VR: Tensor | None


def expected(case: Case, divergence: DivergenceSpec | None, *, sampled: bool = True) -> Expected:
    case = case.to(torch.float64)
    vocab_size = min(len(case.student.weight_VD), len(case.teacher.weight_VD))
    hidden_ND = case.student.hidden_ND.detach().requires_grad_()
    weight_VD = case.student.weight_VD.detach().requires_grad_()
    bias_V = case.student.bias_V
    bias_V = (torch.zeros(len(weight_VD)).double() if bias_V is None else bias_V).requires_grad_()
    student = replace(case.student, hidden_ND=hidden_ND, weight_VD=weight_VD, bias_V=bias_V)
    leaves = [hidden_ND, weight_VD, bias_V]
    if (low := student.low_rank) is not None:
        down_RD, up_VR = (x.detach().requires_grad_() for x in (low.down_RD, low.up_VR))
        student = replace(student, low_rank=replace(low, down_RD=down_RD, up_VR=up_VR))
        leaves += [down_RD, up_VR]
    p_NV = _logp(student, vocab_size, case.temperature_N)
    q_NV = _logp(case.teacher, vocab_size, case.temperature_N).detach()
    rows = torch.arange(len(case.ids_N))
    logp_N = p_NV[rows, case.ids_N]
    value_N, loss = torch.zeros_like(logp_N), p_NV.sum() * 0
    on_N = case.weight_N != 0
    if divergence is not None:
        value_N = divergence_by_hand(p_NV[on_N], q_NV[on_N], divergence)
        loss = loss + (case.weight_N[on_N] * value_N).sum()
        value_N = torch.zeros_like(logp_N).masked_scatter(on_N, value_N)
    if sampled:
        loss = loss + (case.coefficient_N * logp_N).sum()
    gradients = (*torch.autograd.grad(loss, leaves), None, None)
    p_NV, logp_N, value_N = p_NV.detach(), logp_N.detach(), value_N.detach()
    return Expected(
        value_N=value_N,
        student_logp_N=logp_N,
        teacher_logp_N=q_NV[rows, case.ids_N],
        student_entropy_N=-(p_NV.exp() * p_NV).sum(-1),
        teacher_entropy_N=-(q_NV.exp() * q_NV).sum(-1),
        reverse_kl_N=(p_NV.exp() * (p_NV - q_NV)).sum(-1),
        hidden_ND=gradients[0],
        weight_VD=gradients[1],
        bias_V=gradients[2],
        down_RD=gradients[3],
        up_VR=gradients[4],
    )


def _logp(side: Projection, vocab_size: int, temperature_N: Tensor) -> Tensor:
    weight_VD = side.weight_VD
    if (low := side.low_rank) is not None:
        weight_VD = weight_VD + low.scale * low.up_VR @ low.down_RD
    logits_NV = side.hidden_ND @ weight_VD[:vocab_size].T
    if side.bias_V is not None:
        logits_NV = logits_NV + side.bias_V[:vocab_size]
    logits_NV = logits_NV * side.scale
    if side.softcap is not None:
        logits_NV = side.softcap * torch.tanh(logits_NV / side.softcap)
    return (logits_NV / temperature_N[:, None]).log_softmax(-1)


def divergence_by_hand(p_NV: Tensor, q_NV: Tensor, divergence: DivergenceSpec) -> Tensor:
    """p student, q teacher: log-probs."""
    on = divergence.support
    if on is None:
        return _terms(p_NV, q_NV, divergence).sum(-1)
    rows = []
    for p_V, q_V in zip(p_NV, q_NV, strict=True):
        best = {
            "teacher": set(q_V.topk(on.k).indices.tolist()),
            "student": set(p_V.topk(on.k).indices.tolist()),
        }
        best["joint"] = best["teacher"] | best["student"]
        chosen = sorted(best[on.of])
        p_S, q_S = p_V[chosen], q_V[chosen]
        if on.form == "tail":
            # Not 1 − Σ_S: float64 has no digits of it where the tail is below 1e-16.
            outside = [v for v in range(len(p_V)) if v not in chosen]
            p_S = torch.cat([p_S, p_V[outside].logsumexp(-1, keepdim=True)])
            q_S = torch.cat([q_S, q_V[outside].logsumexp(-1, keepdim=True)])
        if on.form == "renormalized":
            p_S, q_S = p_S.log_softmax(-1), q_S.log_softmax(-1)
        if on.form == "stop_gradient" and divergence.name == "reverse_kl":
            terms_S = p_S.exp() * (p_S - q_S).detach()
            rows.append(terms_S.clamp(max=divergence.clip or math.inf).sum())
        else:
            rows.append(_terms(p_S, q_S, divergence).sum())
    return torch.stack(rows)


def _terms(p: Tensor, q: Tensor, divergence: DivergenceSpec) -> Tensor:
    terms = _uncapped_terms(p, q, divergence)
    return terms if divergence.clip is None else terms.clamp(max=divergence.clip)


def _uncapped_terms(p: Tensor, q: Tensor, divergence: DivergenceSpec) -> Tensor:
    name, P, Q = divergence.name, p.exp(), q.exp()
    if name == "total_variation":
        return (P - Q).abs() / 2
    if name == "reverse_kl":
        return P * (p - q)
    if name == "forward_kl":
        return Q * (q - p)
    if name == "jsd":
        beta = divergence.parameters["beta"]
        if beta in (0, 1):
            return P * (p - q) if beta else Q * (q - p)
        m = (beta * Q + (1 - beta) * P).log()
        return beta * Q * (q - m) + (1 - beta) * P * (p - m)
    alpha = divergence.parameters["alpha"]
    if name == "skew_forward_kl":
        return Q * (q - (alpha * Q + (1 - alpha) * P).log())
    return P * (p - (alpha * P + (1 - alpha) * Q).log())


def run_case(
    case: Case, divergence: DivergenceSpec | None, *, plan: Any = None, backend: Any = None,
    **options: Any,
) -> tuple[HeadLoss, HeadGradient]:  # fmt: skip
    """The package's result, and the gradient of the student's head."""
    head_gradient = zero_gradient(case)
    result = fused_linear_divergence(
        case.student, case.teacher, case.spec(divergence, **options), head_gradient=head_gradient,
        plan=plan, backend=backend,
    )  # fmt: skip
    return result, head_gradient


def zero_gradient(case: Case, dtype: torch.dtype | None = None) -> HeadGradient:
    """Zeros for the gradient of the student's head."""
    weight_VD = case.student.weight_VD
    dtype = dtype or torch.promote_types(weight_VD.dtype, torch.float32)
    low = case.student.low_rank
    return HeadGradient(
        weight_VD=torch.zeros_like(weight_VD, dtype=dtype),
        bias_V=torch.zeros_like(weight_VD[:, 0], dtype=dtype),
        down_RD=None if low is None else torch.zeros_like(low.down_RD, dtype=dtype),
        up_VR=None if low is None else torch.zeros_like(low.up_VR, dtype=dtype),
    )


def differences(ours: HeadLoss, into: HeadGradient | None, right: Expected) -> dict[str, float]:
    """‖ours − right‖ / ‖right‖ of everything that came out; inf where something is not finite."""
    pairs: dict[str, tuple[Tensor | None, Tensor | None]] = {
        name: (getattr(ours.statistics, name), getattr(right, name))
        for name in ("student_logp_N", "teacher_logp_N", "student_entropy_N", "teacher_entropy_N",
                     "reverse_kl_N")
    }  # fmt: skip
    pairs["hidden_ND"] = (ours.hidden_gradient_ND, right.hidden_ND)
    pairs["value_N"] = (None if ours.divergence is None else ours.divergence.value_N, right.value_N)
    for name in ("weight_VD", "bias_V", "down_RD", "up_VR"):
        pairs[name] = (None if into is None else getattr(into, name), getattr(right, name))
    result = {}
    for name, (value, right_value) in pairs.items():
        if value is None:
            continue
        assert right_value is not None, name
        assert value.shape == right_value.shape, name
        off = (value.double().cpu() - right_value).norm() / right_value.norm().clamp(min=1e-6)
        result[name] = float(off) if math.isfinite(off) else math.inf
    return result
