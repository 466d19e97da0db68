"""How far recorded text is from the student's distribution."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from courtside.engines.base import InProcessEngine, ScoreRequest
from courtside.losses.full_vocabulary import entropy
from courtside.types import Trajectory

CHUNK = 256
"""Positions whose logits are computed at once."""


@torch.no_grad()
def surprise(trajectories: Sequence[Trajectory], engine: InProcessEngine) -> float:
    """Cross-entropy of the text minus the student's entropy there, in nats per token.

    Its expectation is 0 for text that the student sampled.
    """
    requests = [ScoreRequest.of_trajectory(t) for t in trajectories]
    total, count = 0.0, 0
    for request, scores in zip(requests, engine.score(requests, want="hidden"), strict=True):
        assert scores.hidden_TD is not None
        entropy_sum = sum(
            float(entropy((engine.head(part_ND) / request.temperature).log_softmax(-1)).sum())
            for part_ND in scores.hidden_TD.split(CHUNK)
        )
        total += -float(scores.logp_T.sum()) - entropy_sum
        count += len(scores.logp_T)
    return total / max(count, 1)
