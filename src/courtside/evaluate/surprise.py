"""How much a recorded text is like what the student itself would have written."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from courtside.engines.base import InProcessEngine, ScoreRequest
from courtside.losses.full_vocabulary import entropy
from courtside.types import Trajectory

CHUNK = 256
"""Positions whose logits exist at once."""


@torch.no_grad()
def surprise(trajectories: Sequence[Trajectory], engine: InProcessEngine) -> float:
    """Nats a token by which the text surprises the student more than its own words would.

    The cross-entropy of the text minus the student's entropy in the same places: 0 in the mean for
    text that the student sampled, whatever it is unsure of.
    """
    requests = [
        ScoreRequest(token_ids=t.token_ids, scored=t.completion_mask, temperature=t.temperature)
        for t in trajectories
    ]
    total, count = 0.0, 0
    for request, scores in zip(requests, engine.score(requests, want="hidden"), strict=True):
        assert scores.hidden_TD is not None
        unsure = sum(
            float(entropy((engine.head(part_ND) / request.temperature).log_softmax(-1)).sum())
            for part_ND in scores.hidden_TD.split(CHUNK)
        )
        total += -float(scores.logp_T.sum()) - unsure
        count += len(scores.logp_T)
    return total / max(count, 1)
