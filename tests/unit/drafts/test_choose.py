"""Which two samples of a prompt become a pair."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampled_drafts import draft

from courtside.drafts.base import DraftOutcome, DraftStages, keep_drafts
from courtside.drafts.choose import (
    Chooser,
    TeacherRanking,
    choose_pair,
    rank_by_reward,
)
from courtside.errors import TaskError
from courtside.recipe.drafts import ChooseConfig
from courtside.training.loss_terms import preference_pairs
from courtside.types import Scored, Target, TokenUsage, Trajectory


def choose(*drafts: Trajectory, **fields: object) -> DraftOutcome:
    config = ChooseConfig(kind="choose", **fields)  # type: ignore[arg-type]
    return Chooser(config=config, rank=rank_by_reward)(drafts)


def pairs_in(outcome: DraftOutcome) -> set[tuple[str, str]]:
    scored = [Scored(trajectory=t, target=None) for t in outcome.trajectories]
    return {(b.trajectory.id, w.trajectory.id) for b, w in preference_pairs(scored)}


def test_best_and_worst_of_each_group_are_a_pair_also_when_a_task_comes_twice() -> None:
    outcome = choose(
        draft(0, 0, 0.5), draft(0, 1, 1.0), draft(0, 2, 0.0),
        draft(1, 0, 0.2), draft(1, 1, 0.1),  # the same task
        draft(2, 0, 0.0), draft(2, 1, 0.0),
    )  # fmt: skip
    assert pairs_in(outcome) == {("000000-000-1", "000000-000-2"), ("000000-001-0", "000000-001-1")}
    assert dict(outcome.counts) == {"pairs": 2, "dropped/tie": 1}
    better = {t.id: t for t in outcome.trajectories}["000000-000-1"]
    assert (better.draft, better.correction) == ("000000-000-2", "choose")
    assert better.sampler_logp is not None, "it stays the student's own sample"
    assert [t.id for t in outcome.trajectories] == sorted(t.id for t in outcome.trajectories)


def test_only_the_students_whole_samples_are_compared() -> None:
    outcome = choose(
        draft(2, 0, 1.0, source="teacher"), draft(2, 1, 0.0),
        draft(3, 0, 1.0), draft(3, 1, None, fault="a bug", stop="fault"),
    )  # fmt: skip
    assert not pairs_in(outcome) and outcome.counts["dropped/single"] == 2


def test_equal_tokens_are_a_tie_whatever_their_scores() -> None:
    same = draft(2, 1, 0.0)
    assert choose(draft(2, 1, 1.0), same).counts["dropped/tie"] == 1


def test_length_control() -> None:
    group = [draft(2, 0, 1.0, length=9), draft(2, 1, 0.5, length=4), draft(2, 2, 0.0, length=3)]
    assert pairs_in(choose(*group)) == {("000000-002-0", "000000-002-2")}
    assert pairs_in(choose(*group, length_control=1.5)) == {("000000-002-1", "000000-002-2")}
    tight = choose(*group, length_control=1.0)
    assert not pairs_in(tight) and tight.counts["dropped/length"] == 1
    # Of equal gaps, the most similar lengths.
    group = [draft(2, 0, 1.0, length=9), draft(2, 1, 1.0, length=4), draft(2, 2, 0.0, length=5)]
    assert pairs_in(choose(*group)) == {("000000-002-1", "000000-002-2")}


def test_a_smallest_gap() -> None:
    group = [draft(2, 0, 0.6), draft(2, 1, 0.5)]
    assert pairs_in(choose(*group, min_gap=0.05)) and not pairs_in(choose(*group, min_gap=0.2))


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(1, 6)), max_size=6))
def test_no_other_pair_is_better(samples: list[tuple[float, int]]) -> None:
    group = [draft(2, n, score, length) for n, (score, length) in enumerate(samples)]
    scores = {t.id: t.grade.score for t in group if t.grade}
    pair = choose_pair(group, scores, max_length_ratio=2.0)
    gaps = [
        scores[a.id] - scores[b.id]
        for a in group
        for b in group
        if max(len(a.completion_ids), len(b.completion_ids))
        <= 2 * min(len(a.completion_ids), len(b.completion_ids))
    ]
    if isinstance(pair, str):
        assert max(gaps, default=0) <= 0
    else:
        assert scores[pair[0].id] - scores[pair[1].id] == max(gaps)


def test_a_task_without_a_grader_is_an_error() -> None:
    with pytest.raises(TaskError, match=r"task t-2 has no grader.*teacher_logp"):
        choose(draft(2, 0, None), draft(2, 1, None))


@pytest.mark.parametrize(("reduce", "best"), [("mean", "000000-002-0"), ("sum", "000000-002-1")])
def test_ranking_by_the_teacher(reduce: str, best: str) -> None:
    group = [draft(2, 0, length=6), draft(2, 1, length=2), draft(2, 2, length=3)]
    logps = dict(zip([t.id for t in group], (-1.0, -1.5, -9.0), strict=True))

    def score(drafts: object) -> dict[str, Target]:
        return {
            t.id: Target(
                teacher="big", context="c", num_context_tokens=7,
                logp_T=torch.full((t.num_completion_tokens,), logps[t.id]),
            )
            for t in group[:2]
        }  # fmt: skip

    config = ChooseConfig(kind="choose", by="teacher_logp", reduce=reduce)  # type: ignore[arg-type]
    outcome = Chooser(config=config, rank=TeacherRanking(score=score, config=config))(group)
    assert {pair[0] for pair in pairs_in(outcome)} == {best}
    assert outcome.counts["unscored"] == 1
    assert outcome.usage == {"big": TokenUsage(input_tokens=6 + 2 + 2 + 2 * 7)}


def test_stages_run_in_order_and_name_their_counts() -> None:
    group = [draft(2, 0, 1.0), draft(2, 1, 0.0)]
    config = ChooseConfig(kind="choose")
    stages = DraftStages(
        stages={"choose": Chooser(config=config, rank=rank_by_reward), "other": keep_drafts}
    )
    assert stages(group).counts == {"choose/pairs": 1}
    assert keep_drafts(group) == DraftOutcome(trajectories=group)
