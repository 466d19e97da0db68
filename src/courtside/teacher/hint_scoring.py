"""The same turns again with hints above them: what each hint did, and what to move towards.

Everything is measured with one model: the turn's tokens as they were and under the hint. A hint
under which they are hardly less likely would teach nothing; it is kept for the report and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from courtside.chat.hint_splicing import (
    SplicedTrajectory,
    SpliceError,
    splice_hint,
    splice_hints_cumulatively,
)
from courtside.chat.incremental import IncrementalTemplate
from courtside.engines.base import (
    BranchRequest,
    Engine,
    SampleRequest,
    Sampling,
    ScoreRequest,
    Scores,
    Want,
)
from courtside.engines.stateless import score_branches
from courtside.recipe import HintsConfig
from courtside.seeds import seed_for
from courtside.types import Branch, Hint, HintOutcome, Scored, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTurn:
    """What a model says of one turn, without and with the hint above it."""

    plain_T: Tensor
    """Log-probs of the turn's chosen tokens as it was."""
    hinted: Scores
    num_tokens: int
    """Read for it beside the trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HintedTurns:
    """Of one trajectory."""

    hint_outcomes: tuple[HintOutcome, ...]
    spoken: Mapping[int, ScoredTurn]
    """By turn: those whose hints train."""
    unread: tuple[Branch, ...] = ()
    """Instead of what was spoken, where the update reads them: those whose hints train, by turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HintTrial:
    """Replies under a hint, and whether the environment takes them."""

    sampling: Sampling
    passes: Callable[[Trajectory, int, str], bool]
    """Whether a reply, put in place of this turn of this trajectory, goes without an error."""
    seed: int


Passed = Mapping[tuple[str, int], float]
"""By trajectory id and turn: the share of replies under its hint that pass."""


class HintScorer:
    """Scores hints with one engine. The trajectories' own ids are used; `turns` renders hints."""

    def __init__(
        self,
        engine: Engine,
        turns: IncrementalTemplate,
        settings: HintsConfig,
        *,
        context_length: int,
        trial: HintTrial | None = None,
        in_update: bool = False,
    ):
        self.engine, self.turns, self.settings = engine, turns, settings
        self.context_length = context_length
        self.trial = trial
        """How replies under a hint are tried; None: they are not."""
        self.in_update = in_update
        """Whether branches are left for the update to read; `measured` then says what hints did."""

    def __call__(
        self,
        trajectories: Sequence[Trajectory],
        hints: Sequence[Hint],
        *,
        want: Want,
        top_k: int = 0,
    ) -> dict[str, HintedTurns]:
        """By trajectory id; those without a hint are left out."""
        by_id: dict[str, list[Hint]] = {}
        for hint in sorted(hints, key=lambda hint: hint.turn):
            by_id.setdefault(hint.trajectory, []).append(hint)
        hinted = [(t, by_id[t.id]) for t in trajectories if t.id in by_id]
        if self.in_update:
            return {trajectory.id: self._left(trajectory, its) for trajectory, its in hinted}
        score = self._together if self.settings.cumulative else self._apart
        return score(hinted, want, top_k)

    def _left(self, trajectory: Trajectory, hints: Sequence[Hint]) -> HintedTurns:
        """For the update to read. Nothing is known of the hints but that they can be put in."""
        dropped, branches = self._branches(trajectory, hints)
        kept = {hint.turn: (HintOutcome(hint=hint, shift=None), one) for hint, one in branches}
        hint_outcomes = [*dropped, *(unmeasured for unmeasured, _ in kept.values())]
        return HintedTurns(
            hint_outcomes=tuple(sorted(hint_outcomes, key=lambda j: j.hint.turn)),
            spoken={},
            # A turn in which nothing was chosen trains nothing, and the update may end before it.
            unread=tuple(one for _, one in kept.values() if any(one.scored)),
        )

    # ── each hint alone ──────────────────────────────────────────────────────────────────────────

    def _apart(
        self, hinted: Sequence[tuple[Trajectory, list[Hint]]], want: Want, top_k: int
    ) -> dict[str, HintedTurns]:
        found: dict[str, HintedTurns] = {}
        asked: list[tuple[Trajectory, list[HintOutcome], dict[int, Hint], BranchRequest]] = []
        for trajectory, hints in hinted:
            dropped, branches = self._branches(trajectory, hints)
            if not branches:
                found[trajectory.id] = HintedTurns(hint_outcomes=tuple(dropped), spoken={})
                continue
            kept = {hint.turn: hint for hint, _ in branches}
            request = BranchRequest(
                token_ids=trajectory.token_ids,
                branches=tuple(one for _, one in branches),
                scored=_tokens_in(trajectory, kept),
                temperature=trajectory.temperature,
            )
            asked.append((trajectory, dropped, kept, request))
        scores = score_branches(self.engine, [r for *_, r in asked], want=want, top_k=top_k)
        passed = self._try({t.id: (t, request.branches) for t, _, _, request in asked})
        for (trajectory, dropped, kept, request), score in zip(asked, scores, strict=True):
            assert score.trunk is not None
            plain = _by_turn(trajectory, kept, score.trunk.logp_T)
            spoken = {
                one.turn: ScoredTurn(
                    plain_T=plain[one.turn], hinted=s, num_tokens=len(one.token_ids)
                )
                for one, s in zip(request.branches, score.branches, strict=True)
            }
            found[trajectory.id] = self._judge(trajectory, dropped, kept, spoken, passed)
        return found

    def _try(self, hinted: Mapping[str, tuple[Trajectory, Sequence[Branch]]]) -> Passed:
        """The share of replies under each hint that pass; all are written together."""
        if self.trial is None:
            return {}
        trial = self.trial
        room = self.context_length - trial.sampling.max_new_tokens
        asked: list[tuple[Trajectory, int, SampleRequest]] = []
        for trajectory, branches in hinted.values():
            for one in branches:
                ids = trajectory.token_ids[: one.splice] + one.token_ids[: one.scored.index(True)]
                for n in range(self.settings.resamples if len(ids) <= room else 0):
                    seed = seed_for(trial.seed, "hint", trajectory.id, one.turn, n)
                    asked.append((trajectory, one.turn, SampleRequest(prompt_ids=ids, seed=seed)))
        written = self.engine.sample([r for *_, r in asked], trial.sampling) if asked else []
        passes: dict[tuple[str, int], list[bool]] = {}
        for (trajectory, turn, _), sample in zip(asked, written, strict=True):
            outcome = trial.passes(trajectory, turn, sample.text)
            passes.setdefault((trajectory.id, turn), []).append(outcome)
        return {place: sum(outcomes) / len(outcomes) for place, outcomes in passes.items()}

    def _branches(
        self, trajectory: Trajectory, hints: Sequence[Hint]
    ) -> tuple[list[HintOutcome], list[tuple[Hint, Branch]]]:
        dropped, branches = [], []
        for hint in hints:
            try:
                one = splice_hint(
                    trajectory,
                    hint,
                    self.turns,
                    place=self.settings.position,
                    role=self.settings.role or "user",
                    max_tokens=self.context_length,
                )
            except SpliceError as error:
                dropped.append(HintOutcome(hint=hint, shift=None, dropped=error.reason))
                continue
            if one.splice + len(one.token_ids) > self.context_length:
                dropped.append(HintOutcome(hint=hint, shift=None, dropped="too_long"))
            else:
                branches.append((hint, one))
        return dropped, branches

    # ── all hints of a trajectory in one sequence ────────────────────────────────────────────────

    def _together(
        self, hinted: Sequence[tuple[Trajectory, list[Hint]]], want: Want, top_k: int
    ) -> dict[str, HintedTurns]:
        found: dict[str, HintedTurns] = {}
        asked: list[tuple[Trajectory, list[HintOutcome], dict[int, Hint], SplicedTrajectory]] = []
        requests: list[ScoreRequest] = []
        for trajectory, hints in hinted:
            dropped, kept, whole = self._sequence(trajectory, hints)
            if whole is None:
                found[trajectory.id] = HintedTurns(hint_outcomes=tuple(dropped), spoken={})
                continue
            asked.append((trajectory, dropped, kept, whole))
            places = {place for _, its in whole.scored for place in its}
            for ids, scored in (
                (trajectory.token_ids, _tokens_in(trajectory, kept)),
                (whole.token_ids, tuple(i in places for i in range(len(whole.token_ids)))),
            ):
                requests.append(
                    ScoreRequest(token_ids=ids, scored=scored, temperature=trajectory.temperature)
                )
        scores = iter(self.engine.score(requests, want=want, top_k=top_k))
        for trajectory, dropped, kept, whole in asked:
            plain = _by_turn(trajectory, kept, next(scores).logp_T)
            under = next(scores)
            sizes = [len(its) for _, its in whole.scored]
            starts = [0, *accumulate(sizes)]
            extra = len(whole.token_ids)
            spoken = {}
            for (turn, _), start, size in zip(whole.scored, starts, sizes, strict=False):
                own = slice(start, start + size)
                part = _map_scores(itemgetter(own), under)
                spoken[turn] = ScoredTurn(plain_T=plain[turn], hinted=part, num_tokens=extra)
                extra = 0  # the sequence is read once for all of its turns
            found[trajectory.id] = self._judge(trajectory, dropped, kept, spoken, {})
        return found

    def _sequence(
        self, trajectory: Trajectory, hints: Sequence[Hint]
    ) -> tuple[list[HintOutcome], dict[int, Hint], SplicedTrajectory | None]:
        dropped: list[HintOutcome] = []
        kept = list(hints)
        while kept:
            try:
                whole = splice_hints_cumulatively(
                    trajectory,
                    kept,
                    self.turns,
                    role=self.settings.role or "user",
                    max_tokens=self.context_length,
                )
            except SpliceError as error:
                kept.remove(error.hint)
                dropped.append(HintOutcome(hint=error.hint, shift=None, dropped=error.reason))
                continue
            end = 1 + max(place for _, places in whole.scored for place in places)
            if end <= self.context_length:  # what comes after the last hinted turn nobody reads
                cut = replace(whole, token_ids=whole.token_ids[:end])
                return dropped, {hint.turn: hint for hint in kept}, cut
            dropped.append(HintOutcome(hint=kept.pop(), shift=None, dropped="too_long"))
        return dropped, {}, None

    # ── worth it? ────────────────────────────────────────────────────────────────────────────────

    def measured(
        self, scored: Scored, student_logp: Sequence[float], teacher_logp: Sequence[float]
    ) -> tuple[HintOutcome, ...]:
        """What hints did that the update read, from the log-probs it found: of all chosen tokens
        as they were, and of those that the target names under their hints."""
        trajectory, target = scored.trajectory, scored.target
        assert target is not None and target.token_indices is not None
        hints = {j.hint.turn: j.hint for j in scored.hints if j.dropped is None}
        plain_T = torch.tensor(student_logp, dtype=torch.float64)[list(target.token_indices)]
        plain = _by_turn(trajectory, hints, plain_T)
        under = _by_turn(trajectory, hints, torch.tensor(teacher_logp, dtype=torch.float64))
        spoken = {
            turn: ScoredTurn(plain_T=plain[turn], hinted=Scores(logp_T=under[turn]), num_tokens=0)
            for turn in hints
        }
        dropped = [j for j in scored.hints if j.dropped is not None]
        return self._judge(trajectory, dropped, hints, spoken, {}).hint_outcomes

    def _judge(
        self,
        trajectory: Trajectory,
        dropped: Sequence[HintOutcome],
        hints: Mapping[int, Hint],
        spoken: Mapping[int, ScoredTurn],
        passed: Passed,
    ) -> HintedTurns:
        hint_outcomes = list(dropped)
        for turn, hint in hints.items():
            fall_T = spoken[turn].plain_T - spoken[turn].hinted.logp_T
            shift, share = float(fall_T.sum()), passed.get((trajectory.id, turn))
            least = self.settings.min_shift
            why = "shift" if least is not None and shift < least else None
            if share is not None and share < self.settings.min_pass_rate:
                why = why or "not_passed"
            hint_outcomes.append(
                HintOutcome(
                    hint=hint,
                    shift=shift,
                    bad_span_shift=self._span_shift(trajectory, hint, fall_T),
                    passed=share,
                    dropped=why,
                )
            )
        training = {j.hint.turn for j in hint_outcomes if j.dropped is None}
        return HintedTurns(
            hint_outcomes=tuple(sorted(hint_outcomes, key=lambda j: j.hint.turn)),
            spoken={turn: one for turn, one in spoken.items() if turn in training},
        )

    def _span_shift(self, trajectory: Trajectory, hint: Hint, fall_T: Tensor) -> float | None:
        if not hint.bad_span:
            return None
        turn = trajectory.turns[hint.turn]
        ids = [i for i, chosen in zip(turn.token_ids, turn.chosen, strict=True) if chosen]
        inside = tokens_of_span(self.turns.renderer.pieces(ids), hint.bad_span)
        return float(fall_T[inside].sum()) if inside else None


def tokens_of_span(pieces: Sequence[str], span: str) -> list[int]:
    """Which pieces hold some of the span's first occurrence.

    >>> tokens_of_span(["call ", "get_", "wea", "ther", "()"], "get_weather")
    [1, 2, 3]
    """
    start = "".join(pieces).find(span)
    if start < 0:
        return []
    ends = list(accumulate(len(piece) for piece in pieces))
    stop = start + len(span)
    return [
        i
        for i, (piece, end) in enumerate(zip(pieces, ends, strict=True))
        if piece and end > start and end - len(piece) < stop
    ]


def concat_scores(parts: Sequence[Scores]) -> Scores:
    return _map_scores(lambda *columns: torch.cat(columns), *parts)


def _map_scores(function: Callable[..., Tensor], *parts: Scores) -> Scores:
    """Applied to each field that the scores have."""
    columns = {f.name: [getattr(part, f.name) for part in parts] for f in fields(Scores)}
    mapped: dict[str, Any] = {k: v[0] if v[0] is None else function(*v) for k, v in columns.items()}
    return Scores(**mapped)


def _tokens_in(trajectory: Trajectory, turns: Mapping[int, Hint]) -> tuple[bool, ...]:
    """The chosen ids of these turns, among all ids."""
    return tuple(
        chosen and index in turns
        for index, turn in enumerate(trajectory.turns)
        for chosen in turn.chosen
    )


def _by_turn(
    trajectory: Trajectory, turns: Mapping[int, Hint], values_T: Tensor
) -> dict[int, Tensor]:
    """Values of the chosen tokens of these turns, each turn's own."""
    indices = sorted(turns)
    sizes = [sum(trajectory.turns[index].chosen) for index in indices]
    return dict(zip(indices, torch.split(values_T, sizes), strict=True))
