"""The eager decode loop, over whatever KV cache runs its forward passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from courtside.engines.base import SampleRequest, Sampling
from courtside.engines.generation.outputs import SampleBuffer
from courtside.engines.generation.sampler import sample_tokens, stack_uniforms
from courtside.engines.lm_head import LMHead
from courtside.types import Sample

Advance = Callable[[Mapping[int, int]], tuple[Sequence[int], Tensor]]
"""Runs a forward pass over the new token of each request that goes on, by the request's index.
Returns those requests in the order of the batch, and their hidden states [B, D]."""


def decode(
    order: Sequence[int],
    hidden_BD: Tensor,
    advance: Advance,
    *,
    requests: Sequence[SampleRequest],
    sampling: Sampling,
    head: LMHead,
    buffer: SampleBuffer,
) -> list[Sample]:
    """Samples of all requests after prefill, whose hidden states come in `order`. Requests leave
    the batch as they finish."""
    seeds = [request.seed for request in requests]
    uniform_BN = stack_uniforms(seeds, sampling.max_new_tokens, hidden_BD.device)
    for n in range(sampling.max_new_tokens):
        ids_B, logp_B = sample_tokens(head(hidden_BD), uniform_BN[list(order), n], sampling)
        ids = ids_B.tolist()
        running = buffer.append(order, ids, logp_B.tolist())
        if not running or n + 1 == sampling.max_new_tokens:
            break
        order, hidden_BD = advance({order[i]: ids[i] for i in running})
    return buffer.samples()
