"""From the hidden states of a pass to scores of tokens, a chunk of positions at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from courtside.engines.base import ScoreRequest, Scores, Want
from courtside.engines.forward.prefix_sharing import SequenceSpan
from courtside.engines.lm_head import LMHead
from courtside.engines.patches import layer_ops
from courtside.engines.transfer import tensor_on


def default_chunk_size(vocab_size: int, device: torch.device) -> int:
    """Positions whose logits exist at once: 16 MiB of float32 on a CPU, 256 on a GPU."""
    elements = 2**26 if device.type == "cuda" else 2**22
    return max(16, elements // vocab_size)


def score_positions(
    head: LMHead,
    hidden_ND: Tensor,
    lying: Sequence[SequenceSpan],
    requests: Sequence[ScoreRequest],
    *,
    want: Want,
    top_k: int = 0,
) -> list[Scores]:
    """Of each request; `lying` says where in `hidden_ND` its sequence lies.

    Positions of all requests go through the head together: sequences may be short.
    """
    if not requests:
        return []
    assert (want == "top_k") == (top_k > 0), "k belongs to want = 'top_k'"
    device = hidden_ND.device
    places = [[i for i, scored in enumerate(r.scored) if scored] for r in requests]
    counts = [len(its) for its in places]
    before_T, ids_T = tensor_on(
        [
            [*chain(*(p.of(i - 1 for i in its) for p, its in zip(lying, places, strict=True)))],
            [r.token_ids[i] for r, its in zip(requests, places, strict=True) for i in its],
        ],
        dtype=torch.long,
        device=device,
    )
    hidden_TD = hidden_ND[before_T]
    temperature_T = tensor_on(
        [r.temperature for r, count in zip(requests, counts, strict=True) for _ in range(count)],
        dtype=torch.promote_types(hidden_ND.dtype, torch.float32),
        device=device,
    )
    size = default_chunk_size(head.vocab_size, device)
    logps: list[Tensor] = []
    top: list[Any] = []
    for part_ND, ids_N, temperature_N in zip(
        hidden_TD.split(size), ids_T.split(size), temperature_T.split(size), strict=True
    ):
        if layer_ops.can_run_kernels(part_ND) and not top_k and head.softcap is None:
            from courtside.engines.kernels.decode import token_logps  # needs Triton

            scale_N = head.scale / temperature_N
            logps.append(token_logps(head.raw_logits(part_ND), ids_N, scale_N))
            continue
        logits_NV = head(part_ND) / temperature_N[:, None]
        total_N1 = logits_NV.logsumexp(-1, keepdim=True)
        logps.append((logits_NV.gather(-1, ids_N[:, None]) - total_N1).squeeze(-1))
        if top_k:
            best = logits_NV.topk(top_k, dim=-1)
            top.append((best.indices, best.values - total_N1))
    columns = [
        torch.cat(logps).split(counts),
        hidden_TD.split(counts) if want == "hidden" else [None] * len(counts),
        torch.cat([ids for ids, _ in top]).split(counts) if top else [None] * len(counts),
        torch.cat([values for _, values in top]).split(counts) if top else [None] * len(counts),
    ]
    return [
        Scores(logp_T=logp_T, hidden_TD=own_TD, top_ids_TK=ids_TK, top_logp_TK=values_TK)
        for logp_T, own_TD, ids_TK, values_TK in zip(*columns, strict=True)
    ]
