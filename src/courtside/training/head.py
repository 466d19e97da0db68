"""From a batch of trained tokens to loss values, metrics and the gradient by the hidden states.

Positions are grouped by the divergence they train; those that train none need no teacher's logits.
A position that trains several divergences is in several groups, whose gradients add up. Which
positions train what is copied to the host once; all kernels of all groups are launched before
metrics are accumulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from courtside.engines.forward.batching import tensor_on
from courtside.engines.lm_head import LMHead
from courtside.errors import RecipeError
from courtside.losses.fused.linear_divergence import ChunkPlan, fused_linear_divergence
from courtside.losses.fused.types import (
    DivergenceSpec,
    Extrapolation,
    HeadGradient,
    HeadLoss,
    HeadLossSpec,
    Projection,
    Support,
    Target,
    TopKTarget,
)
from courtside.losses.reduce import reduce_sum_over
from courtside.recipe import DivergenceLoss, Loss
from courtside.training.loss_terms import LossTerm
from courtside.training.metrics import MetricAccumulator
from courtside.training.token_batch import TokenBatch
from courtside.training.token_losses import make_sampled_token_loss, record_token_metrics

CastWeights = dict[tuple[int, int], tuple[Tensor, Tensor | None]]
"""Weight and bias by module and vocabulary size, in the dtype of the matmuls."""
Mask = NDArray[np.bool_]
TargetName = Literal["teacher", "reference", "extrapolated"]


def backward_through_head(
    batch: TokenBatch,
    head: LMHead,
    terms: Sequence[LossTerm],
    *,
    chunk: int | None,
    metrics: MetricAccumulator,
    cast_weights: CastWeights | None = None,
) -> tuple[Tensor, Tensor]:
    """(∂loss/∂hidden_ND, the student's log-probs of the tokens); gradients of the head's weights
    are accumulated in place.

    `chunk` = None: as many positions as a memory budget allows. `cast_weights` is filled for the
    next call, whose weights must be the same.
    """
    plan = None if chunk is None else ChunkPlan(chunk=chunk, part=chunk)
    cast_weights = {} if cast_weights is None else cast_weights
    head_gradient = _head_gradient(head)
    results = []
    for group in _group_positions(batch, terms):
        members = group.select(batch)
        student = _projection(head, members.hidden_ND, cast_weights)
        target = _target(members, group, cast_weights)
        result = _run_group(members, group, student, target, head_gradient, plan)
        results.append((members, group, result))
    gradient_ND, logp_N = _scatter(batch, results)
    for members, group, result in results:
        _record(members, group, result, metrics)
    return gradient_ND, logp_N


def divergence_spec(loss: DivergenceLoss) -> DivergenceSpec:
    support = None
    if loss.support.kind == "top_k":
        support = Support(k=loss.support.k, of=loss.support.of, form=loss.support.form)
    return DivergenceSpec(
        name=loss.divergence, parameters=loss.divergence_parameters, support=support, clip=loss.clip
    )


def check_divergences(losses: Sequence[Loss]) -> None:
    """Import and check divergences that are not of this package before a run starts."""
    for index, loss in enumerate(losses):
        if loss.kind == "divergence":
            try:
                divergence_spec(loss)
            except ValueError as error:
                raise RecipeError(f"losses[{index}]: {error}") from error


# ── groups of positions ──────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Positions with the same divergence, or with none."""

    positions_M: Tensor | None
    """Their indices, in order, on their device; None: all."""
    term: LossTerm | None
    """The divergence."""
    target: TargetName | None
    """Whose logits are needed."""
    sampled: tuple[LossTerm, ...]
    """Losses of the sampled tokens that train here, on some positions at least."""
    is_first: bool
    """Whether no earlier group has these positions: their token metrics are recorded here."""

    def select(self, batch: TokenBatch) -> TokenBatch:
        return batch if self.positions_M is None else batch.select(self.positions_M)


def _group_positions(batch: TokenBatch, terms: Sequence[LossTerm]) -> list[_Group]:
    # One copy to the host: asked one by one, each answer would synchronize with the GPU.
    on_TN = torch.stack([batch.weight_CN[term.name] > 0 for term in terms]).cpu().numpy()
    nowhere_N = np.zeros_like(on_TN[0])
    divergences: list[tuple[Mask, LossTerm | None, TargetName | None]] = []
    needs_teacher_N = nowhere_N
    for term, on_N in zip(terms, on_TN, strict=True):
        loss = term.loss
        if loss.kind == "divergence":
            target: TargetName = "extrapolated" if loss.extrapolate != 1.0 else loss.against
            divergences.append((on_N, term, target))
            needs_teacher_N = needs_teacher_N | (on_N & (target == "extrapolated"))
        elif loss.kind == "policy_gradient" and loss.baseline:
            needs_teacher_N = needs_teacher_N | on_N
    # Teacher first: where a position is compared with it, metrics and baseline are against it.
    passes = [entry for entry in divergences if entry[2] == "teacher"]
    passes.append((needs_teacher_N, None, "teacher"))
    passes += [entry for entry in divergences if entry[2] != "teacher"]
    passes.append((~nowhere_N, None, None))
    groups, covered_N = [], nowhere_N
    for on_N, divergence, target_name in passes:
        repeated_N = nowhere_N if divergence is None else on_N & covered_N
        for members_N, is_first in ((on_N & ~covered_N, True), (repeated_N, False)):
            if not members_N.any():
                continue
            sampled = tuple(
                term
                for term, term_on_N in zip(terms, on_TN, strict=True)
                if is_first and term.loss.kind != "divergence" and (term_on_N & members_N).any()
            )
            groups.append(
                _Group(
                    positions_M=_positions(members_N, batch.hidden_ND.device),
                    term=divergence,
                    target=target_name,
                    sampled=sampled,
                    is_first=is_first,
                )
            )
        covered_N = covered_N | on_N
    return groups


def _positions(on_N: Mask, device: torch.device) -> Tensor | None:
    if on_N.all():
        return None
    return tensor_on(on_N.nonzero()[0].tolist(), dtype=torch.long, device=device)


def _run_group(
    batch: TokenBatch,
    group: _Group,
    student: Projection,
    target: Target | None,
    head_gradient: HeadGradient,
    plan: ChunkPlan | None,
) -> HeadLoss:
    sampled = tuple(make_sampled_token_loss(term, batch) for term in group.sampled)
    spec = HeadLossSpec(ids_N=batch.ids_N, temperature_N=batch.temperature_N, sampled=sampled)
    if group.term is None:
        return fused_linear_divergence(
            student, target, spec, head_gradient=head_gradient, plan=plan
        )
    loss = group.term.loss
    assert loss.kind == "divergence"
    weight_N = batch.weight_CN[group.term.name] * (loss.weight / group.term.denominator)
    spec = replace(spec, divergence=divergence_spec(loss), weight_N=weight_N)
    result = fused_linear_divergence(student, target, spec, head_gradient=head_gradient, plan=plan)
    extra = loss.entropy_aware
    if extra is None:
        return result
    # weight · 1[H(q) > threshold] · KL(q‖π) on top: the entropy is known after the first pass.
    entropy_N = result.statistics.teacher_entropy_N
    assert result.divergence is not None and entropy_N is not None
    gate_N = (entropy_N > extra.threshold).to(entropy_N.dtype) * extra.weight
    spec = replace(spec, sampled=(), divergence=DivergenceSpec(name="forward_kl"))
    forward = fused_linear_divergence(
        student, target, replace(spec, weight_N=weight_N * gate_N),
        head_gradient=head_gradient, plan=plan,
    )  # fmt: skip
    assert forward.divergence is not None
    value_N = result.divergence.value_N + gate_N * forward.divergence.value_N
    return replace(
        result,
        hidden_gradient_ND=result.hidden_gradient_ND + forward.hidden_gradient_ND,
        divergence=replace(result.divergence, value_N=value_N),
    )


def _scatter(
    batch: TokenBatch, results: Sequence[tuple[TokenBatch, _Group, HeadLoss]]
) -> tuple[Tensor, Tensor]:
    """Gradients and log-probs of all groups in the order of the batch."""
    if len(results) == 1:
        ((_, _, result),) = results
        logp_N = result.statistics.student_logp_N.to(batch.temperature_N.dtype)
        return result.hidden_gradient_ND, logp_N
    gradient_ND = torch.zeros_like(batch.hidden_ND)
    logp_N = batch.temperature_N.new_empty(len(batch))
    for _, group, result in results:
        logp_M = result.statistics.student_logp_N.to(logp_N.dtype)
        if group.positions_M is None:
            gradient_ND += result.hidden_gradient_ND
            logp_N.copy_(logp_M)
        else:
            gradient_ND.index_add_(0, group.positions_M, result.hidden_gradient_ND)
            logp_N[group.positions_M] = logp_M
    return gradient_ND, logp_N


# ── LM heads and targets ─────────────────────────────────────────────────────────────────────────


def _projection(head: LMHead, hidden_ND: Tensor, cast_weights: CastWeights) -> Projection:
    key = (id(head.module), head.vocab_size)
    if key not in cast_weights:
        cast_weights[key] = _cast(*head.parameters())
    weight_VD, bias_V = cast_weights[key]
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


def _cast(weight_VD: Tensor, bias_V: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """What autocast would do for each chunk and group, once for all of them, and once where a
    teacher shares the student's head."""
    weight_VD, bias_V = weight_VD.detach(), None if bias_V is None else bias_V.detach()
    device = weight_VD.device.type
    if not torch.is_autocast_enabled(device):
        return weight_VD, bias_V
    dtype = torch.get_autocast_dtype(device)
    return weight_VD.to(dtype), None if bias_V is None else bias_V.to(dtype)


def _target(batch: TokenBatch, group: _Group, cast_weights: CastWeights) -> Target | None:
    def projection(hidden_ND: Tensor | None, head: LMHead | None) -> Projection:
        assert hidden_ND is not None and head is not None, "no loss trains where no target is"
        return _projection(head, hidden_ND, cast_weights)

    if group.target is None:
        return None
    if group.target == "reference":
        return projection(batch.reference_hidden_ND, batch.reference_head)
    if batch.teacher_top_ids_NK is not None:
        assert batch.teacher_top_logp_NK is not None
        return TopKTarget(ids_NK=batch.teacher_top_ids_NK, logp_NK=batch.teacher_top_logp_NK)
    teacher = projection(batch.teacher_hidden_ND, batch.teacher_head)
    if group.target == "teacher":
        return teacher
    assert group.term is not None and group.term.loss.kind == "divergence"
    reference = projection(batch.reference_hidden_ND, batch.reference_head)
    return Extrapolation(teacher=teacher, reference=reference, lam=group.term.loss.extrapolate)


def _head_gradient(head: LMHead) -> HeadGradient:
    """The gradients of those of the head's parameters that train."""
    adapter = head.adapter

    def gradient(parameter: Any) -> Tensor | None:
        if parameter is None or not parameter.requires_grad:
            return None
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad: Tensor = parameter.grad
        return grad

    return HeadGradient(
        weight_VD=gradient(head.module.weight),
        bias_V=gradient(getattr(head.module, "bias", None)),
        down_RD=gradient(adapter and adapter.down_RD),
        up_VR=gradient(adapter and adapter.up_VR),
    )


# ── values and metrics ───────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def _record(batch: TokenBatch, group: _Group, result: HeadLoss, metrics: MetricAccumulator) -> None:
    statistics = result.statistics

    def add_loss(term: LossTerm, loss_N: Tensor) -> None:
        weight_N = batch.weight_CN[term.name]
        metrics.add_loss(term.name, reduce_sum_over(loss_N, weight_N, term.denominator))

    if group.is_first:
        record_token_metrics(batch, statistics.student_logp_N, metrics)
        if group.target == "teacher":
            metrics.mean("entropy/student", statistics.student_entropy_N)
    for term in group.sampled:
        if term.loss.kind != "preference":  # the value of a preference is of pairs: see `student`
            loss = make_sampled_token_loss(term, batch)
            add_loss(term, loss.per_token(statistics.student_logp_N, statistics.reverse_kl_N))
    if group.is_first and group.target == "teacher" and statistics.reverse_kl_N is not None:
        assert statistics.teacher_entropy_N is not None
        metrics.mean("kl", statistics.reverse_kl_N)
        metrics.mean("entropy/teacher", statistics.teacher_entropy_N)
    if group.term is None:
        return
    stats = result.divergence
    assert stats is not None
    add_loss(group.term, stats.value_N)
    if stats.overlap_N is not None:
        assert stats.student_mass_N is not None and stats.teacher_mass_N is not None
        metrics.mean("topk_mass/student", stats.student_mass_N)
        metrics.mean("topk_mass/teacher", stats.teacher_mass_N)
        metrics.mean("topk_overlap", stats.overlap_N)
