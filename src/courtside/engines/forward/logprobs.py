"""Log-probs of tokens from last hidden states, one chunk of logits at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from courtside.engines.base import ScoreRequest, Scores, Want
from courtside.engines.forward.batching import SequenceSpan, tensor_on
from courtside.engines.lm_head import LMHead

KERNEL_DEVICE = "cuda"
"""Where log-probs are computed by a Triton kernel."""


def default_chunk_size(vocab_size: int, device: torch.device) -> int:
    """Positions per chunk: 16 MiB of float32 logits on a CPU (small caches), 256 on a GPU."""
    elements = 2**26 if device.type == "cuda" else 2**22
    return max(16, elements // vocab_size)


def score_positions(
    head: LMHead,
    hidden_ND: Tensor,
    spans: Sequence[SequenceSpan],
    requests: Sequence[ScoreRequest],
    *,
    want: Want,
    top_k: int = 0,
    chunk_size: int | None = None,
) -> list[Scores]:
    """Scores of each request, whose sequence is at `spans` in `hidden_ND`.

    Positions of all requests go through the head together, because sequences may be short.
    """
    if not requests:
        return []
    assert (want == "top_k") == (top_k > 0), "k belongs to want = 'top_k'"
    device = hidden_ND.device
    positions = [[i for i, scored in enumerate(r.scored) if scored] for r in requests]
    counts = [len(request_positions) for request_positions in positions]
    # The hidden state before a token predicts it.
    source_T, ids_T = tensor_on(
        [
            [*chain(*(s.indices(i - 1 for i in p) for s, p in zip(spans, positions, strict=True)))],
            [r.token_ids[i] for r, p in zip(requests, positions, strict=True) for i in p],
        ],
        dtype=torch.long,
        device=device,
    )
    hidden_TD = hidden_ND[source_T]
    temperature_T = tensor_on(
        [r.temperature for r, count in zip(requests, counts, strict=True) for _ in range(count)],
        dtype=torch.promote_types(hidden_ND.dtype, torch.float32),
        device=device,
    )
    size = chunk_size or default_chunk_size(head.vocab_size, device)
    logp_chunks: list[Tensor] = []
    top_chunks: list[tuple[Tensor, Tensor]] = []
    # The kernel computes in float32: not where hidden states are float64.
    uses_kernel = device.type == KERNEL_DEVICE and temperature_T.dtype == torch.float32
    for chunk_ND, ids_N, temperature_N in zip(
        hidden_TD.split(size), ids_T.split(size), temperature_T.split(size), strict=True
    ):
        if uses_kernel and not top_k and head.softcap is None:
            from courtside.engines.kernels.decode import token_logps  # needs Triton

            scale_N = head.scale / temperature_N
            logp_chunks.append(token_logps(head.raw_logits(chunk_ND), ids_N, scale_N))
            continue
        logits_NV = head(chunk_ND) / temperature_N[:, None]
        logsumexp_N1 = logits_NV.logsumexp(-1, keepdim=True)
        logp_chunks.append((logits_NV.gather(-1, ids_N[:, None]) - logsumexp_N1).squeeze(-1))
        if top_k:
            top = logits_NV.topk(top_k, dim=-1)
            top_chunks.append((top.indices, top.values - logsumexp_N1))
    absent = [None] * len(counts)
    top_ids, top_logps = (
        [torch.cat(column).split(counts) for column in zip(*top_chunks, strict=True)]
        if top_chunks
        else (absent, absent)
    )
    return [
        Scores(logp_T=logp_T, hidden_TD=request_TD, top_ids_TK=ids_TK, top_logp_TK=logp_TK)
        for logp_T, request_TD, ids_TK, logp_TK in zip(
            torch.cat(logp_chunks).split(counts),
            hidden_TD.split(counts) if want == "hidden" else absent,
            top_ids,
            top_logps,
            strict=True,
        )
    ]
