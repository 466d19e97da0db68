"""Choose: the best and the worst of a prompt's samples become a preference pair."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations

from courtside.drafts.base import DraftOutcome, add_usage, is_draft
from courtside.drafts.prompts import JUDGE, make_prompt, show_draft, show_task
from courtside.drafts.queries import Interview, Query
from courtside.errors import TaskError
from courtside.recipe.drafts import ChooseConfig
from courtside.seeds import sample_group
from courtside.types import Target, TokenUsage, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftScores:
    """What a ranking gives: higher is better."""

    scores: Mapping[str, float]
    """By trajectory id; those without a score are not ranked."""
    counts: Mapping[str, int] = field(default_factory=dict)
    usage: Mapping[str, TokenUsage] = field(default_factory=dict)


Rank = Callable[[Sequence[Trajectory]], DraftScores]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chooser:
    config: ChooseConfig
    rank: Rank

    def __call__(self, trajectories: Sequence[Trajectory]) -> DraftOutcome:
        drafts = [t for t in trajectories if is_draft(t)]
        ranking = self.rank(drafts)
        groups: dict[str, list[Trajectory]] = {}
        for draft in drafts:
            groups.setdefault(sample_group(draft.id), []).append(draft)
        counts = Counter({"pairs": 0, **ranking.counts})
        marked: dict[str, Trajectory] = {}
        for group in groups.values():
            outcome = choose_pair(
                [draft for draft in group if draft.id in ranking.scores],
                ranking.scores,
                max_length_ratio=self.config.length_control,
                min_gap=self.config.min_gap,
            )
            if isinstance(outcome, str):
                counts[f"dropped/{outcome}"] += 1
                continue
            better, worse = outcome
            counts["pairs"] += 1
            pair_id = f"{worse.id}+choose"
            marked[better.id] = replace(
                better, preference="better", pair=pair_id, draft=worse.id, correction="choose"
            )
            marked[worse.id] = replace(worse, preference="worse", pair=pair_id)
        return DraftOutcome(
            trajectories=[marked.get(t.id, t) for t in trajectories],
            counts=counts,
            usage=ranking.usage,
        )


def choose_pair(
    group: Sequence[Trajectory],
    scores: Mapping[str, float],
    *,
    max_length_ratio: float | None = None,
    min_gap: float = 0.0,
) -> tuple[Trajectory, Trajectory] | str:
    """(better, worse) with the largest gap of the scores; or why the group has no pair.

    Of several pairs with the same gap, the one whose lengths differ least: where the scores do not
    tell, length should not be what is learned. With `max_length_ratio`, only pairs whose longer
    member has at most so many times the tokens of the shorter one.
    """
    if len(group) < 2:
        return "single"
    pairs = [
        (a, b)
        for a, b in permutations(group, 2)
        if scores[a.id] - scores[b.id] > min_gap and a.completion_ids != b.completion_ids
    ]
    if not pairs:
        return "tie"
    if max_length_ratio is not None:
        pairs = [pair for pair in pairs if _length_ratio(*pair) <= max_length_ratio]
    if not pairs:
        return "length"

    def rank(pair: tuple[Trajectory, Trajectory]) -> tuple[float, float, str, str]:
        better, worse = pair
        gap = scores[better.id] - scores[worse.id]
        return -gap, _length_ratio(better, worse), better.id, worse.id

    return min(pairs, key=rank)


def _length_ratio(a: Trajectory, b: Trajectory) -> float:
    lengths = a.num_completion_tokens, b.num_completion_tokens
    return max(lengths) / min(lengths)


# ── rankings ─────────────────────────────────────────────────────────────────────────────────────


def rank_by_reward(drafts: Sequence[Trajectory]) -> DraftScores:
    scores = {}
    for draft in drafts:
        if draft.grade is None:
            raise TaskError(
                f"task {draft.task.id} has no grader, so its samples have no reward to choose by. "
                "Name a grader on the tasks, or use drafts.by = 'teacher_logp' or 'judge'"
            )
        scores[draft.id] = draft.grade.score
    return DraftScores(scores=scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherRanking:
    """Log-probability under the teacher with its context: the mean or the sum over the tokens."""

    score: Callable[[Sequence[Trajectory]], Mapping[str, Target]]
    config: ChooseConfig

    def __call__(self, drafts: Sequence[Trajectory]) -> DraftScores:
        targets = self.score(drafts)
        scores: dict[str, float] = {}
        usage: dict[str, TokenUsage] = {}
        for draft in drafts:
            if (target := targets.get(draft.id)) is None:
                continue
            logp_T = target.logp_T.double()
            scores[draft.id] = float(logp_T.sum() if self.config.reduce == "sum" else logp_T.mean())
            length = len(draft.token_ids) + target.num_context_tokens
            usage = add_usage(usage, {target.teacher: TokenUsage(input_tokens=length)})
        return DraftScores(
            scores=scores, counts={"unscored": len(drafts) - len(scores)}, usage=usage
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeRanking:
    """A model's score of each sample by itself: no order of samples can sway it, and ties and
    lengths are handled as those of other scores."""

    ask: Interview[float]
    config: ChooseConfig

    def __call__(self, drafts: Sequence[Trajectory]) -> DraftScores:
        template = self.config.prompt or JUDGE
        queries = [
            Query(draft=t, prompt=make_prompt(template, show_task(t.task), show_draft(t), {}))
            for t in drafts
        ]
        replies = self.ask(queries)
        return DraftScores(scores=replies.answers, counts=replies.counts, usage=replies.usage)
