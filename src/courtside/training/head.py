"""From a batch of trained tokens to loss values and the gradient by the hidden states.

Positions are grouped by the divergence they train; those that train none need no teacher's logits.
A position that trains several divergences is in several groups, whose gradients add up. Which
positions train what is copied to the host once, before the first kernel is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from courtside.engines.forward.batching import tensor_on
from courtside.engines.lm_head import LMHead
from courtside.losses.fused.linear_divergence import ChunkPlan, fused_linear_divergence
from courtside.losses.fused.types import (
    DivergenceSpec,
    Extrapolation,
    HeadGradient,
    HeadLoss,
    HeadLossSpec,
    Projection,
    Target,
    TopKTarget,
)
from courtside.losses.policy_gradient import SampledTokenLoss
from courtside.training.loss_terms import LossTerm
from courtside.training.token_batch import TokenBatch

CastWeights = dict[tuple[int, int], tuple[Tensor, Tensor | None]]
"""Weight and bias by module and vocabulary size, in the dtype of the matmuls."""
Mask = NDArray[np.bool_]
TargetName = Literal["teacher", "reference", "extrapolated", "contrasted"]
FORWARD_KL = DivergenceSpec(name="forward_kl")


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionGroup:
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
    """Whether no earlier group has these positions."""


class GroupLoss(NamedTuple):
    group: PositionGroup
    batch: TokenBatch
    sampled: tuple[SampledTokenLoss, ...]
    loss: HeadLoss


def backward_through_head(
    batch: TokenBatch,
    head: LMHead,
    terms: Sequence[LossTerm],
    *,
    chunk: int | None,
    cast_weights: CastWeights | None = None,
) -> tuple[Tensor, Tensor, list[GroupLoss]]:
    """(∂loss/∂hidden_ND, the student's log-probs of the tokens, what the metrics are made of);
    gradients of the head's weights are accumulated in place.

    `chunk` = None: as many positions as a memory budget allows. `cast_weights` is filled for the
    next call, whose weights must be the same.
    """
    if any(getattr(term.loss, "gate", None) is not None for term in terms):
        batch = batch.apply_gates(terms)
    plan = None if chunk is None else ChunkPlan(chunk=chunk, part=chunk)
    cast_weights = {} if cast_weights is None else cast_weights
    head_gradient = allocate_head_gradient(head)
    losses = []
    for group in _group_positions(batch, terms):
        members = batch if group.positions_M is None else batch.select(group.positions_M)
        sampled = tuple(members.sampled_loss(term) for term in group.sampled)
        run = partial(
            fused_linear_divergence,
            _project(head, members.hidden_ND, cast_weights),
            _target(members, group, cast_weights),
            head_gradient=head_gradient,
            plan=plan,
        )
        loss = _run_group(members, group.term, sampled, run)
        losses.append(GroupLoss(group, members, sampled, loss))
    return *_scatter(batch, losses), losses


# ── groups of positions ──────────────────────────────────────────────────────────────────────────


def _group_positions(batch: TokenBatch, terms: Sequence[LossTerm]) -> list[PositionGroup]:
    # One copy to the host: asked one by one, each answer would synchronize with the GPU.
    on_TN = torch.stack([batch.weight_CN[term.name] > 0 for term in terms]).cpu().numpy()
    nowhere_N = np.zeros_like(on_TN[0])
    divergences: list[tuple[Mask, LossTerm | None, TargetName | None]] = []
    needs_teacher_N = nowhere_N
    for term, on_N in zip(terms, on_TN, strict=True):
        loss = term.loss
        if loss.kind == "divergence":
            target: TargetName = "extrapolated" if loss.extrapolate != 1.0 else loss.against
            target = "contrasted" if loss.contrast is not None else target
            divergences.append((on_N, term, target))
            needs_teacher_N = needs_teacher_N | (on_N & (target in ("extrapolated", "contrasted")))
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
                PositionGroup(
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
    term: LossTerm | None,
    sampled: tuple[SampledTokenLoss, ...],
    run: Callable[[HeadLossSpec], HeadLoss],
) -> HeadLoss:
    spec = HeadLossSpec(ids_N=batch.ids_N, temperature_N=batch.temperature_N, sampled=sampled)
    if term is None:
        return run(spec)
    loss = term.loss
    assert loss.kind == "divergence"
    weight_N = batch.weight_CN[term.name] * (loss.weight / term.denominator)
    result = run(replace(spec, divergence=term.divergence, weight_N=weight_N))
    extra = loss.entropy_aware
    if extra is None:
        return result
    # weight · 1[H(q) > threshold] · KL(q‖π) on top: the entropy is known after the first pass.
    entropy_N = result.statistics.teacher_entropy_N
    assert result.divergence is not None and entropy_N is not None
    gate_N = (entropy_N > extra.threshold).to(entropy_N.dtype) * extra.weight
    forward = run(replace(spec, sampled=(), divergence=FORWARD_KL, weight_N=weight_N * gate_N))
    assert forward.divergence is not None
    value_N = result.divergence.value_N + gate_N * forward.divergence.value_N
    return replace(
        result,
        hidden_gradient_ND=result.hidden_gradient_ND + forward.hidden_gradient_ND,
        divergence=replace(result.divergence, value_N=value_N),
    )


def _scatter(batch: TokenBatch, losses: Sequence[GroupLoss]) -> tuple[Tensor, Tensor]:
    """Gradients and log-probs of all groups in the order of the batch."""
    dtype = batch.temperature_N.dtype
    if len(losses) == 1:
        loss = losses[0].loss
        return loss.hidden_gradient_ND, loss.statistics.student_logp_N.to(dtype)
    gradient_ND = torch.zeros_like(batch.hidden_ND)
    logp_N = torch.empty_like(batch.temperature_N)
    for group, *_, loss in losses:
        positions_M = slice(None) if group.positions_M is None else group.positions_M
        logp_N[positions_M] = loss.statistics.student_logp_N.to(dtype)
        if group.positions_M is None:
            gradient_ND += loss.hidden_gradient_ND
        else:
            gradient_ND.index_add_(0, group.positions_M, loss.hidden_gradient_ND)
    return gradient_ND, logp_N


# ── LM heads and targets ─────────────────────────────────────────────────────────────────────────


def _project(head: LMHead, hidden_ND: Tensor, cast_weights: CastWeights) -> Projection:
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


def _target(batch: TokenBatch, group: PositionGroup, cast_weights: CastWeights) -> Target | None:
    def project(hidden_ND: Tensor | None, head: LMHead | None) -> Projection:
        assert hidden_ND is not None and head is not None, "no loss trains where no target is"
        return _project(head, hidden_ND, cast_weights)

    if group.target is None:
        return None
    if group.target == "reference":
        return project(batch.reference_hidden_ND, batch.reference_head)
    if batch.teacher_top_ids_NK is not None:
        assert batch.teacher_top_logp_NK is not None
        return TopKTarget(
            ids_NK=batch.teacher_top_ids_NK,
            logp_NK=batch.teacher_top_logp_NK,
            num_student=batch.num_student_ids,
        )
    teacher = project(batch.teacher_hidden_ND, batch.teacher_head)
    if group.target == "teacher":
        return teacher
    assert group.term is not None and group.term.loss.kind == "divergence"
    if (contrast := group.term.loss.contrast) is not None:
        # Away from the wrong hint as an extrapolation goes away from the reference.
        wrong = project(batch.wrong_hidden_ND, batch.teacher_head)
        return Extrapolation(teacher=teacher, reference=wrong, lam=1 + contrast)
    reference = project(batch.reference_hidden_ND, batch.reference_head)
    return Extrapolation(teacher=teacher, reference=reference, lam=group.term.loss.extrapolate)


def allocate_head_gradient(head: LMHead) -> HeadGradient:
    """The gradients of those of the head's parameters that train, zeros where there are none."""
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
