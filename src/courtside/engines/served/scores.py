"""Log-probs of prompt tokens, as the server gives them, as scores of a request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from courtside.engines.base import ScoreRequest, Scores
from courtside.engines.served.requests import BadAnswerError
from courtside.engines.served.routes import NO_PROBABILITY, PromptLogps


def read_scores(
    rows: PromptLogps, request: ScoreRequest, *, top_k: int, vocab_size: int, device: torch.device
) -> Scores:
    """Of the scored tokens. A row holds the token itself at any rank, and the `top_k` likeliest."""
    if len(rows) != len(request.token_ids):
        raise BadAnswerError(f"{len(rows)} rows of log-probs for {len(request.token_ids)} tokens")
    logps: list[float] = []
    top_ids: list[list[int]] = []
    top_logps: list[list[float]] = []
    for index, token in enumerate(request.token_ids):
        if not request.scored[index]:
            continue
        row = _read_row(rows[index], index)
        if token not in row:
            raise BadAnswerError(f"no log-prob for the id {token} at position {index}")
        logps.append(row[token][0])
        if top_k:
            top = sorted((rank, id) for id, (_, rank) in row.items() if rank <= top_k)
            if [rank for rank, _ in top] != list(range(1, top_k + 1)):
                raise BadAnswerError(
                    f"{len(top)} of the {top_k} likeliest tokens at position {index}"
                )
            if (largest := max(id for _, id in top)) >= vocab_size:
                raise BadAnswerError(
                    f"the id {largest} among the likeliest, and the student has {vocab_size} tokens"
                )
            top_ids.append([id for _, id in top])
            top_logps.append([row[id][0] for _, id in top])
    shape = (len(logps), top_k)
    return Scores(
        logp_T=torch.tensor(logps, dtype=torch.float32, device=device),
        top_ids_TK=(
            torch.tensor(top_ids, dtype=torch.int64, device=device).view(shape) if top_k else None
        ),
        top_logp_TK=(
            torch.tensor(top_logps, dtype=torch.float32, device=device).view(shape)
            if top_k
            else None
        ),
    )


def read_logps(rows: PromptLogps, request: ScoreRequest) -> list[float]:
    """Of the scored tokens alone."""
    scores = read_scores(rows, request, top_k=0, vocab_size=0, device=torch.device("cpu"))
    return [float(logp) for logp in scores.logp_T]


def _read_row(row: Mapping[str, Any] | None, index: int) -> dict[int, tuple[float, int]]:
    """By token id: log-prob and rank."""
    if row is None:
        raise BadAnswerError(f"no log-probs at position {index}")
    try:
        entries = {int(id): (float(e["logprob"]), int(e["rank"])) for id, e in row.items()}
    except (LookupError, TypeError, ValueError, AttributeError):
        raise BadAnswerError(f"{str(row)[:200]!r} as log-probs at position {index}") from None
    for id, (logp, _) in entries.items():
        if not math.isfinite(logp) or logp <= NO_PROBABILITY or logp > 1e-3:
            raise BadAnswerError(f"the log-prob {logp} for the id {id} at position {index}")
    return entries
