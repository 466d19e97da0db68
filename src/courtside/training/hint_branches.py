"""Scores hint branches over the KV cache of the update's own forward pass.

Where the teacher is the student itself, a hinted turn is a branch over the keys and values of its
trajectory, scored without a graph: hints cost their own tokens and no second pass over the
trajectories. The same pass tells which hints make their turn more likely, before any loss is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from courtside.engines.base import ScoreRequest, Scores
from courtside.engines.compatibility import uses_activation_checkpointing
from courtside.engines.forward.batching import SequenceSpan
from courtside.engines.forward.forward import ForwardPasses, score_positions
from courtside.engines.forward.tree_scoring import forward_branches, probe_tree_scoring
from courtside.engines.lm_head import LMHead
from courtside.training.loss_terms import TrainedTokens
from courtside.types import DeferredTarget, Scored, Target, Trajectory


def find_deferral_problem(passes: ForwardPasses) -> str | None:
    """Why the update's pass cannot score hints as a teacher would; None: it can."""
    model = passes.model
    if uses_activation_checkpointing(model):
        return "student.gradient_checkpointing keeps no keys and values"
    if uses_dropout(model):
        return "dropout acts on the update's pass"
    return probe_tree_scoring(passes)


def uses_dropout(model: Any) -> bool:
    """Whether a forward pass in training mode drops anything at random."""
    settings = model.config.get_text_config().to_dict()
    rates = [value for name, value in settings.items() if "drop" in name or "jitter" in name]
    rates += [m.p for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
    return any(isinstance(rate, float | int) and rate > 0 for rate in rates)


@torch.no_grad()
def complete_targets(
    passes: ForwardPasses,
    head: LMHead,
    scored: Sequence[Scored],
    spans: Sequence[SequenceSpan],
    trunks: Cache,
    *,
    max_tokens: int,
) -> list[Scored]:
    """With the targets of their deferred hints; `trunks` has the KV of a pass over `scored`."""
    branches = [
        (span, s.trajectory.temperature, branch)
        for s, span in zip(scored, spans, strict=True)
        if s.deferred is not None
        for branch in s.deferred.branches
    ]
    hidden = forward_branches(
        passes, trunks, [(span, branch) for span, _, branch in branches], max_tokens=max_tokens
    )
    requests = [
        ScoreRequest(token_ids=branch.token_ids, scored=branch.scored, temperature=temperature)
        for _, temperature, branch in branches
    ]
    assert not any(request.scored[0] for request in requests), "a hint precedes every turn"
    starts = [0, *accumulate(len(part_ND) for part_ND in hidden)][:-1]
    rows = [SequenceSpan(start=start) for start in starts]
    scores = iter(score_positions(head, torch.cat(hidden), rows, requests, want="hidden"))
    return [
        s if s.deferred is None else _complete(s, head, [next(scores) for _ in s.deferred.branches])
        for s in scored
    ]


def _complete(s: Scored, head: LMHead, scores: Sequence[Scores]) -> Scored:
    deferred = s.deferred
    assert deferred is not None
    hidden = [score.hidden_TD for score in scores if score.hidden_TD is not None]
    target = Target(
        teacher=deferred.teacher,
        context=s.hint_context,
        logp_T=torch.cat([score.logp_T for score in scores]),
        hidden_TD=torch.cat(hidden) if deferred.needs_hidden else None,
        head=head if deferred.needs_hidden else None,
        num_context_tokens=deferred.num_context_tokens,
        token_indices=deferred.token_indices,
    )
    assert len(target.logp_T) == len(deferred.token_indices)
    return replace(s, target=target)


# ── hints that do harm ───────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class HarmfulHints:
    """Of one trajectory: hints under which their turns are more likely than without."""

    turns: frozenset[int]
    token_indices: tuple[int, ...]
    """Which of the trajectory's completion tokens are in `turns`, in order."""
    plain_logp_T: Tensor
    """Log-probs of these tokens without the hint."""


@torch.no_grad()
def find_harmful_hints(
    head: LMHead,
    scored: Sequence[Scored],
    hidden_ND: Tensor,
    spans: Sequence[SequenceSpan],
    trained: TrainedTokens,
) -> dict[str, HarmfulHints]:
    """By trajectory id; those without one are left out. `hidden_ND`: of the pass that gave the
    deferred targets of `scored`. Costs one matmul of the LM head over the hinted tokens."""
    measured = [
        (s, s.target, s.deferred, span)
        for s, span in zip(scored, spans, strict=True)
        if s.deferred is not None
        and s.target is not None
        and all(trained[s.trajectory.id][i] for i in s.deferred.token_indices)
    ]
    requests = [_request_turns(s.trajectory, deferred) for s, _, deferred, _ in measured]
    scores = score_positions(
        head, hidden_ND, [span for *_, span in measured], requests, want="logp"
    )
    falls = [
        (score.logp_T.double() - target.logp_T.double()).split(_sizes(deferred))
        for score, (_, target, deferred, _) in zip(scores, measured, strict=True)
    ]
    if not falls:
        return {}
    # The only copy to the host of a pass: which positions train depends on it.
    shifts = iter(torch.stack([turn_T.sum() for turns in falls for turn_T in turns]).tolist())
    harmful = {}
    for score, (s, _, deferred, _) in zip(scores, measured, strict=True):
        turns = frozenset(branch.turn for branch in deferred.branches if next(shifts) < 0)
        turn_of = s.trajectory.turn_of
        rows = [row for row, i in enumerate(deferred.token_indices) if turn_of[i] in turns]
        if turns:
            harmful[s.trajectory.id] = HarmfulHints(
                turns=turns,
                token_indices=tuple(deferred.token_indices[row] for row in rows),
                plain_logp_T=score.logp_T[rows],
            )
    return harmful


def drop_turns(s: Scored, turns: Mapping[str, frozenset[int]]) -> Scored:
    """With the target of its other turns alone; `turns`: by trajectory id."""
    if s.target is None or s.trajectory.id not in turns:
        return s
    return replace(s, target=s.target.without_turns(s.trajectory, turns[s.trajectory.id]))


def _request_turns(trajectory: Trajectory, deferred: DeferredTarget) -> ScoreRequest:
    """For the tokens that the branches score, in the trajectory itself."""
    hinted = {branch.turn for branch in deferred.branches}
    turns = enumerate(trajectory.turns)
    return ScoreRequest(
        token_ids=trajectory.token_ids,
        scored=tuple(chosen and i in hinted for i, t in turns for chosen in t.completion_mask),
        temperature=trajectory.temperature,
    )


def _sizes(deferred: DeferredTarget) -> list[int]:
    return [sum(branch.scored) for branch in deferred.branches]
