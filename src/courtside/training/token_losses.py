"""Losses of the sampled tokens' log-probs alone, and what is worth watching of them."""

from __future__ import annotations

import torch
from torch import Tensor

from courtside.losses.cross_entropy import cross_entropy
from courtside.losses.policy_gradient import policy_gradient, teacher_gap
from courtside.training.loss_terms import LossTerm
from courtside.training.metrics import MetricAccumulator
from courtside.training.token_batch import TokenBatch


def sampled_token_loss(
    component: LossTerm, rows: TokenBatch, logp_N: Tensor, reverse_kl_N: Tensor | None
) -> Tensor:
    """Per position. `reverse_kl_N`, KL(student ‖ teacher), is for a loss with a baseline."""
    loss = component.loss
    if loss.kind == "cross_entropy":
        return cross_entropy(logp_N)
    if loss.kind == "preference":
        # The coefficient carries the sign: see `step`, which computes it for whole sequences.
        return rows.advantage_CN[component.name] * logp_N
    assert loss.kind == "policy_gradient"
    if loss.advantage == "reward":
        advantage_N = rows.advantage_CN[component.name]
    else:
        assert not loss.baseline or reverse_kl_N is not None
        advantage_N = teacher_gap(
            rows.teacher_logp_N,
            rows.sampler_logp_N,
            baseline_T=-reverse_kl_N if loss.baseline and reverse_kl_N is not None else None,
            reference_logp_T=rows.reference_logp_N if loss.extrapolate != 1.0 else None,
            lam=loss.extrapolate,
        )
    return policy_gradient(
        logp_N,
        advantage_N,
        sampler_logp_T=rows.sampler_logp_N if loss.ratio == "importance" else None,
        truncate=loss.truncate,
        clip=loss.clip,
    )


@torch.no_grad()
def record_token_metrics(rows: TokenBatch, logp_N: Tensor, metrics: MetricAccumulator) -> None:
    """Of the sampled tokens alone."""
    # Tokens are not picked: how many there are would have to be asked of the GPU.
    logp_N = logp_N.detach()
    spoken_N = ~rows.teacher_logp_N.isnan()
    own_N = rows.by_student_N
    gap_N = rows.teacher_logp_N - logp_N
    drift_N = logp_N - rows.sampler_logp_N
    metrics.mean("kl_estimate", rows.sampler_logp_N - rows.teacher_logp_N, where=own_N & spoken_N)
    metrics.mean("gap/mean", gap_N, where=spoken_N)
    metrics.mean("gap/negative", gap_N < 0, where=spoken_N)
    metrics.mean("sampler/gap", drift_N.abs(), where=own_N)
    metrics.max("sampler/ratio_max", drift_N.exp(), where=own_N)
