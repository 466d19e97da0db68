"""What hints did, from log-probs alone: no model and no template is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from courtside.recipe.hints import HintsConfig
from courtside.types import Hint, HintOutcome, Scored, Target, Update

KEEP_ALL = HintsConfig(harmful="train")


def judge_hint(
    hint: Hint,
    plain_T: Tensor,
    hinted_T: Tensor,
    *,
    bad_tokens: Sequence[int] = (),
    pass_rate: float | None = None,
    settings: HintsConfig = KEEP_ALL,
) -> HintOutcome:
    """From the log-probs of the turn's completion tokens without and with the hint."""
    fall_T = plain_T - hinted_T
    shift, reason = float(fall_T.sum()), None
    if settings.min_shift is not None and shift < settings.min_shift:
        reason = "shift"
    elif settings.harmful == "drop" and shift < 0:
        reason = "harmful"
    elif pass_rate is not None and pass_rate < settings.min_pass_rate:
        reason = "not_passed"
    return HintOutcome(
        hint=hint,
        shift=shift,
        bad_span_shift=float(fall_T[list(bad_tokens)].sum()) if bad_tokens else None,
        pass_rate=pass_rate,
        drop_reason=reason,
    )


def judge_hints(scored: Sequence[Scored], update: Update) -> list[Scored]:
    """With the targets that the update scored itself, and the outcomes of their hints."""
    return [_judge_deferred(s, update) for s in scored]


def _judge_deferred(scored: Scored, update: Update) -> Scored:
    trajectory, deferred = scored.trajectory, scored.deferred
    if deferred is None or trajectory.id not in update.teacher_logp:
        return scored
    hinted_T = torch.tensor(update.teacher_logp[trajectory.id], dtype=torch.float64)
    plain_T = torch.tensor(update.student_logp[trajectory.id], dtype=torch.float64)
    sizes = [sum(branch.scored) for branch in deferred.branches]
    columns = zip(
        deferred.branches,
        plain_T[list(deferred.token_indices)].split(sizes),
        hinted_T.split(sizes),
        strict=True,
    )
    by_turn = {branch.turn: (plain, hinted) for branch, plain, hinted in columns}
    harmful = update.harmful_turns.get(trajectory.id, frozenset())

    def judge(outcome: HintOutcome) -> HintOutcome:
        turn = outcome.hint.turn
        if outcome.drop_reason is not None or turn not in by_turn:
            return outcome
        bad_tokens = deferred.bad_tokens.get(turn, ())
        judged = judge_hint(outcome.hint, *by_turn[turn], bad_tokens=bad_tokens)
        return replace(judged, drop_reason="harmful" if turn in harmful else None)

    scored = replace(scored, hints=tuple(map(judge, scored.hints)))
    branches = [branch for branch in deferred.branches if branch.turn not in harmful]
    target = Target(
        teacher=deferred.teacher,
        context=scored.hint_context,
        logp_T=hinted_T.float(),
        num_context_tokens=sum(len(branch.token_ids) for branch in branches),
        token_indices=deferred.token_indices,
    )
    # As if harmful hints had been dropped before the update.
    return replace(scored, target=target.without_turns(trajectory, harmful))


def tokens_of_span(pieces: Sequence[str], span: str) -> tuple[int, ...]:
    """Which pieces hold some of the span's first occurrence.

    >>> tokens_of_span(["call ", "get_", "wea", "ther", "()"], "get_weather")
    (1, 2, 3)
    """
    start = "".join(pieces).find(span)
    if start < 0:
        return ()
    ends = list(accumulate(len(piece) for piece in pieces))
    stop = start + len(span)
    return tuple(
        i
        for i, (piece, end) in enumerate(zip(pieces, ends, strict=True))
        if piece and end > start and end - len(piece) < stop
    )
