"""Hints whose teacher is the student itself, read in the update's own pass.

The pass over the trajectories leaves keys and values behind; every hinted turn is a branch over
those of its own trajectory, read without a graph. So hints cost their own tokens and no second pass
over the trajectories. Where something must be known of a hint before the update, or the pass is not
what a teacher would read, hints are scored before it: `reason_to_score_before_update` says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from courtside.engines.base import ScoreRequest, Scores
from courtside.engines.forward.logprobs import score_positions
from courtside.engines.forward.prefix_sharing import SequenceSpan
from courtside.engines.forward.tree_scoring import forward_branches, probe_tree_scoring
from courtside.engines.lm_head import LMHead
from courtside.recipe import Recipe, SelfTeacherConfig
from courtside.types import Scored

# ── when ─────────────────────────────────────────────────────────────────────────────────────────


def reason_to_score_before_update(recipe: Recipe, model: Any, problem: str | None) -> str | None:
    """Why hints are scored before the update; None: they are read in its own pass.

    `problem`: why passes of the model are not packed, or its branches take passes of their own.
    """
    teacher, hints = recipe.teacher, recipe.hints
    if not isinstance(teacher, SelfTeacherConfig) or teacher.weights != "live":
        return "the teacher is not the live student"
    if hints.min_shift is not None:
        return "hints.min_shift drops some by what they do"
    if hints.resamples:
        return "hints.resamples tries them first"
    if hints.cumulative:
        return "hints.cumulative changes what later turns read"
    if hints.position == "system":
        return "hints.position = 'system' changes the trajectory from its beginning"
    if model.is_gradient_checkpointing:  # asked for, or chosen
        return "student.gradient_checkpointing keeps no keys and values"
    if uses_dropout(model):
        return "dropout acts on the update's pass"
    return problem or probe_tree_scoring(model)


def uses_dropout(model: Any) -> bool:
    """Whether a pass in training mode leaves anything out at random."""
    settings = model.config.get_text_config().to_dict()
    shares = [value for name, value in settings.items() if "drop" in name]
    shares += [m.p for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
    return any(isinstance(share, float | int) and share > 0 for share in shares)


# ── how ──────────────────────────────────────────────────────────────────────────────────────────


def has_open_branches(scored: Sequence[Scored]) -> bool:
    """Whether some target is to be filled by the pass that reads these trajectories."""
    return any(s.target is not None and s.target.branches for s in scored)


def branch_logprobs(scored: Sequence[Scored]) -> dict[str, Tensor]:
    """By trajectory id: log-probs of the targets that were filled."""
    return {
        s.trajectory.id: s.target.logp_T
        for s in scored
        if s.target is not None and s.target.branches
    }


@torch.no_grad()
def fill_targets(
    model: Any,
    head: LMHead,
    scored: Sequence[Scored],
    lying: Sequence[SequenceSpan],
    kept: Cache,
    *,
    max_tokens: int,
) -> list[Scored]:
    """The same with their targets filled, over what a pass of these trajectories has kept."""
    branches = [
        (place, s.trajectory.temperature, branch)
        for s, place in zip(scored, lying, strict=True)
        if s.target is not None
        for branch in s.target.branches
    ]
    hidden = forward_branches(
        model, kept, [(place, branch) for place, _, branch in branches], max_tokens=max_tokens
    )
    requests = [
        ScoreRequest(token_ids=b.token_ids, scored=b.scored, temperature=temperature)
        for _, temperature, b in branches
    ]
    assert not any(request.scored[0] for request in requests), "a hint stands above every turn"
    begins = [0, *accumulate(len(part_ND) for part_ND in hidden)][:-1]
    own = [SequenceSpan(start=start) for start in begins]
    found = iter(score_positions(head, torch.cat(hidden), own, requests, want="hidden"))
    return [_filled(s, [next(found) for _ in s.target.branches]) if s.target else s for s in scored]


def _filled(s: Scored, scores: Sequence[Scores]) -> Scored:
    assert s.target is not None
    if not scores:
        return s
    hidden_TD = None
    if s.target.head is not None:
        hidden_TD = torch.cat([score.hidden_TD for score in scores if score.hidden_TD is not None])
    logp_T = torch.cat([score.logp_T for score in scores])
    assert len(logp_T) == len(s.target.logp_T)
    return replace(s, target=replace(s.target, logp_T=logp_T, hidden_TD=hidden_TD))
