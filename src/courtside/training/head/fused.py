"""The losses over the vocabulary through the fused head, where its closed forms cover them.

Same contract as `head.backward_through_head`, which takes what is left, on any device: a cap on
each of all words, extrapolated targets, the entropy-aware term, two divergences on one position, a
baseline where a divergence is against the reference. Positions are grouped by the divergence they
train; those that train none need no teacher's logits.

Which positions train what is asked of the GPU once. All products and kernels of all groups are
under way before anything is read back for the metrics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from courtside.engines.forward.logprobs import default_chunk_size
from courtside.engines.lm_head import LMHead
from courtside.engines.transfer import tensor_on
from courtside.losses.fused.linear_divergence import ChunkPlan, fused_linear_divergence
from courtside.losses.fused.types import (
    DivergenceSpec,
    DivergenceStats,
    HeadGradient,
    HeadLoss,
    HeadLossSpec,
    Projection,
    Support,
    TokenStatistics,
)
from courtside.losses.reduce import reduce_sum_over
from courtside.recipe import DivergenceLoss, Loss
from courtside.training.head import autograd as autograd
from courtside.training.loss_terms import LossTerm
from courtside.training.metrics import MetricAccumulator
from courtside.training.token_batch import TokenBatch
from courtside.training.token_losses import record_token_metrics, sampled_token_loss

Heads = dict[tuple[int, int], tuple[Tensor, Tensor | None]]
"""Weight and bias by module and number of words, in the dtype of the arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Positions with the same divergence, or with none."""

    places_M: Tensor | None
    """Which of the rows, in order, on their device; None: all."""
    divergence: LossTerm | None
    against: str | None
    """Whose logits are needed: "teacher", "reference" or nobody's."""
    sampled: tuple[LossTerm, ...]
    """Losses of the sampled tokens that train here, on some positions at least."""

    def own(self, rows: TokenBatch) -> TokenBatch:
        return rows if self.places_M is None else rows.only(self.places_M)


def backward_through_head(
    rows: TokenBatch,
    head: LMHead,
    components: Sequence[LossTerm],
    *,
    chunk: int | None,
    metrics: MetricAccumulator,
    heads: Heads | None = None,
) -> tuple[Tensor, Tensor]:
    """∂loss/∂hidden_ND (gradients of the head's own weights are accumulated in place), and the
    student's log-probs of the tokens. `chunk` = None: as many rows as a memory budget allows.
    `heads` keeps what was rounded for the next call, whose weights must be the same."""
    groups = _groups(rows, components)
    if groups is None:
        size = chunk or default_chunk_size(head.vocab_size, rows.hidden_ND.device)
        return autograd.backward_through_head(rows, head, components, chunk=size, metrics=metrics)
    plan = None if chunk is None else ChunkPlan(chunk=chunk, part=chunk)
    heads = {} if heads is None else heads
    into = _into(head)
    results = []
    for group in groups:
        own = group.own(rows)
        found = fused_linear_divergence(
            _projection(head, own.hidden_ND, heads),
            _other(own, group.against, heads),
            _asked(own, group),
            into=into,
            plan=plan,
        )
        results.append((own, group, found))
    gradient_ND, logp_N = _in_place(rows, [(group, found) for _, group, found in results])
    for own, group, found in results:
        _tell(own, group, found, metrics)
    return gradient_ND, logp_N


def _in_place(
    rows: TokenBatch, results: Sequence[tuple[_Group, HeadLoss]]
) -> tuple[Tensor, Tensor]:
    """Gradients and log-probs of all groups in the order of the rows."""
    gradient_ND = torch.empty_like(rows.hidden_ND)
    logp_N = rows.temperature_N.new_empty(len(rows))
    for group, found in results:
        found_logp_M = found.statistics.student_logp_N.to(logp_N.dtype)
        if group.places_M is None:
            return found.hidden_gradient_ND, found_logp_M
        gradient_ND[group.places_M] = found.hidden_gradient_ND
        logp_N[group.places_M] = found_logp_M
    return gradient_ND, logp_N


# ── what is asked of the fused head ──────────────────────────────────────────────────────────────


def _covered(loss: Loss) -> bool:
    if loss.kind != "divergence":
        return True
    capped = loss.clip is not None and loss.support.kind == "full"
    return not capped and loss.extrapolate == 1.0 and loss.entropy_aware is None


def _groups(rows: TokenBatch, components: Sequence[LossTerm]) -> list[_Group] | None:
    """None: some position trains something that has no closed form here."""
    # To the CPU in one piece: asked one by one, each answer would wait for the GPU.
    on_CN = torch.stack([rows.weight_CN[c.name] > 0 for c in components]).cpu()
    taken_N, needed_N = torch.zeros_like(on_CN[0]), torch.zeros_like(on_CN[0])
    found: list[tuple[Tensor, LossTerm | None, str | None]] = []
    for component, on_N in zip(components, on_CN, strict=True):
        loss = component.loss
        if loss.kind == "policy_gradient" and loss.baseline:
            needed_N = needed_N | on_N
        if loss.kind != "divergence" or not bool(on_N.any()):
            continue
        if not _covered(loss) or bool((taken_N & on_N).any()):
            return None
        taken_N = taken_N | on_N
        found.append((on_N, component, loss.against))
    if any(against != "teacher" and bool((on_N & needed_N).any()) for on_N, _, against in found):
        return None  # a baseline is against the teacher
    found += [(needed_N & ~taken_N, None, "teacher"), (~needed_N & ~taken_N, None, None)]
    return [
        _Group(
            places_M=_places(on_N, rows.hidden_ND.device),
            divergence=divergence,
            against=against,
            sampled=tuple(
                c
                for c, own_N in zip(components, on_CN, strict=True)
                if c.loss.kind != "divergence" and bool((on_N & own_N).any())
            ),
        )
        for on_N, divergence, against in found
        if bool(on_N.any())
    ]


def _places(on_N: Tensor, device: torch.device) -> Tensor | None:
    if bool(on_N.all()):
        return None
    return tensor_on(on_N.nonzero().squeeze(-1).tolist(), dtype=torch.long, device=device)


def _asked(rows: TokenBatch, group: _Group) -> HeadLossSpec:
    def coefficient(part: slice, found: TokenStatistics) -> Tensor:
        return _coefficient(rows.cut(part.start, part.stop), group.sampled, found)

    fixed_N = None
    if group.sampled and all(_is_linear(c.loss) for c in group.sampled):
        zeros_N = torch.zeros_like(rows.temperature_N)
        zeros = TokenStatistics(student_logp_N=zeros_N, student_entropy_N=zeros_N)
        fixed_N = _coefficient(rows, group.sampled, zeros)
    weight_N = None
    if group.divergence is not None:
        loss = group.divergence.loss
        weight_N = rows.weight_CN[group.divergence.name] * loss.weight
        weight_N = weight_N / group.divergence.denominator
    return HeadLossSpec(
        ids_N=rows.ids_N,
        temperature_N=rows.temperature_N,
        divergence=None if group.divergence is None else _divergence(group.divergence.loss),
        weight_N=weight_N,
        sampled=(fixed_N if fixed_N is not None else coefficient) if group.sampled else None,
    )


def _divergence(loss: Loss) -> DivergenceSpec:
    assert isinstance(loss, DivergenceLoss)
    support = None
    if loss.support.kind == "top_k":
        support = Support(
            k=loss.support.k, of=loss.support.of, form=loss.support.form, clip=loss.clip
        )
    return DivergenceSpec(name=loss.divergence, beta=loss.beta, alpha=loss.alpha, support=support)


def _is_linear(loss: Loss) -> bool:
    """Whether its gradient by the log-probs does not depend on them."""
    return loss.kind in ("cross_entropy", "preference") or (
        loss.kind == "policy_gradient" and loss.ratio == "none" and not loss.baseline
    )


def _coefficient(
    rows: TokenBatch, components: Sequence[LossTerm], found: TokenStatistics
) -> Tensor:
    """∂loss/∂log π of the sampled tokens, over all these components."""
    with torch.enable_grad():
        leaf_N = found.student_logp_N.detach().requires_grad_()
        found = replace(found, student_logp_N=leaf_N)
        total = leaf_N.sum() * 0.0
        for component, mean in _sampled_means(rows, components, found):
            total = total + component.loss.weight * mean
        (gradient_N,) = torch.autograd.grad(total, leaf_N)
    return gradient_N


def _sampled_means(
    rows: TokenBatch, components: Sequence[LossTerm], found: TokenStatistics
) -> Iterator[tuple[LossTerm, Tensor]]:
    """Each loss on sampled tokens over its denominator, from its own rows only."""
    for component in components:
        weight_N = rows.weight_CN[component.name]
        own, logp_N, kl_N = _silenced(rows, found, weight_N > 0)
        loss_N = sampled_token_loss(component, own, logp_N, kl_N)
        yield component, reduce_sum_over(loss_N, weight_N, component.denominator)


def _silenced(
    rows: TokenBatch, found: TokenStatistics, on_N: Tensor
) -> tuple[TokenBatch, Tensor, Tensor | None]:
    """Zeros for the sampled tokens of other rows, before the loss sees them: they may hold NaN, and
    a NaN that is masked out afterwards is still NaN in the gradient. Which rows stays unasked."""

    def own(values_N: Tensor) -> Tensor:
        return torch.where(on_N, values_N, 0.0)

    silenced = replace(
        rows,
        sampler_logp_N=own(rows.sampler_logp_N),
        teacher_logp_N=own(rows.teacher_logp_N),
        reference_logp_N=own(rows.reference_logp_N),
        advantage_CN={name: own(values_N) for name, values_N in rows.advantage_CN.items()},
    )
    kl_N = found.reverse_kl_N
    return silenced, own(found.student_logp_N), None if kl_N is None else own(kl_N)


# ── the two heads ────────────────────────────────────────────────────────────────────────────────


def _projection(head: LMHead, hidden_ND: Tensor, heads: Heads) -> Projection:
    key = (id(head.module), head.vocab_size)
    if key not in heads:
        heads[key] = _in_arithmetic(*head.parameters())
    weight_VD, bias_V = heads[key]
    low = head.low_rank()
    if low is not None:
        down_RD, up_VR = (p.detach().to(weight_VD.dtype) for p in (low.down_RD, low.up_VR))
        low = replace(low, down_RD=down_RD, up_VR=up_VR)
    return Projection(
        hidden_ND=hidden_ND.detach(),
        weight_VD=weight_VD,
        bias_V=bias_V,
        scale=head.scale,
        softcap=head.softcap,
        low_rank=low,
    )


def _in_arithmetic(weight_VD: Tensor, bias_V: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Once for all chunks and groups, and once where a teacher has the student's own head: what
    autocast would do for each of them."""
    weight_VD, bias_V = weight_VD.detach(), None if bias_V is None else bias_V.detach()
    device = weight_VD.device.type
    if not torch.is_autocast_enabled(device):
        return weight_VD, bias_V
    dtype = torch.get_autocast_dtype(device)
    return weight_VD.to(dtype), None if bias_V is None else bias_V.to(dtype)


def _other(rows: TokenBatch, against: str | None, heads: Heads) -> Projection | None:
    if against is None:
        return None
    hidden_ND, head = rows.teacher_hidden_ND, rows.teacher_head
    if against == "reference":
        hidden_ND, head = rows.reference_hidden_ND, rows.reference_head
    assert hidden_ND is not None and head is not None, "no loss asks where nobody spoke"
    return _projection(head, hidden_ND, heads)


def _into(head: LMHead) -> HeadGradient:
    """The gradients of those of the head's own parameters that train."""
    adapter = head.adapter

    def gradient(parameter: Any) -> Tensor | None:
        if parameter is None or not parameter.requires_grad:
            return None
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        found: Tensor = parameter.grad
        return found

    return HeadGradient(
        weight_VD=gradient(head.module.weight),
        bias_V=gradient(getattr(head.module, "bias", None)),
        down_RD=gradient(adapter and adapter.down_RD),
        up_VR=gradient(adapter and adapter.up_VR),
    )


# ── what came of it ──────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def _tell(rows: TokenBatch, group: _Group, found: HeadLoss, metrics: MetricAccumulator) -> None:
    statistics = found.statistics
    record_token_metrics(rows, statistics.student_logp_N, metrics)
    for component, mean in _sampled_means(rows, group.sampled, statistics):
        if component.loss.kind != "preference":  # its value is of pairs: see `step`
            metrics.add_loss(component.name, mean)
    if group.against == "teacher":
        assert statistics.reverse_kl_N is not None and statistics.teacher_entropy_N is not None
        metrics.mean("kl", statistics.reverse_kl_N)
        metrics.mean("entropy/student", statistics.student_entropy_N)
        metrics.mean("entropy/teacher", statistics.teacher_entropy_N)
    if group.divergence is not None:
        assert found.found is not None
        _tell_divergence(rows, group.divergence, found.found, metrics)


def _tell_divergence(
    rows: TokenBatch, component: LossTerm, found: DivergenceStats, metrics: MetricAccumulator
) -> None:
    weight_N = rows.weight_CN[component.name]
    mean = reduce_sum_over(found.value_N, weight_N, component.denominator)
    metrics.add_loss(component.name, mean)
    if found.overlap_N is not None:
        assert found.student_mass_N is not None and found.teacher_mass_N is not None
        metrics.mean("mass/student", found.student_mass_N)
        metrics.mean("mass/teacher", found.teacher_mass_N)
        metrics.mean("overlap", found.overlap_N)
