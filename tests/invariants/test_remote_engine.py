"""The engine protocol is enough: runs with a server-like engine are those of the local one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.remote_engine import RemoteEngine
from support.small_runs import small_recipe

from courtside.assemble import assemble, in_process
from courtside.engines.base import Engine
from courtside.engines.local import LocalEngine
from courtside.errors import RecipeError
from courtside.loop import train_loop
from courtside.recipe import Recipe
from courtside.report.console import RunConsole
from courtside.report.folder.folder import RunFolder
from courtside.run import Run
from courtside.runtime import Runtime

TOP_K: dict[str, Any] = {
    "kind": "divergence",
    "support": {"kind": "top_k", "k": 8, "of": "teacher", "form": "tail"},
}
RATE = 1e-5
"""Small: a larger one would turn rounding into other samples after a few steps."""
TRAIN = {"steps": 3, "prompts_per_step": 2, "learning_rate": RATE}
EPISODES: dict[str, Any] = {
    "tasks": {"kind": "toolbox", "turns": 3, "num_tools": 2},
    "rollout": {"samples_per_prompt": 2, "max_new_tokens": 6},
    "train": TRAIN,
    "evaluate": {"num_tasks": 1},
    "reader": {"kind": "rules"},
}


def run_in(folder: Path, recipe: Recipe, serve: Any) -> tuple[Runtime, RunFolder]:
    with RunFolder.open(folder, recipe) as opened:
        parts = assemble(recipe, serve=serve)
        train_loop(parts, Run(parts, opened, RunConsole()))
    return parts, RunFolder.read(folder)


def assert_same_run(recipe: Recipe, folder: Path) -> Runtime:
    """With the local and with the remote engine; returns the remote parts."""
    local, local_run = run_in(folder / "local", recipe, in_process)
    remote, remote_run = run_in(folder / "remote", recipe, RemoteEngine)
    assert isinstance(local.engine, LocalEngine) and isinstance(remote.engine, RemoteEngine)
    start = assemble(recipe).student.weights.trained
    trained = local.student.weights.trained
    for name, parameter in remote.student.weights.trained.items():
        change, expected = (p.detach() - start[name] for p in (parameter, trained[name]))
        assert expected.abs().max() > RATE, name
        # AdamW divides by the gradient's size: where that is nearly 0, rounding decides the step.
        is_close = torch.isclose(change, expected, rtol=0.05, atol=0.05 * RATE)
        assert (~is_close).double().mean() < 0.02, name
    for row, expected in zip(remote_run.metrics(), local_run.metrics(), strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-3, abs=1e-5)
        assert row["grad_norm"] > 0
    for step in local_run.trajectory_steps():
        pairs = zip(remote_run.trajectories(step), local_run.trajectories(step), strict=True)
        for local_scored, remote_scored in pairs:
            assert local_scored.trajectory.token_ids == remote_scored.trajectory.token_ids
            assert (
                local_scored.trajectory.policy_version
                == remote_scored.trajectory.policy_version
                == step
            )
            assert [o.drop_reason for o in local_scored.hints] == [
                o.drop_reason for o in remote_scored.hints
            ]
            shifts = [[o.shift for o in side.hints] for side in (local_scored, remote_scored)]
            assert shifts[0] == pytest.approx(shifts[1], abs=1e-3)
    assert remote.engine.version == recipe.train.steps
    assert remote.engine.finished != sorted(remote.engine.finished), "answers come out of order"
    return remote


def test_distillation_from_the_top_tokens(
    tiny_folder: Path, tiny_teacher_folder: Path, tmp_path: Path
) -> None:
    parts = assert_same_run(
        small_recipe(tiny_folder, tiny_teacher_folder, losses=[TOP_K], train=TRAIN), tmp_path
    )
    scored = parts.teacher(parts.rollout(parts.tasks.batch(0, 2), 0))
    for s in scored:
        assert s.target is not None and s.target.hidden_TD is None and s.target.head is None
        assert s.target.top_ids_TK is not None and s.target.top_ids_TK.shape[-1] == 8


@pytest.mark.parametrize("teacher", ["model", "live"])
def test_hints(
    teacher: str, roomy_folder: Path, roomy_teacher_folder: Path, tmp_path: Path
) -> None:
    """A remote teacher scores every branch as a sequence of its own; a live student is the trainer
    itself, whatever samples."""
    losses = [TOP_K | {"on": "hinted_turns"}]
    config: dict[str, Any] = {"kind": "self", "weights": "live"}
    if teacher == "model":
        config = {"kind": "model", "model": str(roomy_teacher_folder)}
    recipe = small_recipe(roomy_folder, losses=losses, teacher=config, **EPISODES)
    parts = assert_same_run(recipe, tmp_path)
    stage: Any = parts.teacher.teacher
    assert stage.defers_hints == (teacher == "live")
    assert isinstance(stage.engine, RemoteEngine) == (teacher == "model")


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["all weights", "lora"])
def test_reinforcement_learning(tiny_folder: Path, tmp_path: Path, lora: Any) -> None:
    student = {"model": str(tiny_folder)} | ({"lora": lora} if lora else {})
    recipe = small_recipe(
        tiny_folder,
        student=student,
        rollout={"samples_per_prompt": 8, "max_new_tokens": 6},
        losses=[{"kind": "policy_gradient", "advantage": "reward"}],
    )
    assert_same_run(recipe, tmp_path)


def test_a_sampled_gap_needs_log_probs_only(
    tiny_folder: Path, tiny_teacher_folder: Path, tmp_path: Path
) -> None:
    losses = [{"kind": "policy_gradient", "advantage": "teacher_gap"}]
    recipe = small_recipe(tiny_folder, tiny_teacher_folder, losses=losses, train=TRAIN)
    parts = assert_same_run(recipe, tmp_path)
    teacher: Any = parts.teacher.teacher
    assert (teacher.want, teacher.top_k) == ("logp", 0)


REFUSED = {
    "whole distributions": (
        {"kind": "divergence"}, r"losses\[0\]\.support\.kind = 'full' needs.*20 likeliest.*top_k"
    ),
    "the student's support": (
        {"kind": "divergence", "support": {"kind": "top_k", "k": 8, "of": "student"}},
        r"losses\[0\]\.support\.of = 'student' needs the teacher's whole distributions",
    ),
    "both supports": (
        {"kind": "divergence", "support": {"kind": "top_k", "k": 8, "of": "joint"}},
        r"losses\[0\]\.support\.of = 'joint' needs",
    ),
    "a baseline": (
        {"kind": "policy_gradient", "baseline": True}, r"losses\[0\]\.baseline = true needs"
    ),
    "a larger k": (
        {"kind": "divergence", "support": {"kind": "top_k", "k": 21, "of": "teacher"}},
        r"losses\[0\]\.support\.k = 21: .* at most the 20 likeliest.*smaller k",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("loss", "message"), REFUSED.values(), ids=REFUSED)
def test_what_the_engine_cannot_give_is_refused(
    loss: dict[str, Any], message: str, tiny_folder: Path, tiny_teacher_folder: Path
) -> None:
    recipe = small_recipe(tiny_folder, tiny_teacher_folder, losses=[loss])
    with pytest.raises(RecipeError, match=message):
        assemble(recipe, serve=RemoteEngine)
    assemble(recipe)


def test_an_engine_without_weight_updates_cannot_roll_out(tiny_folder: Path) -> None:
    def serve(local: LocalEngine) -> Engine:
        engine = RemoteEngine(local)
        engine.capabilities = type(engine.capabilities)(
            top_k=20, hidden_states=False, branches=False, weight_updates=False
        )
        return engine

    losses = [{"kind": "policy_gradient", "advantage": "reward"}]
    with pytest.raises(RecipeError, match=r"rollout: .* cannot load new weights"):
        assemble(small_recipe(tiny_folder, losses=losses), serve=serve)
