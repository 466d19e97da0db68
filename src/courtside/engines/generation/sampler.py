"""Drawing tokens from logits, with the log-probability of what was really drawn from."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from courtside.engines.base import Sampling

BLOCK, LEAST_BLOCK = 256, 64
"""Words in a block: the largest of these powers of two that divides their number."""


def uniforms_for(seed: int, count: int) -> Tensor:
    """The random numbers of one sample; they depend on its seed alone, not on its batch."""
    return torch.rand(
        count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed & (2**63 - 1))
    )


def sample_tokens(
    logits_BV: Tensor, uniform_B: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor]:
    """One token a row by the inverse of the distribution function, and its log-probability."""
    if sampling.temperature == 0:
        ids_B = logits_BV.argmax(dim=-1)
        return ids_B, torch.zeros_like(ids_B, dtype=torch.float32)
    logits_BV = logits_BV.float()
    if sampling.temperature != 1:
        logits_BV = logits_BV / sampling.temperature
    if sampling.truncates:
        logits_BV = truncate_logits(torch.log_softmax(logits_BV, -1), sampling)
    most_B1 = logits_BV.amax(-1, keepdim=True)
    weight_BV = (logits_BV - most_B1).exp_()
    ids_B1, total_B1 = _found(weight_BV, uniform_B[:, None])
    ids_B1 = ids_B1.clamp(max=logits_BV.shape[-1] - 1)  # of logits that are no numbers
    logp_B1 = logits_BV.gather(-1, ids_B1) - most_B1 - total_B1.log()
    return ids_B1.squeeze(-1), logp_B1.float().squeeze(-1)


def _found(weight_BV: Tensor, uniform_B1: Tensor) -> tuple[Tensor, Tensor]:
    """The word at which the sum of weights passes its share of the whole, and the whole.

    First the block of words, then the word in it: a running sum over all of them would take longer
    than everything else. In float64, and never a word without weight: 150,000 small terms in
    float32 would shift the far end by more than a rare word.
    """
    if weight_BV.shape[-1] % LEAST_BLOCK:
        weight_BV = F.pad(weight_BV, (0, -weight_BV.shape[-1] % LEAST_BLOCK))
    size = math.gcd(weight_BV.shape[-1], BLOCK)
    blocks_BNW = weight_BV.unflatten(-1, (-1, size))
    cdf_BN = blocks_BNW.sum(-1, dtype=torch.float64).cumsum(-1)
    total_B1 = cdf_BN[:, -1:]
    threshold_B1 = uniform_B1 * total_B1
    block_B1 = _first_above(cdf_BN, threshold_B1)
    end_B1 = cdf_BN.gather(-1, block_B1)
    start_B1 = torch.where(block_B1 > 0, cdf_BN.gather(-1, (block_B1 - 1).clamp(min=0)), 0.0)
    # Below 1, so that it is passed inside: the block's own sum differs in its last digits.
    share_B1 = ((threshold_B1 - start_B1) / (end_B1 - start_B1)).clamp(max=1 - 2**-52)
    inside_BW = blocks_BNW.take_along_dim(block_B1[:, :, None], 1).squeeze(1)
    cdf_BW = inside_BW.cumsum(-1, dtype=torch.float64)
    word_B1 = _first_above(cdf_BW, share_B1 * cdf_BW[:, -1:])
    return block_B1 * size + word_B1, total_B1


def _first_above(cdf_BN: Tensor, threshold_B1: Tensor) -> Tensor:
    found_B1 = torch.searchsorted(cdf_BN, threshold_B1, right=True)
    return found_B1.clamp(max=cdf_BN.shape[-1] - 1)


def truncate_logits(logp_BV: Tensor, sampling: Sampling) -> Tensor:
    """top-k, then top-p, then min-p, renormalized; the input itself when none is on."""
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
