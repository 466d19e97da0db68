"""Metrics and loss values accumulated over the micro-batches of an optimizer step.

Accumulators are float64 scalars on the device of the values; they are copied to the host together,
when they are first asked for, so that accumulating never synchronizes with a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from courtside.ranks import Ranks
from courtside.recipe import Recipe
from courtside.training.head import GroupLoss
from courtside.training.loss_terms import LossTerm
from courtside.training.token_batch import TokenBatch

Kind = Literal["sum", "count", "max", "loss"]


class MetricAccumulator:
    def __init__(self) -> None:
        # Allocated at first use: no small tensor ends up between the temporaries of later chunks.
        self._scalars: dict[tuple[Kind, str], Tensor] = {}
        self._host: dict[tuple[Kind, str], float] | None = None

    def mean(self, name: str, values: Tensor, where: Tensor | None = None) -> None:
        """Add `values`, or those `where` it is True, to a mean over the whole step."""
        if values.numel():
            values = values.detach().double()
            values = values if where is None else torch.where(where, values, 0.0)
            self._scalar("sum", name, values).add_(values.sum())
            self._count(name, values, where)

    def max(self, name: str, values: Tensor, where: Tensor | None = None) -> None:
        """Add to a maximum over the whole step; NaNs are ignored."""
        if values.numel():
            values = values.detach().double()
            values = values if where is None else torch.where(where, values, -torch.inf)
            scalar = self._scalar("max", name, values, start=-torch.inf)
            torch.fmax(scalar, values.max(), out=scalar)
            self._count(name, values, where)

    def add_loss(self, name: str, part: Tensor) -> None:
        """Add a part of a loss term; it is already divided by the term's denominator."""
        self._scalar("loss", name, part).add_(part.detach())

    def merge(self, ranks: Ranks) -> None:
        """Add what the other ranks have accumulated, which each of them then has."""
        if ranks.size == 1:
            return
        parts = ranks.exchange(_copy_to_host(self._scalars))
        merged: dict[tuple[Kind, str], float] = {}
        for part in parts:
            for (kind, name), value in part.items():
                if (kind, name) in merged:
                    before = merged[kind, name]
                    value = max(before, value) if kind == "max" else before + value
                merged[kind, name] = value
        self._host = None
        self._scalars = {key: torch.tensor(v, dtype=torch.float64) for key, v in merged.items()}

    @property
    def losses(self) -> dict[str, float]:
        return self._of_kind("loss")

    def means(self) -> dict[str, float]:
        """Means and maxima by name; a metric without any value is left out."""
        counts = self._of_kind("count")
        means = {
            name: total / counts[name]
            for name, total in self._of_kind("sum").items()
            if counts[name]
        }
        return means | {name: v for name, v in self._of_kind("max").items() if counts[name]}

    def _count(self, name: str, values: Tensor, where: Tensor | None) -> None:
        scalar = self._scalar("count", name, values)
        scalar.add_(values.numel() if where is None else where.sum())

    def _scalar(self, kind: Kind, name: str, values: Tensor, start: float = 0.0) -> Tensor:
        self._host = None
        if (kind, name) not in self._scalars:
            self._scalars[kind, name] = torch.full(
                (), start, dtype=torch.float64, device=values.device
            )
        return self._scalars[kind, name]

    def _of_kind(self, kind: Kind) -> dict[str, float]:
        if self._host is None:
            self._host = _copy_to_host(self._scalars)
        return {name: value for (k, name), value in self._host.items() if k == kind}


def _copy_to_host(scalars: dict[tuple[Kind, str], Tensor]) -> dict[tuple[Kind, str], float]:
    """One copy per device; the order of first use is preserved."""
    values: dict[tuple[Kind, str], float] = {}
    for device in {scalar.device for scalar in scalars.values()}:
        group = {key: scalar for key, scalar in scalars.items() if scalar.device == device}
        values |= dict(zip(group, torch.stack(list(group.values())).tolist(), strict=True))
    return {key: values[key] for key in scalars}


# ── what an update records ───────────────────────────────────────────────────────────────────────


@torch.no_grad()
def record_losses(groups: Iterable[GroupLoss], metrics: MetricAccumulator) -> None:
    """Values of all loss terms, and metrics, which count every position once."""
    for group, batch, sampled, loss in groups:
        statistics, divergence = loss.statistics, loss.divergence
        has_teacher = group.target == "teacher"
        if group.is_first:
            record_token_metrics(batch, statistics.student_logp_N, metrics)
            if has_teacher:
                metrics.mean("entropy/student", statistics.student_entropy_N)
            if has_teacher and statistics.reverse_kl_N is not None:
                assert statistics.teacher_entropy_N is not None
                metrics.mean("kl", statistics.reverse_kl_N)
                metrics.mean("entropy/teacher", statistics.teacher_entropy_N)
        values = [
            (term, token_loss.per_token(statistics.student_logp_N, statistics.reverse_kl_N))
            for term, token_loss in zip(group.sampled, sampled, strict=True)
            if term.loss.kind != "preference"  # whose value is of pairs: see `preference`
        ]
        if group.term is not None and divergence is not None:
            values.append((group.term, divergence.value_N))
        for term, value_N in values:
            weight_N = batch.weight_CN[term.name]
            metrics.add_loss(term.name, (value_N * weight_N).sum() / term.denominator)
            if (gate_N := batch.gate_CN.get(term.name)) is not None:
                metrics.mean(f"{term.name}/gate", gate_N, where=weight_N > 0)
        if divergence is not None and divergence.overlap_N is not None:
            assert divergence.student_mass_N is not None and divergence.teacher_mass_N is not None
            metrics.mean("topk_mass/student", divergence.student_mass_N)
            metrics.mean("topk_mass/teacher", divergence.teacher_mass_N)
            metrics.mean("topk_overlap", divergence.overlap_N)


@torch.no_grad()
def record_token_metrics(batch: TokenBatch, logp_N: Tensor, metrics: MetricAccumulator) -> None:
    # Masks, not selected rows: the number of rows would have to be asked of the GPU.
    has_teacher_N = ~batch.teacher_logp_N.isnan()
    by_student_N = batch.by_student_N
    gap_N = batch.teacher_logp_N - logp_N
    drift_N = logp_N - batch.sampler_logp_N
    kl_estimate_N = batch.sampler_logp_N - batch.teacher_logp_N
    metrics.mean("kl_estimate", kl_estimate_N, where=by_student_N & has_teacher_N)
    has_reference_N = by_student_N & ~batch.reference_logp_N.isnan()
    reference_gap_N = batch.sampler_logp_N - batch.reference_logp_N
    metrics.mean("kl_estimate/reference", reference_gap_N, where=has_reference_N)
    metrics.mean("teacher_gap/mean", gap_N, where=has_teacher_N)
    metrics.mean("teacher_gap/negative", gap_N < 0, where=has_teacher_N)
    metrics.mean("sampler/logp_diff", drift_N.abs(), where=by_student_N)
    metrics.max("sampler/ratio_max", drift_N.exp(), where=by_student_N)


def reward_metrics(terms: Sequence[LossTerm]) -> dict[str, float]:
    """Of the first loss with advantage = 'reward'; empty where there is none."""
    row: dict[str, float] = {}
    rewards = next((term.rewards for term in terms if term.rewards is not None), None)
    if rewards is not None:
        if rewards.mean is not None:
            row["reward/sum"] = rewards.mean
        row["reward/groups"] = rewards.num_groups
        row["reward/zero_variance_groups"] = rewards.num_zero_variance_groups
    return row


def step_metrics(recipe: Recipe, step: int, terms: Sequence[LossTerm]) -> dict[str, float]:
    """Of a whole step: its rewards, its tokens by route, and what the recipe says of the step."""
    row = reward_metrics(terms)
    for term in terms:
        for route, count in sorted(term.num_route_tokens.items()):
            row[f"{term.name}/tokens/{route}"] = count
    turn_limit = recipe.rollout.limits.turns_at(step)
    if turn_limit is not None:
        row["turn_limit"] = turn_limit
    row["learning_rate"] = recipe.learning_rate_at(step)
    return row
