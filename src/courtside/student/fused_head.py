"""The losses over the vocabulary through the fused head, where its closed forms cover them.

Same contract as `head.backward_through_head`, which takes what is left: a cap on each of all words,
extrapolated targets, the entropy-aware term, two divergences on one position. Positions are grouped
by the divergence they train; those that train none need no teacher's logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from courtside.config import DivergenceLoss, Loss
from courtside.engines.base import Head
from courtside.losses.fused import Plan, divergence_head
from courtside.losses.fused_records import (
    Asked,
    Divergence,
    Found,
    HeadGradient,
    HeadLoss,
    Projection,
    Statistics,
    Support,
)
from courtside.losses.reduce import reduce_sum_over
from courtside.student import head as autograd
from courtside.student.components import Component
from courtside.student.rows import Rows
from courtside.student.sampled import sampled_loss, watch
from courtside.student.tally import Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Positions with the same divergence, or with none."""

    on_N: Tensor
    divergence: Component | None
    against: str | None
    """Whose logits are needed: "teacher", "reference" or nobody's."""


def backward_through_head(
    rows: Rows, head: Head, components: Sequence[Component], *, chunk: int | None, tally: Tally
) -> tuple[Tensor, Tensor]:
    """∂loss/∂hidden_ND (gradients of the head's own weights are accumulated in place), and the
    student's log-probs of the tokens. `chunk` = None: as many rows as a memory budget allows."""
    # On a GPU the kernels have yet to be run and measured: benchmarks/gpu.sh.
    groups = None if rows.hidden_ND.is_cuda else _groups(rows, components)
    if groups is None:
        size = chunk or autograd.chunk_size(head.num_words, rows.hidden_ND.device)
        return autograd.backward_through_head(rows, head, components, chunk=size, tally=tally)
    gradient_ND = torch.empty_like(rows.hidden_ND)
    logp_N = rows.temperature_N.new_empty(len(rows))
    plan = None if chunk is None else Plan(chunk=chunk, part=chunk)
    student = _projection(head, rows.hidden_ND)
    into = _into(head)
    for group in groups:
        own = rows if bool(group.on_N.all()) else rows.only(group.on_N)
        found = divergence_head(
            replace(student, hidden_ND=own.hidden_ND),
            _other(own, group.against),
            _asked(own, group, components),
            into=into,
            plan=plan,
        )
        gradient_ND[group.on_N] = found.hidden_gradient_ND
        logp_N[group.on_N] = found.statistics.student_logp_N.to(logp_N.dtype)
        _tell(own, group, components, found, tally)
    return gradient_ND, logp_N


# ── what is asked of the fused head ──────────────────────────────────────────────────────────────


def _covered(loss: Loss) -> bool:
    if loss.kind != "divergence":
        return True
    capped = loss.clip is not None and loss.support.kind == "full"
    return not capped and loss.extrapolate == 1.0 and loss.entropy_aware is None


def _groups(rows: Rows, components: Sequence[Component]) -> list[_Group] | None:
    """None: some position trains something that has no closed form here."""
    taken_N = torch.zeros_like(rows.by_student_N)
    groups = []
    for component in components:
        on_N = rows.weight_CN[component.name] > 0
        if component.loss.kind != "divergence" or not bool(on_N.any()):
            continue
        if not _covered(component.loss) or bool((taken_N & on_N).any()):
            return None
        taken_N = taken_N | on_N
        groups.append(_Group(on_N=on_N, divergence=component, against=component.loss.against))
    needed_N = torch.zeros_like(taken_N)
    for component in components:
        if component.loss.kind == "policy_gradient" and component.loss.baseline:
            needed_N = needed_N | (rows.weight_CN[component.name] > 0)
    if any(g.against != "teacher" and bool((g.on_N & needed_N).any()) for g in groups):
        return None  # a baseline is against the teacher
    for on_N, against in ((needed_N & ~taken_N, "teacher"), (~needed_N & ~taken_N, None)):
        if bool(on_N.any()):
            groups.append(_Group(on_N=on_N, divergence=None, against=against))
    return groups


def _asked(rows: Rows, group: _Group, components: Sequence[Component]) -> Asked:
    sampled = [
        c
        for c in components
        if c.loss.kind != "divergence" and bool((rows.weight_CN[c.name] > 0).any())
    ]

    def coefficient(part: slice, found: Statistics) -> Tensor:
        return _coefficient(rows.cut(part.start, part.stop), sampled, found)

    fixed_N = None
    if sampled and all(_is_linear(c.loss) for c in sampled):
        zeros_N = torch.zeros_like(rows.temperature_N)
        zeros = Statistics(student_logp_N=zeros_N, student_entropy_N=zeros_N)
        fixed_N = _coefficient(rows, sampled, zeros)
    weight_N = None
    if group.divergence is not None:
        loss = group.divergence.loss
        weight_N = rows.weight_CN[group.divergence.name] * loss.weight
        weight_N = weight_N / group.divergence.denominator
    return Asked(
        ids_N=rows.ids_N,
        temperature_N=rows.temperature_N,
        divergence=None if group.divergence is None else _divergence(group.divergence.loss),
        weight_N=weight_N,
        sampled=(fixed_N if fixed_N is not None else coefficient) if sampled else None,
    )


def _divergence(loss: Loss) -> Divergence:
    assert isinstance(loss, DivergenceLoss)
    support = None
    if loss.support.kind == "top_k":
        support = Support(
            k=loss.support.k, of=loss.support.of, form=loss.support.form, clip=loss.clip
        )
    return Divergence(name=loss.divergence, beta=loss.beta, alpha=loss.alpha, support=support)


def _is_linear(loss: Loss) -> bool:
    """Whether its gradient by the log-probs does not depend on them."""
    return loss.kind in ("cross_entropy", "preference") or (
        loss.kind == "policy_gradient" and loss.ratio == "none" and not loss.baseline
    )


def _coefficient(rows: Rows, components: Sequence[Component], found: Statistics) -> Tensor:
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
    rows: Rows, components: Sequence[Component], found: Statistics
) -> Iterator[tuple[Component, Tensor]]:
    """Each loss on sampled tokens over its denominator, from its own rows only."""
    for component in components:
        on_N = rows.weight_CN[component.name] > 0
        if component.loss.kind == "divergence" or not bool(on_N.any()):
            continue
        own = rows if bool(on_N.all()) else rows.only(on_N)
        picked = _picked(found, on_N)
        loss_M = sampled_loss(component, own, picked.student_logp_N, picked.reverse_kl_N)
        yield (
            component,
            reduce_sum_over(loss_M, own.weight_CN[component.name], component.denominator),
        )


def _picked(found: Statistics, on_N: Tensor) -> Statistics:
    kl_N = found.reverse_kl_N
    return Statistics(
        student_logp_N=found.student_logp_N[on_N],
        student_entropy_N=found.student_entropy_N[on_N],
        reverse_kl_N=None if kl_N is None else kl_N[on_N],
    )


# ── the two heads ────────────────────────────────────────────────────────────────────────────────


def _projection(head: Head, hidden_ND: Tensor) -> Projection:
    weight_VD: Tensor = head.module.weight[: head.num_words].detach()  # type: ignore[index]
    bias: Tensor | None = getattr(head.module, "bias", None)
    bias_V = None if bias is None else bias[: head.num_words].detach()
    device = weight_VD.device.type
    if torch.is_autocast_enabled(device):
        # Once for all chunks: what autocast would do for each of them.
        dtype = torch.get_autocast_dtype(device)
        weight_VD = weight_VD.to(dtype)
        bias_V = None if bias_V is None else bias_V.to(dtype)
    return Projection(
        hidden_ND=hidden_ND.detach(),
        weight_VD=weight_VD,
        bias_V=bias_V,
        scale=head.scale,
        softcap=head.softcap,
    )


def _other(rows: Rows, against: str | None) -> Projection | None:
    if against is None:
        return None
    hidden_ND, head = rows.teacher_hidden_ND, rows.teacher_head
    if against == "reference":
        hidden_ND, head = rows.reference_hidden_ND, rows.reference_head
    assert hidden_ND is not None and head is not None, "no loss asks where nobody spoke"
    return _projection(head, hidden_ND)


def _into(head: Head) -> HeadGradient | None:
    """The gradients of the head's own parameters; None: it is frozen."""
    weight: Tensor = head.module.weight  # type: ignore[assignment]
    bias: Tensor | None = getattr(head.module, "bias", None)
    if not weight.requires_grad:
        return None
    for parameter in (weight, bias):
        if parameter is not None and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    assert weight.grad is not None
    return HeadGradient(weight_VD=weight.grad, bias_V=None if bias is None else bias.grad)


# ── what came of it ──────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def _tell(
    rows: Rows, group: _Group, components: Sequence[Component], found: HeadLoss, tally: Tally
) -> None:
    statistics = found.statistics
    watch(rows, statistics.student_logp_N, tally)
    for component, mean in _sampled_means(rows, components, statistics):
        if component.loss.kind != "preference":  # its value is of pairs: see `step`
            tally.value(component.name, mean)
    if group.against == "teacher":
        assert statistics.reverse_kl_N is not None and statistics.teacher_entropy_N is not None
        tally.mean("kl", statistics.reverse_kl_N)
        tally.mean("entropy/student", statistics.student_entropy_N)
        tally.mean("entropy/teacher", statistics.teacher_entropy_N)
    if group.divergence is not None:
        assert found.found is not None
        _tell_divergence(rows, group.divergence, found.found, tally)


def _tell_divergence(rows: Rows, component: Component, found: Found, tally: Tally) -> None:
    weight_N = rows.weight_CN[component.name]
    mean = reduce_sum_over(found.value_N, weight_N, component.denominator)
    tally.value(component.name, mean)
    if found.overlap_N is not None:
        assert found.student_mass_N is not None and found.teacher_mass_N is not None
        tally.mean("mass/student", found.student_mass_N)
        tally.mean("mass/teacher", found.teacher_mass_N)
        tally.mean("overlap", found.overlap_N)
