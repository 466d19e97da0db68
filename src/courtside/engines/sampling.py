"""Drawing tokens from logits, with the log-probability of what was really drawn from."""

from __future__ import annotations

import torch
from torch import Tensor

from courtside.engines.base import Sampling


def uniforms(seed: int, count: int) -> Tensor:
    """The random numbers of one sample; they depend on its seed alone, not on its batch."""
    return torch.rand(
        count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed & (2**63 - 1))
    )


def draw(logits_BV: Tensor, uniform_B: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """One token a row by the inverse of the distribution function, and its log-probability."""
    if sampling.temperature == 0:
        ids_B = logits_BV.argmax(dim=-1)
        return ids_B, torch.zeros_like(ids_B, dtype=torch.float32)
    logp_BV = truncated(torch.log_softmax(logits_BV.float() / sampling.temperature, -1), sampling)
    # In float64: 150,000 small float32 terms would shift the far end by more than a rare word.
    cdf_BV = logp_BV.exp().cumsum(dim=-1, dtype=torch.float64)
    threshold_B1 = uniform_B[:, None] * cdf_BV[:, -1:]
    ids_B = torch.searchsorted(cdf_BV, threshold_B1, right=True).squeeze(-1)
    ids_B = ids_B.clamp(max=logits_BV.shape[-1] - 1)
    return ids_B, logp_BV.gather(-1, ids_B[:, None]).squeeze(-1)


def truncated(logp_BV: Tensor, sampling: Sampling) -> Tensor:
    """top-k, then top-p, then min-p, renormalised; the input itself when none is on."""
    if not sampling.truncates:
        return logp_BV
    if 0 < sampling.top_k < logp_BV.shape[-1]:
        least_B1 = logp_BV.topk(sampling.top_k, dim=-1).values[:, -1:]
        logp_BV = logp_BV.masked_fill(logp_BV < least_B1, -torch.inf)
    if sampling.top_p < 1.0:
        sorted_BV, order_BV = logp_BV.sort(dim=-1, descending=True)
        probs_BV = sorted_BV.softmax(dim=-1)
        # A word stays when the mass before it has not reached top_p: the first always does.
        drop_BV = probs_BV.cumsum(dim=-1) - probs_BV >= sampling.top_p
        logp_BV = logp_BV.masked_fill(
            torch.zeros_like(drop_BV).scatter(-1, order_BV, drop_BV), -torch.inf
        )
    if sampling.min_p > 0.0:
        floor_B1 = logp_BV.max(dim=-1, keepdim=True).values + torch.tensor(sampling.min_p).log()
        logp_BV = logp_BV.masked_fill(logp_BV < floor_B1, -torch.inf)
    return torch.log_softmax(logp_BV, dim=-1)
