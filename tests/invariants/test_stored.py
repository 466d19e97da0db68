"""Hints written after looking at a run train what they were written for, in another run on it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gradients import compute_gradients
from support.small_runs import digest, small_recipe

from courtside.api import evaluate_student, rescore, train
from courtside.assemble import assemble
from courtside.errors import RecipeError
from courtside.recipe import Recipe
from courtside.recipe.load import load_recipe
from courtside.report.folder.folder import RunFolder
from courtside.report.folder.hints_file import append_hint
from courtside.report.folder.parquet import StoredTrajectory
from courtside.types import Hint, Scored

LIVE = {"kind": "self", "weights": "live"}
HINTED = [{"kind": "divergence", "on": "hinted_turns"}]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stored")


def played_recipe(folder: Path, **changes: Any) -> Recipe:
    return small_recipe(
        folder,
        **{
            "tasks": {"kind": "toolbox", "turns": 2, "num_tools": 2},
            "rollout": {"samples_per_prompt": 2, "max_new_tokens": 6, "temperature": 0.8},
            "teacher": LIVE,
            "reader": {"kind": "rules"},
            "losses": HINTED,
            "train": {"steps": 2, "prompts_per_step": 2, "learning_rate": 1e-3},
            "evaluate": {"num_tasks": 1},
            **changes,
        },
    )


@pytest.fixture(scope="module")
def first(roomy_folder: Path, place: Path) -> RunFolder:
    """Two steps of four episodes each."""
    return train(played_recipe(roomy_folder), place / "first")


@pytest.fixture(scope="module")
def hints(first: RunFolder, place: Path) -> Path:
    """As a person writes them who looks at the first step: for 1 and 2 turns of two episodes."""
    path = place / "hints.jsonl"
    first_one, two = (stored.trajectory for stored in first.trajectories(0)[1:3])
    for trajectory, turn in ((first_one, 1), (two, 1), (two, 3)):
        assert trajectory.turns[turn].role == "assistant"
        hint = Hint(trajectory=trajectory.id, turn=turn, text=f"No, {turn}.", source="human")
        append_hint(path, hint)
    return path


def again_recipe(folder: Path, run: RunFolder, hints: Path, **changes: Any) -> Recipe:
    tasks = {"kind": "trajectories", "path": str(run.path), "steps": [0]}
    if changes.get("reader", True):
        changes = {"hints": {"harmful": "train"}, **changes}  # a random model likes half of them
    return small_recipe(
        folder,
        **{
            "tasks": tasks | changes.pop("tasks", {}),
            "rollout": {"student_fraction": 0.0},
            "reader": {"kind": "human", "path": str(hints)},
            "teacher": LIVE,
            "losses": HINTED,
            "train": {"steps": 3, "prompts_per_step": 2, "learning_rate": 1e-3},
            "run": {"checkpoint_every": 1},
            **changes,
        },
    )


def hinted_turns(stored: list[StoredTrajectory]) -> set[tuple[str, int, str]]:
    hint_outcomes = [j for s in stored for j in s.hints if j.drop_reason is None]
    return {(j.hint.trajectory, j.hint.turn, j.hint.text) for j in hint_outcomes}


def expected_turns(first: RunFolder) -> set[tuple[str, int, str]]:
    first_id, second_id = (stored.trajectory.id for stored in first.trajectories(0)[1:3])
    return {(first_id, 1, "No, 1."), (second_id, 1, "No, 1."), (second_id, 3, "No, 3.")}


def test_exactly_the_hinted_turns_train_in_every_epoch(
    roomy_folder: Path, first: RunFolder, hints: Path, tmp_path: Path
) -> None:
    recipe = again_recipe(roomy_folder, first, hints, tasks={"select": "hinted"})
    run = train(recipe, tmp_path / "again")
    played = {stored.trajectory.id: stored.trajectory for stored in first.trajectories(0)}
    hinted = expected_turns(first)
    sizes = [sum(played[id].turns[turn].completion_mask) for id, turn, _ in hinted]
    for step, row in enumerate(run.metrics()):  # an epoch is a step here
        stored = run.trajectories(step)
        assert {s.trajectory.id: s.trajectory for s in stored} == {
            id: played[id] for id, _, _ in hinted
        }
        assert hinted_turns(stored) == hinted
        assert row["hints/trained"] == 3 and row["grad_norm"] > 0
        assert row["tokens/divergence"] == sum(sizes)
        assert row["reader/human/proposed"] == row["reader/accepted"] == 3
        looked = {
            (s.trajectory.id, turn)
            for s in stored
            for turn, logp in zip(s.trajectory.turn_of, s.student_logp or (), strict=True)
            if logp == logp
        }
        assert looked == {(id, turn) for id, turn, _ in hinted}
    assert run.read_costs()["rollout"].output_tokens == 0  # nobody wrote anything


def test_the_update_is_that_of_the_run_that_sampled_them(
    roomy_folder: Path, first: RunFolder, hints: Path
) -> None:
    """At the same weights: the first run's own student, its rollout, and the person's hints."""
    person = {"kind": "human", "path": str(hints)}
    then = assemble(played_recipe(roomy_folder, reader=person))
    now = assemble(
        again_recipe(roomy_folder, first, hints, train={"steps": 3, "prompts_per_step": 4})
    )
    trajectories = then.rollout(then.tasks.batch(0, 2), 0)
    scored = then.teacher(trajectories, then.reader(trajectories).hints)
    for step in (0, 1):  # the second epoch has another order
        stored = now.rollout(now.tasks.batch(step, 4), step)
        rescored = now.teacher(stored, now.reader(stored).hints)
        assert {t.id: t.token_ids for t in stored} == {t.id: t.token_ids for t in trajectories}
        expected, actual = compute_gradients(then, scored), compute_gradients(now, rescored)
        assert expected.keys() == actual.keys()
        assert max(float(gradient.abs().max()) for gradient in expected.values()) > 1e-5
        for name, gradient in expected.items():
            torch.testing.assert_close(actual[name], gradient, rtol=1e-5, atol=1e-8)
        assert _loss(now, rescored) == pytest.approx(_loss(then, scored), rel=1e-6)


def _loss(parts: Any, scored: list[Scored]) -> float:
    """Of a step whose weights are put back."""
    before = {n: p.detach().clone() for n, p in parts.student.weights.trained.items()}
    loss: float = parts.student.step(0, scored).loss
    with torch.no_grad():
        for name, parameter in parts.student.weights.trained.items():
            parameter.copy_(before[name])
    return loss


def test_importance_ratios_are_those_of_the_sampler_then(
    roomy_folder: Path, first: RunFolder, hints: Path
) -> None:
    """The first step's weights are the start's: ratios of 1. The second's were others."""
    gaps = {}
    for step in (0, 1):
        losses = [{"kind": "policy_gradient", "on": "student"}]
        recipe = again_recipe(
            roomy_folder,
            first,
            hints,
            tasks={"steps": [step]},
            reader=None,
            teacher={"kind": "self", "weights": "frozen"},
            losses=losses,
        )
        parts = assemble(recipe)
        stored = parts.rollout(parts.tasks.batch(0, 4), 0)
        assert [t.policy_version for t in stored] == [step] * len(stored)
        metrics = parts.student.step(0, parts.teacher(stored)).metrics
        gaps[step] = metrics["sampler/logp_diff"]
        assert metrics["sampler/ratio_max"] >= 1 - 1e-4
    assert gaps[0] < 1e-5 < gaps[1]


def test_a_resumed_run_is_an_unbroken_one(
    roomy_folder: Path, first: RunFolder, hints: Path, tmp_path: Path
) -> None:
    recipe = again_recipe(roomy_folder, first, hints, tasks={"steps": [0, 1]})
    whole = train(recipe, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-000003")
    cut = train(recipe, tmp_path / "cut")
    for step in range(3):
        ids = [s.trajectory.id for s in whole.trajectories(step)]
        assert [s.trajectory.id for s in cut.trajectories(step)] == ids
    files = [
        f / "checkpoints" / "step-000003" / "weights.safetensors" for f in (cut.path, whole.path)
    ]
    assert digest(files[0].read_bytes()) == digest(files[1].read_bytes())
    ids = [s.trajectory.id for step in range(3) for s in whole.trajectories(step)]
    assert len(ids) == len(set(ids)) == 6  # of eight, in an epoch of four steps


def test_a_run_on_stored_trajectories_can_be_rescored_and_measured(
    roomy_folder: Path, first: RunFolder, hints: Path, tmp_path: Path
) -> None:
    recipe = again_recipe(roomy_folder, first, hints, train={"steps": 2, "prompts_per_step": 3})
    run = train(recipe, tmp_path / "again")
    # Also what it has stored is a run's: of two epochs, each trajectory once.
    third = again_recipe(roomy_folder, run, hints, tasks={"steps": [0, 1], "select": "hinted"})
    assert len(assemble(third).tasks.batch(0, 9)) == 2
    assert [row["trajectories"] for row in rescore(run.path)] == [
        len(run.trajectories(step)) for step in (0, 1)
    ]
    overrides = ["tasks.kind=toolbox", "tasks.path=null", "tasks.select=null", "tasks.steps=null",
                 "rollout.student_fraction=1", "rollout.max_new_tokens=6"]  # fmt: skip
    playing = load_recipe(run.path / "recipe.toml", [*overrides, "evaluate.num_tasks=1"])
    (measured,) = evaluate_student(playing, run=run.path)
    assert measured.step == 2 and len(measured.scores) == 1
    assert (run.path / "report.html").is_file() and run.evaluations() == []


def test_another_student_with_the_same_vocabulary_can_learn_from_them(
    roomy_folder: Path, tiny_teacher_folder: Path, first: RunFolder, hints: Path, tmp_path: Path
) -> None:
    notes = {}
    for folder in (roomy_folder, tiny_teacher_folder):
        (note,) = [n for n in assemble(again_recipe(folder, first, hints)).notes if "surprise" in n]
        notes[folder] = float(note.split(" by ")[1].split(" nats")[0])
    assert notes[roomy_folder] + 0.3 < notes[tiny_teacher_folder]
    recipe = again_recipe(
        tiny_teacher_folder, first, hints, train={"steps": 1, "prompts_per_step": 9}
    )
    run = train(recipe, tmp_path / "other")
    assert hinted_turns(run.trajectories(0)) == expected_turns(first)


def test_the_recipe_of_a_run_is_loaded_again(
    roomy_folder: Path, first: RunFolder, hints: Path, tmp_path: Path
) -> None:
    recipe = again_recipe(roomy_folder, first, hints, tasks={"select": "hinted"})
    with RunFolder.open(tmp_path / "run", recipe) as folder:
        assert folder.recipe() == recipe
    with pytest.raises(RecipeError, match="nothing is sampled"):
        again_recipe(roomy_folder, first, hints, rollout={"student_fraction": 0.0, "top_k": 5})
