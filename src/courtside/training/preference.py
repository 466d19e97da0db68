"""DPO and IPO as per-token coefficients: their gradient, without a graph across chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from courtside.engines.forward.batching import tensor_on
from courtside.engines.lm_head import LMHead
from courtside.losses.preference import FORMS, dpo_margin
from courtside.training.loss_terms import LossTerm, preference_pairs
from courtside.training.metrics import MetricAccumulator
from courtside.types import Scored, Trajectory


@torch.no_grad()
def weigh_preferences(
    term: LossTerm,
    micro: Sequence[Scored],
    hidden: Mapping[str, Tensor],
    head: LMHead,
    *,
    chunk: int,
    metrics: MetricAccumulator,
) -> LossTerm:
    """A preference term with the coefficients of this micro-batch's pairs.

    `hidden`: by trajectory id, the hidden states that predict its completion tokens.
    """
    assert term.loss.kind == "preference"
    beta = term.loss.beta
    loss_of, token_weights = FORMS[term.loss.form]
    coefficients: dict[str, tuple[float, ...]] = {}
    pairs = preference_pairs(micro)
    sums = []
    for pair in pairs:
        sums += [_log_likelihood(s.trajectory, hidden[s.trajectory.id], head, chunk) for s in pair]
        for s in pair:
            assert s.reference is not None
            sums.append(s.reference.logp_T.double().sum().to(sums[0].device))
    # One copy to the host for all pairs.
    margins = [dpo_margin(*row) for row in torch.stack(sums).cpu().view(-1, 4)] if sums else []
    for (better, worse), margin in zip(pairs, margins, strict=True):
        weight = float(token_weights(margin, beta=beta))
        # The sign: better tokens rise, worse ones fall.
        for s, coefficient in ((better, -weight), (worse, weight)):
            coefficients[s.trajectory.id] = (coefficient,) * s.trajectory.num_completion_tokens
        metrics.add_loss(term.name, loss_of(margin, beta=beta) / term.denominator)
        metrics.mean(f"{term.name}/accuracy", margin > 0)
    return replace(term, advantage=coefficients)


def _log_likelihood(trajectory: Trajectory, hidden_TD: Tensor, head: LMHead, chunk: int) -> Tensor:
    """Σ log π of its completion tokens."""
    ids_T = tensor_on(trajectory.completion_ids, dtype=torch.long, device=hidden_TD.device)
    total = hidden_TD.new_zeros((), dtype=torch.float64)
    for part_ND, ids_N in zip(hidden_TD.split(chunk), ids_T.split(chunk), strict=True):
        logp_NV = (head(part_ND) / trajectory.temperature).log_softmax(-1)
        total += logp_NV.gather(-1, ids_N[:, None]).double().sum()
    return total
