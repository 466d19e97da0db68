"""Losses and metrics of the sampled tokens' log-probs alone."""

from __future__ import annotations

import torch
from torch import Tensor

from courtside.losses.policy_gradient import SampledTokenLoss, teacher_gap
from courtside.training.loss_terms import LossTerm
from courtside.training.metrics import MetricAccumulator
from courtside.training.token_batch import TokenBatch


def make_sampled_token_loss(term: LossTerm, batch: TokenBatch) -> SampledTokenLoss:
    """A recipe's loss on sampled tokens as tensors; its weight has the term's denominator in it."""
    loss = term.loss
    weight_N = batch.weight_CN[term.name] * (loss.weight / term.denominator)
    if loss.kind == "cross_entropy":
        return SampledTokenLoss(weight_N=weight_N, advantage_N=torch.ones_like(weight_N))
    advantage_N = batch.advantage_CN.get(term.name)
    if loss.kind == "preference":
        # The coefficient carries the sign: `Student` computes it for whole sequences.
        assert advantage_N is not None
        return SampledTokenLoss(weight_N=weight_N, advantage_N=-advantage_N)
    assert loss.kind == "policy_gradient"
    if loss.advantage == "teacher_gap":
        advantage_N = teacher_gap(
            batch.teacher_logp_N,
            batch.sampler_logp_N,
            reference_logp_T=batch.reference_logp_N if loss.extrapolate != 1.0 else None,
            lam=loss.extrapolate,
        )
    assert advantage_N is not None
    return SampledTokenLoss(
        weight_N=weight_N,
        advantage_N=advantage_N,
        sampler_logp_N=batch.sampler_logp_N if loss.ratio == "importance" else None,
        truncate=loss.truncate,
        clip=loss.clip,
        baseline=loss.baseline,
    )


@torch.no_grad()
def record_token_metrics(batch: TokenBatch, logp_N: Tensor, metrics: MetricAccumulator) -> None:
    # Masks, not selected rows: the number of rows would have to be asked of the GPU.
    has_teacher_N = ~batch.teacher_logp_N.isnan()
    by_student_N = batch.by_student_N
    gap_N = batch.teacher_logp_N - logp_N
    drift_N = logp_N - batch.sampler_logp_N
    kl_estimate_N = batch.sampler_logp_N - batch.teacher_logp_N
    metrics.mean("kl_estimate", kl_estimate_N, where=by_student_N & has_teacher_N)
    metrics.mean("teacher_gap/mean", gap_N, where=has_teacher_N)
    metrics.mean("teacher_gap/negative", gap_N < 0, where=has_teacher_N)
    metrics.mean("sampler/logp_diff", drift_N.abs(), where=by_student_N)
    metrics.max("sampler/ratio_max", drift_N.exp(), where=by_student_N)
