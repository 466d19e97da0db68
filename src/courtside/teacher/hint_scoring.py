"""Scores turns with hints before them, against the same turns without.

One model gives both log-probs. A hint under which the turn's tokens are hardly less likely would
teach nothing: it is dropped, and stays in the report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    score_branches,
)
from courtside.recipe.hints import HintsConfig
from courtside.seeds import seed_for
from courtside.teacher.judging import judge_hint, tokens_of_span
from courtside.types import Branch, Hint, HintOutcome, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class SplicedHints:
    """Hints of one trajectory that can be inserted, by turn, and those that cannot."""

    branches: Mapping[int, tuple[Hint, Branch]]
    dropped: tuple[HintOutcome, ...]
    wrong: Mapping[int, Branch]
    """With the wrong hint of each of these turns, in the same order; empty: they have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HintedScores:
    """Of one trajectory."""

    outcomes: tuple[HintOutcome, ...]
    """By turn, those of dropped hints included."""
    turns: tuple[int, ...] = ()
    """Those whose hints train, in order."""
    scores: Scores | None = None
    """Of the completion tokens of `turns`, under their hints; None: no hint trains."""
    wrong_scores: Scores | None = None
    """The same under their wrong hints; None: they have none."""
    num_tokens: int = 0
    """Tokens that were scored in addition to the trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HintTrial:
    """Samples replies under a hint and checks them in the environment."""

    sampling: Sampling
    passes: Callable[[Trajectory, int, str], bool]
    """Whether a reply in place of this turn of this trajectory causes no error."""
    num_replies: int
    seed: int

    def pass_rates(
        self, engine: Engine, spliced: Sequence[tuple[Trajectory, SplicedHints]]
    ) -> dict[tuple[str, int], float]:
        """By trajectory id and turn; hints that leave no context for a reply are left out."""
        max_prompt = engine.context_length - self.sampling.max_new_tokens
        attempts: list[tuple[Trajectory, int, SampleRequest]] = []
        for trajectory, hints in spliced:
            for turn, (_, branch) in hints.branches.items():
                prompt = branch.token_ids[: branch.scored.index(True)]
                ids = trajectory.token_ids[: branch.splice] + prompt
                for n in range(self.num_replies if len(ids) <= max_prompt else 0):
                    seed = seed_for(self.seed, "hint", trajectory.id, turn, n)
                    attempts.append((trajectory, turn, SampleRequest(prompt_ids=ids, seed=seed)))
        requests = [request for *_, request in attempts]
        samples = engine.sample(requests, self.sampling) if requests else []
        passes: dict[tuple[str, int], list[bool]] = {}
        for (trajectory, turn, _), sample in zip(attempts, samples, strict=True):
            outcome = self.passes(trajectory, turn, sample.text)
            passes.setdefault((trajectory.id, turn), []).append(outcome)
        return {key: sum(outcomes) / len(outcomes) for key, outcomes in passes.items()}


@dataclass
class HintScorer:
    """Scores hints with one engine. Ids of trajectories are verbatim; `template` renders hints."""

    engine: Engine
    template: IncrementalTemplate
    settings: HintsConfig
    trial: HintTrial | None = None
    """None: no replies are sampled under hints."""

    def score(
        self,
        trajectories: Sequence[Trajectory],
        hints: Sequence[Hint],
        *,
        want: Want,
        top_k: int = 0,
    ) -> dict[str, HintedScores]:
        """By trajectory id; those without a hint are left out."""
        hinted = _by_trajectory(trajectories, hints)
        score = self._score_cumulatively if self.settings.cumulative else self._score_separately
        return score(hinted, want, top_k)

    def splice(
        self, trajectories: Sequence[Trajectory], hints: Sequence[Hint]
    ) -> dict[str, SplicedHints]:
        """By trajectory id; those without a hint are left out."""
        hinted = _by_trajectory(trajectories, hints)
        return {trajectory.id: self._splice(trajectory, hints) for trajectory, hints in hinted}

    def bad_tokens(self, trajectory: Trajectory, hint: Hint) -> tuple[int, ...]:
        """Which of the turn's completion tokens `hint.bad_span` covers."""
        if not hint.bad_span:
            return ()
        turn = trajectory.turns[hint.turn]
        ids = [i for i, chosen in zip(turn.token_ids, turn.completion_mask, strict=True) if chosen]
        return tokens_of_span(self.template.renderer.pieces(ids), hint.bad_span)

    # ── each hint alone ──────────────────────────────────────────────────────────────────────────

    def _score_separately(
        self, hinted: Sequence[tuple[Trajectory, list[Hint]]], want: Want, top_k: int
    ) -> dict[str, HintedScores]:
        spliced = [(trajectory, self._splice(trajectory, hints)) for trajectory, hints in hinted]
        requests = [
            BranchRequest(
                token_ids=trajectory.token_ids,
                branches=(
                    *(branch for _, branch in hints.branches.values()),
                    *hints.wrong.values(),
                ),
                scored=_mask_turns(trajectory, hints.branches),
                temperature=trajectory.temperature,
            )
            for trajectory, hints in spliced
            if hints.branches
        ]
        scores = iter(score_branches(self.engine, requests, want=want, top_k=top_k))
        passed = self.trial.pass_rates(self.engine, spliced) if self.trial else {}
        results = {}
        for trajectory, hints in spliced:
            if not hints.branches:
                results[trajectory.id] = HintedScores(outcomes=hints.dropped)
                continue
            score = next(scores)
            assert score.trunk is not None
            num_hints = len(hints.branches)
            sizes = Counter({turn: len(b.token_ids) for turn, (_, b) in hints.branches.items()})
            sizes.update({turn: len(branch.token_ids) for turn, branch in hints.wrong.items()})
            results[trajectory.id] = self._judge(
                trajectory,
                {turn: hint for turn, (hint, _) in hints.branches.items()},
                score.trunk.logp_T,
                dict(zip(hints.branches, score.branches[:num_hints], strict=True)),
                wrong=dict(zip(hints.wrong, score.branches[num_hints:], strict=True)),
                dropped=hints.dropped,
                sizes=sizes,
                passed=passed,
            )
        return results

    def _splice(self, trajectory: Trajectory, hints: Sequence[Hint]) -> SplicedHints:
        dropped: list[HintOutcome] = []
        branches: dict[int, tuple[Hint, Branch]] = {}
        wrong: dict[int, Branch] = {}
        for hint in hints:
            texts = (
                [hint] if hint.wrong_text is None else [hint, replace(hint, text=hint.wrong_text)]
            )
            try:
                pair = [self._splice_one(trajectory, text) for text in texts]
            except SpliceError as error:
                dropped.append(HintOutcome(hint=hint, shift=None, drop_reason=error.reason))
                continue
            branches[hint.turn] = hint, pair[0]
            wrong |= {branch.turn: branch for branch in pair[1:]}
        assert not wrong or wrong.keys() == branches.keys(), "a wrong hint for each, or for none"
        return SplicedHints(branches=branches, dropped=tuple(dropped), wrong=wrong)

    def _splice_one(self, trajectory: Trajectory, hint: Hint) -> Branch:
        branch = splice_hint(
            trajectory,
            hint,
            self.template,
            place=self.settings.position,
            role=self.settings.role or "user",
            max_tokens=self.engine.context_length,
        )
        length = branch.splice + len(branch.token_ids)
        if length > self.engine.context_length:
            raise SpliceError("too_long", hint, f"{length} tokens with it")
        return branch

    # ── all hints of a trajectory in one sequence ────────────────────────────────────────────────

    def _score_cumulatively(
        self, hinted: Sequence[tuple[Trajectory, list[Hint]]], want: Want, top_k: int
    ) -> dict[str, HintedScores]:
        results: dict[str, HintedScores] = {}
        spliced: list[tuple[Trajectory, list[HintOutcome], dict[int, Hint], SplicedTrajectory]] = []
        requests: list[ScoreRequest] = []
        for trajectory, hints in hinted:
            dropped, by_turn, whole = self._splice_cumulatively(trajectory, hints)
            if whole is None:
                results[trajectory.id] = HintedScores(outcomes=tuple(dropped))
                continue
            spliced.append((trajectory, dropped, by_turn, whole))
            positions = {position for _, positions in whole.scored for position in positions}
            for ids, scored in (
                (trajectory.token_ids, _mask_turns(trajectory, by_turn)),
                (whole.token_ids, tuple(i in positions for i in range(len(whole.token_ids)))),
            ):
                requests.append(
                    ScoreRequest(token_ids=ids, scored=scored, temperature=trajectory.temperature)
                )
        scores = iter(self.engine.score(requests, want=want, top_k=top_k))
        for trajectory, dropped, by_turn, whole in spliced:
            plain_T, hinted_scores = next(scores).logp_T, _split_scores(next(scores), whole)
            # One sequence is scored for all of its turns.
            sizes = dict.fromkeys(by_turn, 0) | {min(by_turn): len(whole.token_ids)}
            results[trajectory.id] = self._judge(
                trajectory, by_turn, plain_T, hinted_scores, dropped=dropped, sizes=sizes
            )
        return results

    def _splice_cumulatively(
        self, trajectory: Trajectory, hints: Sequence[Hint]
    ) -> tuple[list[HintOutcome], dict[int, Hint], SplicedTrajectory | None]:
        dropped: list[HintOutcome] = []
        remaining = list(hints)
        while remaining:
            try:
                whole = splice_hints_cumulatively(
                    trajectory,
                    remaining,
                    self.template,
                    role=self.settings.role or "user",
                    max_tokens=self.engine.context_length,
                )
            except SpliceError as error:
                remaining.remove(error.hint)
                dropped.append(HintOutcome(hint=error.hint, shift=None, drop_reason=error.reason))
                continue
            end = 1 + max(position for _, positions in whole.scored for position in positions)
            if end <= self.engine.context_length:  # nothing after the last hinted turn is scored
                prefix = replace(whole, token_ids=whole.token_ids[:end])
                return dropped, {hint.turn: hint for hint in remaining}, prefix
            dropped.append(HintOutcome(hint=remaining.pop(), shift=None, drop_reason="too_long"))
        return dropped, {}, None

    # ── outcomes ─────────────────────────────────────────────────────────────────────────────────

    def _judge(
        self,
        trajectory: Trajectory,
        hints: Mapping[int, Hint],
        plain_T: Tensor,
        hinted: Mapping[int, Scores],
        *,
        dropped: Sequence[HintOutcome],
        sizes: Mapping[int, int],
        passed: Mapping[tuple[str, int], float] | None = None,
        wrong: Mapping[int, Scores] | None = None,
    ) -> HintedScores:
        """`plain_T`: log-probs of the hinted turns without hints; `hinted`, `sizes`, `wrong`: by
        turn."""
        lengths = [sum(trajectory.turns[turn].completion_mask) for turn in sorted(hints)]
        plain = dict(zip(sorted(hints), torch.split(plain_T, lengths), strict=True))
        judged = {
            turn: judge_hint(
                hint,
                plain[turn],
                hinted[turn].logp_T,
                bad_tokens=self.bad_tokens(trajectory, hint),
                pass_rate=(passed or {}).get((trajectory.id, turn)),
                settings=self.settings,
            )
            for turn, hint in hints.items()
        }
        turns = tuple(turn for turn in sorted(judged) if judged[turn].drop_reason is None)
        outcomes = sorted([*dropped, *judged.values()], key=lambda outcome: outcome.hint.turn)
        return HintedScores(
            outcomes=tuple(outcomes),
            turns=turns,
            scores=_concatenate(hinted[turn] for turn in turns),
            wrong_scores=_concatenate(wrong[turn] for turn in turns) if wrong else None,
            num_tokens=sum(sizes[turn] for turn in turns),
        )


def _by_trajectory(
    trajectories: Sequence[Trajectory], hints: Sequence[Hint]
) -> list[tuple[Trajectory, list[Hint]]]:
    by_id: dict[str, list[Hint]] = {}
    for hint in sorted(hints, key=lambda hint: hint.turn):
        by_id.setdefault(hint.trajectory, []).append(hint)
    return [(t, by_id[t.id]) for t in trajectories if t.id in by_id]


def _map_scores(function: Callable[..., Tensor], *parts: Scores) -> Scores | None:
    """`function` of each field that the parts have; None: there are no parts."""
    if not parts:
        return None
    columns = {f.name: [getattr(part, f.name) for part in parts] for f in fields(Scores)}
    mapped: dict[str, Any] = {k: v[0] if v[0] is None else function(*v) for k, v in columns.items()}
    return Scores(**mapped)


def _concatenate(parts: Iterable[Scores]) -> Scores | None:
    return _map_scores(lambda *columns: torch.cat(columns), *parts)


def _split_scores(scores: Scores, whole: SplicedTrajectory) -> dict[int, Scores]:
    """By turn."""
    ends = list(accumulate(len(positions) for _, positions in whole.scored))
    spans = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    parts = (_map_scores(itemgetter(span), scores) for span in spans)
    return {turn: part for (turn, _), part in zip(whole.scored, parts, strict=True) if part}


def _mask_turns(trajectory: Trajectory, turns: Mapping[int, Any]) -> tuple[bool, ...]:
    """True for the completion ids of these turns, among all ids of the trajectory."""
    return tuple(
        chosen and index in turns
        for index, turn in enumerate(trajectory.turns)
        for chosen in turn.completion_mask
    )
