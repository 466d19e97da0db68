"""Sampling tokens from logits, with log-probs under the distribution that was sampled from, and
collecting them until each row stops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from courtside.engines.base import Sampling
from courtside.engines.lm_head import LMHead
from courtside.engines.patches.fused_layers import KERNEL_DTYPES
from courtside.progress import ProgressMeter
from courtside.types import Sample, StopReason

CPU_CHUNK = 2**19
"""Logits that are sampled from at once on a CPU: as many as its caches hold in float32."""
MAX_BLOCK, MIN_BLOCK = 256, 64
"""Logits per block: the largest of these powers of two that divides the vocabulary size."""


def uniforms_for(seed: int, count: int) -> Tensor:
    """The random numbers of one sample; they depend on its seed alone, not on its batch."""
    return torch.rand(
        count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed & (2**63 - 1))
    )


def stack_uniforms(seeds: Sequence[int], count: int, device: torch.device) -> Tensor:
    """[B, count]: `uniforms_for` each seed."""
    return torch.stack([uniforms_for(seed, count) for seed in seeds]).to(device)


def sample_from_hidden(
    head: LMHead, hidden_BD: Tensor, uniform_B: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor]:
    """`sample_tokens` from the head's logits; untruncated on a GPU by a Triton kernel, which needs
    no float32 copy of the logits."""
    has_kernel = hidden_BD.is_cuda and hidden_BD.dtype in KERNEL_DTYPES
    if has_kernel and sampling.temperature > 0 and not sampling.truncates:
        from courtside.engines.kernels.decode import sample_from_logits  # needs Triton

        if head.softcap is None:
            temperature = sampling.temperature / head.scale
            return sample_from_logits(head.raw_logits(hidden_BD), uniform_B, temperature)
        return sample_from_logits(head(hidden_BD), uniform_B, sampling.temperature)
    return sample_tokens(head(hidden_BD), uniform_B, sampling)


def sample_tokens(
    logits_BV: Tensor, uniform_B: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor]:
    """One token per row by inverse transform sampling, and its log-prob."""
    if sampling.temperature == 0:
        ids_B = logits_BV.argmax(dim=-1)
        return ids_B, torch.zeros_like(ids_B, dtype=torch.float32)
    num_rows = max(1, CPU_CHUNK // logits_BV.shape[-1])
    if logits_BV.device.type == "cpu" and len(logits_BV) > num_rows:
        chunks = zip(logits_BV.split(num_rows), uniform_B.split(num_rows), strict=True)
        samples = [sample_tokens(logits, uniform, sampling) for logits, uniform in chunks]
        return torch.cat([ids for ids, _ in samples]), torch.cat([logp for _, logp in samples])
    logits_BV = logits_BV.float()
    if sampling.temperature != 1:
        logits_BV = logits_BV / sampling.temperature
    if sampling.truncates:
        logits_BV = truncate_logits(torch.log_softmax(logits_BV, -1), sampling)
    max_B1 = logits_BV.amax(-1, keepdim=True)
    weight_BV = (logits_BV - max_B1).exp_()
    ids_B1, total_B1 = _invert_cdf(weight_BV, uniform_B[:, None])
    ids_B1 = ids_B1.clamp(max=logits_BV.shape[-1] - 1)  # NaN logits
    logp_B1 = logits_BV.gather(-1, ids_B1) - max_B1 - total_B1.log()
    return ids_B1.squeeze(-1), logp_B1.float().squeeze(-1)


def _invert_cdf(weight_BV: Tensor, uniform_B1: Tensor) -> tuple[Tensor, Tensor]:
    """The token at which the cumulative weight exceeds `uniform_B1` of the total, and the total.

    First the block of tokens, then the token in it: a cumulative sum over the whole vocabulary
    would take longer than everything else. In float64, and never a token of weight 0: 150,000 small
    terms in float32 would shift the end of the vocabulary by more than a rare token.
    """
    if weight_BV.shape[-1] % MIN_BLOCK:
        weight_BV = F.pad(weight_BV, (0, -weight_BV.shape[-1] % MIN_BLOCK))
    size = math.gcd(weight_BV.shape[-1], MAX_BLOCK)
    blocks_BNS = weight_BV.unflatten(-1, (-1, size))
    cdf_BN = blocks_BNS.sum(-1, dtype=torch.float64).cumsum(-1)
    total_B1 = cdf_BN[:, -1:]
    threshold_B1 = uniform_B1 * total_B1
    block_B1 = _first_above(cdf_BN, threshold_B1)
    end_B1 = cdf_BN.gather(-1, block_B1)
    start_B1 = torch.where(block_B1 > 0, cdf_BN.gather(-1, (block_B1 - 1).clamp(min=0)), 0.0)
    # Below 1, so that it is exceeded inside: the block's own sum differs in its last digits.
    share_B1 = ((threshold_B1 - start_B1) / (end_B1 - start_B1)).clamp(max=1 - 2**-52)
    block_BS = blocks_BNS.take_along_dim(block_B1[:, :, None], 1).squeeze(1)
    cdf_BS = block_BS.cumsum(-1, dtype=torch.float64)
    token_B1 = _first_above(cdf_BS, share_B1 * cdf_BS[:, -1:])
    return block_B1 * size + token_B1, total_B1


def _first_above(cdf_BN: Tensor, threshold_B1: Tensor) -> Tensor:
    index_B1 = torch.searchsorted(cdf_BN, threshold_B1, right=True)
    return index_B1.clamp(max=cdf_BN.shape[-1] - 1)


def truncate_logits(logp_BV: Tensor, sampling: Sampling) -> Tensor:
    """top-k, then top-p, then min-p, renormalized; the input itself when none is on."""
    if not sampling.truncates:
        return logp_BV
    if 0 < sampling.top_k < logp_BV.shape[-1]:
        min_B1 = logp_BV.topk(sampling.top_k, dim=-1).values[:, -1:]
        logp_BV = logp_BV.masked_fill(logp_BV < min_B1, -torch.inf)
    if sampling.top_p < 1.0:
        sorted_BV, order_BV = logp_BV.sort(dim=-1, descending=True)
        probs_BV = sorted_BV.softmax(dim=-1)
        # A token stays if the mass before it is below top_p: the first always does.
        drop_BV = probs_BV.cumsum(dim=-1) - probs_BV >= sampling.top_p
        logp_BV = logp_BV.masked_fill(
            torch.zeros_like(drop_BV).scatter(-1, order_BV, drop_BV), -torch.inf
        )
    if sampling.min_p > 0.0:
        floor_B1 = logp_BV.max(dim=-1, keepdim=True).values + torch.tensor(sampling.min_p).log()
        logp_BV = logp_BV.masked_fill(logp_BV < floor_B1, -torch.inf)
    return torch.log_softmax(logp_BV, dim=-1)


class SampleBuffer:
    """The tokens that each row of a batch has sampled so far."""

    def __init__(
        self,
        num_rows: int,
        sampling: Sampling,
        *,
        eos: frozenset[int],
        tokenizer: Any,
        progress: ProgressMeter | None = None,
    ):
        self.ids: list[list[int]] = [[] for _ in range(num_rows)]
        self.logp: list[list[float]] = [[] for _ in range(num_rows)]
        self.stop_reasons: list[StopReason] = ["length"] * num_rows
        self.eos, self.sampling, self.tokenizer = eos, sampling, tokenizer
        self.progress = progress or ProgressMeter()

    def append(self, rows: Sequence[int], ids: list[int], logps: list[float]) -> list[int]:
        """One token per row; returns the indices into `rows` of those that go on."""
        running = []
        for index, (row, token, logp) in enumerate(zip(rows, ids, logps, strict=True)):
            self.ids[row].append(token)
            self.logp[row].append(logp)
            if token in self.eos:
                self.stop_reasons[row] = "eos"
            elif self.has_stop_string(self.ids[row]):
                self.stop_reasons[row] = "stop_string"
            else:
                running.append(index)
        self._count(rows, len(ids))
        return running

    def extend(self, row: int, ids: list[int], logps: list[float]) -> None:
        """Several tokens of one row, up to the one at which it stops."""
        if self.sampling.stop:
            for token, logp in zip(ids, logps, strict=True):
                if not self.append([row], [token], [logp]):
                    break
            return
        end = next((i for i, token in enumerate(ids) if token in self.eos), None)
        if end is not None:
            self.stop_reasons[row] = "eos"
            ids, logps = ids[: end + 1], logps[: end + 1]
        self.ids[row] += ids
        self.logp[row] += logps
        self._count([row], len(ids))

    def _count(self, rows: Sequence[int], num_tokens: int) -> None:
        progress = self.progress.phase
        if progress is None:
            return
        progress.num_tokens += num_tokens
        if progress.max_tokens:
            limit = self.sampling.max_new_tokens
            lengths = [
                len(self.ids[row])
                for row in rows
                if self.stop_reasons[row] != "length" or len(self.ids[row]) >= limit
            ]
            progress.finished += len(lengths)
            progress.num_unused += sum(limit - length for length in lengths)

    def has_stop_string(self, ids: list[int]) -> bool:
        return bool(self.sampling.stop) and any(s in self._text(ids) for s in self.sampling.stop)

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def samples(self) -> list[Sample]:
        samples = []
        for ids, logp, stop in zip(self.ids, self.logp, self.stop_reasons, strict=True):
            text = self._text(ids)
            ends = [text.find(s) for s in self.sampling.stop if s in text]
            text = text[: min(ends)] if ends else text
            samples.append(Sample(token_ids=tuple(ids), logp=tuple(logp), stop=stop, text=text))
        return samples
