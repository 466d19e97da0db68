"""Runs with take-overs: the update is the textbook's, and the folder says what happened."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.gradients import (
    accumulate,
    assert_equal_gradients,
    make_float64,
    score_batch,
    take_gradients,
)
from support.remote_engine import RemoteEngine
from support.small_runs import small_recipe
from support.textbook import naive_loss

from courtside.api import rescore, train
from courtside.assemble import assemble, in_process
from courtside.errors import RecipeError, RunError
from courtside.report.alarms import check_empty_update
from courtside.report.page.samples import render_scored_answer
from courtside.report.page.transcript import Conversation
from courtside.runtime import Runtime
from courtside.training.loss_terms import preference_pairs
from courtside.types import Scored

ARITHMETIC = {"kind": "arithmetic"}
EVERYTHING = {"select": "all", "require": "none"}


def single_turn(student: Path, teacher: Path, /, **changes: Any) -> Any:
    tree: dict[str, Any] = {
        "tasks": ARITHMETIC,
        "takeover": EVERYTHING,
        "losses": [{"kind": "cross_entropy", "on": "teacher"}],
        "run": {"checkpoint_every": 1, "trajectories_every": 1},
        "train": {"steps": 2, "prompts_per_step": 2, "learning_rate": 1e-3},
    }
    return small_recipe(student, teacher, **(tree | changes))


def episodes(student: Path, teacher: Path, /, **changes: Any) -> Any:
    tree: dict[str, Any] = {
        "tasks": {"kind": "toolbox"},
        "rollout": {"samples_per_prompt": 2, "max_new_tokens": 6, "limits": {"turns": 3}},
    }
    return single_turn(student, teacher, **(tree | changes))


def naive_gradients(parts: Runtime, scored: list[Scored], losses: list[dict[str, Any]]) -> Any:
    teacher, reference = parts.teacher.teacher, parts.teacher.reference
    model = parts.student.weights.model
    engines = {teacher.name: teacher.engine.model}  # type: ignore[union-attr]
    base = reference.engine.model if reference else model  # type: ignore[attr-defined]
    total, values = naive_loss(losses, scored, model, engines, base)
    total.backward()
    return take_gradients(parts.student.weights.trained), values


def check(parts: Runtime, scored: list[Scored], naive: list[Scored], losses: Any) -> None:
    ours, metrics = accumulate(parts, scored)
    expected, values = naive_gradients(parts, naive, losses)
    assert_equal_gradients(ours, expected)
    assert metrics.losses == pytest.approx(values, rel=1e-9)


LOSSES: dict[str, list[dict[str, Any]]] = {
    "cross entropy": [{"kind": "cross_entropy", "on": "teacher"}],
    "forward KL": [{"kind": "divergence", "divergence": "forward_kl", "on": "teacher"}],
    "on both": [
        {"kind": "divergence", "on": "student"},
        {"kind": "cross_entropy", "on": "teacher", "weight": 0.3},
    ],
}


@pytest.mark.parametrize("make", [single_turn, episodes])
@pytest.mark.parametrize("name", LOSSES)
def test_an_update_from_takeovers_is_the_textbooks(
    make: Any, name: str, roomy_folder: Path, roomy_teacher_folder: Path
) -> None:
    losses = LOSSES[name]
    recipe = make(roomy_folder, roomy_teacher_folder, losses=losses)
    parts = make_float64(assemble(recipe))
    scored = score_batch(parts)
    takeovers = [s for s in scored if s.trajectory.correction == "takeover"]
    assert len(takeovers) == len(scored) / 2
    # A teacher that no loss compares with writes, and scores nothing.
    assert all((s.target is not None) == recipe.scores_with_teacher for s in scored)
    check(parts, scored, scored, losses)


@pytest.mark.parametrize("make", [single_turn, episodes])
@pytest.mark.parametrize("budget", [1, 8192])
def test_pairs_at_forks_are_dpos(
    make: Any, budget: int, roomy_folder: Path, roomy_teacher_folder: Path
) -> None:
    """Several forks of a task are several pairs, in any order and any micro-batch."""
    losses = [{"kind": "preference", "beta": 0.4}]
    recipe = make(
        roomy_folder,
        roomy_teacher_folder,
        losses=losses,
        takeover=EVERYTHING | {"pair": True},
        train={"micro_batch_tokens": budget},
    )
    parts = make_float64(assemble(recipe))
    scored = score_batch(parts)
    members = {s.trajectory.id: s for s in scored if s.trajectory.preference is not None}
    drafts = sorted({s.trajectory.draft for s in members.values() if s.trajectory.draft})
    assert len(drafts) == 6 and len({s.trajectory.task.id for s in members.values()}) == 3
    assert all(s.target is None for s in members.values()), "only the reference scores them"
    pairs = [members[f"{id}+{side}"] for id in drafts for side in ("better", "worse")]
    apart = [s for s in scored if s.trajectory.id not in members] + pairs[0::2] + pairs[1::2][::-1]
    check(parts, apart, pairs, losses)


def test_pairs_of_forks_and_chosen_pairs_stay_apart(tiny_folder: Path, tiny_teacher_folder: Path):
    losses = [{"kind": "preference", "beta": 0.4}]
    recipe = single_turn(
        tiny_folder,
        tiny_teacher_folder,
        losses=losses,
        drafts=[{"kind": "choose", "by": "teacher_logp"}],
        takeover=EVERYTHING | {"pair": True},
    )
    parts = make_float64(assemble(recipe))
    trajectories = parts.rollout(parts.tasks.batch(0, 3), 0)
    scored = parts.teacher(parts.drafts(trajectories).trajectories)
    pairs = preference_pairs(scored[::-1])
    chosen = [pair for pair in pairs if pair[0].trajectory.correction == "choose"]
    assert len(pairs) == 6 + 3 and len(chosen) == 3
    for better, worse in pairs:
        assert better.trajectory.pair == worse.trajectory.pair
        assert better.trajectory.task == worse.trajectory.task
        if (better, worse) not in chosen:
            assert better.trajectory.draft == worse.trajectory.draft
    check(parts, scored, [s for pair in pairs for s in pair], losses)


def test_pair_members_train_by_preferences_alone(tiny_folder: Path, tiny_teacher_folder: Path):
    losses = [
        {"kind": "cross_entropy", "on": "teacher"},
        {"kind": "divergence", "on": "student"},
        {"kind": "preference", "weight": 0.5, "beta": 0.1},
    ]
    recipe = single_turn(
        tiny_folder, tiny_teacher_folder, losses=losses, takeover=EVERYTHING | {"pair": True}
    )
    parts = assemble(recipe)
    scored = score_batch(parts)
    update = parts.student.step(0, scored)
    sums = {
        name: sum(
            s.trajectory.num_completion_tokens
            for s in scored
            if s.trajectory.preference is None and s.trajectory.source == source
        )
        for name, source in (("cross_entropy", "teacher"), ("divergence", "student"))
    }
    assert {name: update.num_tokens[name] for name in sums} == sums
    pairs = [s.trajectory for s in scored if s.trajectory.preference is not None]
    assert update.num_tokens["preference"] == sum(t.num_completion_tokens for t in pairs)


@pytest.mark.parametrize("make", [single_turn, episodes])
def test_a_run_stores_where_takeovers_come_from(
    make: Any, roomy_folder: Path, roomy_teacher_folder: Path, tmp_path: Path
) -> None:
    run = train(make(roomy_folder, roomy_teacher_folder), tmp_path / "run")
    for row in run.metrics():
        stored = [s.trajectory for s in run.trajectories(row["step"])]
        takeovers = [t for t in stored if t.correction == "takeover"]
        assert {t.draft for t in takeovers} == {t.id for t in stored} - {t.id for t in takeovers}
        assert row["takeover/drafts"] == row["takeover/played"] == row["takeover/trained"] == 4
        tokens = sum(t.num_completion_tokens for t in takeovers)
        assert row["takeover/sampled_tokens"] == row["tokens/cross_entropy"] == tokens
        assert 0 <= row["takeover/pass_rate"] <= 1 and row["takeover/limited"] <= 4
        drafts = [t for t in stored if t.correction is None]
        assert row["length/mean"] == sum(t.num_completion_tokens for t in drafts) / len(drafts)
    costs = json.loads((run.path / "costs.json").read_text())
    assert costs["teacher"]["output_tokens"] == sum(
        row["takeover/sampled_tokens"] for row in run.metrics()
    )
    before = [len(run.trajectories(step)) for step in (0, 1)]
    rows = rescore(run.path)
    assert [row["trajectories"] for row in rows] == before, "nothing is taken over again"
    assert (run.path / "report.html").is_file()
    for item in run.trajectories(1):
        trajectory, page = item.trajectory, render_scored_answer(item, None)
        if trajectory.correction is None:
            assert "takeover of" not in page
            continue
        assert f"takeover of {trajectory.draft}" in page
        for number, turn in enumerate(trajectory.turns):
            if turn.role == "assistant":
                entry = Conversation.of(item, None).render_turn(number)
                author = "teacher" if any(turn.completion_mask) else "student"
                assert f"<b>{author}</b>" in entry


def test_a_teacher_plays_off_policy_episodes(
    roomy_folder: Path, roomy_teacher_folder: Path, tmp_path: Path
) -> None:
    rollout = {
        "samples_per_prompt": 2, "max_new_tokens": 6, "limits": {"turns": 3},
        "student_fraction": 0.5, "off_policy_source": "teacher",
    }  # fmt: skip
    tree = {"rollout": rollout, "takeover": None}
    run = train(episodes(roomy_folder, roomy_teacher_folder, **tree), tmp_path / "run")
    for row in run.metrics():
        stored = [s.trajectory for s in run.trajectories(row["step"])]
        assert [t.source for t in stored].count("teacher") == 2 == len(stored) / 2
        tokens = sum(t.num_completion_tokens for t in stored if t.source == "teacher")
        assert row["tokens/cross_entropy"] == tokens > 0 and row["loss"] > 0


READER = {
    "kind": "rules",
    "rules": [{"detect": "no_call", "hint": "Call a tool."},
              {"detect": "unparsable_call", "hint": "Write JSON."}],
}  # fmt: skip


@pytest.mark.parametrize("weights", ["live", "frozen"])
def test_the_readers_turn_is_taken_over_and_its_hints_train_too(
    weights: str, roomy_folder: Path, roomy_teacher_folder: Path, tmp_path: Path
) -> None:
    recipe = episodes(
        roomy_folder,
        roomy_teacher_folder,
        reader=READER,
        teacher={"kind": "self", "weights": weights},
        takeover=EVERYTHING | {"at": "reader"},
        losses=[
            {"kind": "divergence", "on": "hinted_turns"},
            {"kind": "divergence", "name": "taken", "on": "teacher", "divergence": "forward_kl"},
        ],
    )
    run = train(recipe, tmp_path / "run")
    for row in run.metrics():
        assert row["hints/trained"] + row.get("hints/dropped/harmful", 0) > 0
        stored = run.trajectories(row["step"])
        first = {s.trajectory.id: min(o.hint.turn for o in s.hints) for s in stored if s.hints}
        takeovers = [s for s in stored if s.trajectory.correction == "takeover"]
        assert len(takeovers) == row["takeover/trained"] == len(first) > 0
        for s in takeovers:
            assert s.trajectory.hintable_turns[0] == first[s.trajectory.draft or ""]
            assert s.teacher == f"self:{weights}" and not s.hints
        tokens = sum(s.trajectory.num_completion_tokens for s in takeovers)
        assert row["tokens/taken"] == tokens


@pytest.mark.parametrize("make", [single_turn, episodes])
def test_engines_elsewhere_take_over_alike(
    make: Any, roomy_folder: Path, roomy_teacher_folder: Path
) -> None:
    """Through the engine protocol alone, as a server would."""
    recipe = make(roomy_folder, roomy_teacher_folder)
    scored = [
        [s for s in score_batch(assemble(recipe, serve=serve)) if s.trajectory.draft is not None]
        for serve in (in_process, RemoteEngine)
    ]
    ids = [[(s.trajectory.id, s.trajectory.token_ids) for s in batch] for batch in scored]
    assert ids[0] == ids[1] and len(ids[0]) == 6


def test_a_first_step_without_any_takeover_stops(
    tiny_folder: Path, tiny_teacher_folder: Path, tmp_path: Path
) -> None:
    takeover = EVERYTHING | {"at": 5}
    rollout = {"samples_per_prompt": 1, "max_new_tokens": 6}
    changes = {"takeover": takeover, "rollout": rollout, "train": {"prompts_per_step": 1}}
    parts = assemble(single_turn(tiny_folder, tiny_teacher_folder, **changes))
    (task,) = parts.tasks.batch(0, 1)
    (draft,) = parts.rollout([task], 0)
    answer = replace(draft.turns[1], token_ids=(9, 1), completion_mask=(True,) * 2,
                     sampler_logp=(-1.0,) * 2, policy_versions=())  # fmt: skip
    scored = parts.teacher([replace(draft, turns=(draft.turns[0], answer))])
    update = parts.student.step(0, scored)
    with pytest.raises(RunError, match=r"took over none of 1 drafts \(draft_ended\)"):
        check_empty_update(parts.recipe, scored, update)
    check_empty_update(parts.recipe, scored, parts.student.step(1, scored))
    check_empty_update(parts.recipe, [replace(scored[0], takeover=None)], update)


def test_tasks_without_a_grader_are_refused(
    tiny_folder: Path, tiny_teacher_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "tasks.jsonl"
    rows = [{"messages": [{"role": "user", "content": f"Say {n}."}]} for n in range(40)]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    tasks = {"kind": "jsonl", "path": str(file)}
    changes: dict[str, Any] = {"tasks": tasks, "takeover": {}}
    with pytest.raises(RecipeError, match=r"takeover.select = 'failed' needs graded tasks"):
        assemble(single_turn(tiny_folder, tiny_teacher_folder, **changes))
    changes["takeover"] = {"select": "all"}
    with pytest.raises(RecipeError, match=r"takeover.require = 'passed' needs graded tasks"):
        assemble(single_turn(tiny_folder, tiny_teacher_folder, **changes))
    assemble(single_turn(tiny_folder, tiny_teacher_folder, **changes | {"takeover": EVERYTHING}))
