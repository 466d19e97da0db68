"""Supports of the student's tokens with a served teacher: the update of the same teacher here.

The server is one of ours that speaks vLLM's protocol; vLLM itself has this on GPUs only, where it
was never run with courtside.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.small_runs import small_recipe
from support.tiny_model import save_tiny
from support.vllm_model import VllmModel, encode
from support.vllm_stand_in import GENERATE, respond
from transformers import AutoModelForCausalLM

from courtside.artifacts.server_commands import find_server_commands
from courtside.assemble import assemble
from courtside.errors import RecipeError, RunError


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return save_tiny(folder / "student"), save_tiny(folder / "teacher", seed=1)


@pytest.fixture
def server(models: tuple[Path, Path]) -> Iterator[VllmModel]:
    server = VllmModel(AutoModelForCausalLM.from_pretrained(models[1]).eval())
    yield server
    server.close()


def served(server: VllmModel, **settings: Any) -> dict[str, Any]:
    return {"kind": "server", "server": {"urls": [server.url], "model": "tiny", **settings}}


def on_support(of: str, k: int, **more: Any) -> dict[str, Any]:
    return {"kind": "divergence", "support": {"kind": "top_k", "k": k, "of": of}, **more}


LOSSES: dict[str, list[dict[str, Any]]] = {
    "student": [on_support("student", 8)],
    "joint": [on_support("joint", 8)],
    "several": [
        on_support("teacher", 12, name="a"),
        on_support("student", 6, name="b", divergence="forward_kl"),
        on_support("joint", 4, name="c"),
        {"kind": "policy_gradient", "advantage": "teacher_gap", "weight": 0.1},
    ],
}


def take_step(recipe: Any) -> tuple[Any, torch.Tensor]:
    parts = assemble(recipe)
    tasks = parts.tasks.batch(0, recipe.train.prompts_per_step)
    update = parts.student.step(0, parts.teacher(parts.rollout(tasks, 0)))
    state = parts.student.optimizer.state
    trained = sorted(parts.student.weights.trained.items())
    return update, torch.cat([state[p]["exp_avg"].flatten() for _, p in trained])


@pytest.mark.parametrize("losses", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("context", [None, {"kind": "system", "text": "Be brief."}])
def test_the_update_is_that_of_the_teacher_in_this_process(
    context: Any, losses: Any, models: tuple[Path, Path], server: VllmModel
) -> None:
    local = {"kind": "model", "model": str(models[1]), "context": context}
    right, right_gradient = take_step(small_recipe(models[0], teacher=local, losses=losses))
    teacher = served(server) | {"context": context}
    ours, gradient = take_step(small_recipe(models[0], teacher=teacher, losses=losses))
    assert ours.loss == pytest.approx(right.loss, rel=1e-4)
    assert right_gradient.norm() > 0
    assert (gradient - right_gradient).norm() < 1e-4 * right_gradient.norm()
    for name in ("topk_student_mass", "topk_teacher_mass"):
        for key in (key for key in right.metrics if key.endswith(name)):
            assert ours.metrics[key] == pytest.approx(right.metrics[key], rel=1e-4)


def test_a_support_of_the_student_needs_no_json(
    models: tuple[Path, Path], server: VllmModel
) -> None:
    recipe = small_recipe(models[0], teacher=served(server), losses=LOSSES["student"])
    parts = assemble(recipe)
    server.bodies.clear()
    trajectories = parts.rollout(parts.tasks.batch(0, 2), 0)
    parts.teacher(trajectories)
    fields = [body["sampling_params"] for path, body in server.bodies if path == GENERATE]
    assert len(fields) == len(trajectories)
    answers = {trajectory.completion_ids: trajectory for trajectory in trajectories}
    for field in fields:
        trajectory = answers.pop(tuple(row[0] for row in field["prompt_logprob_token_ids"]))
        assert "prompt_logprobs" not in field
        prompt = len(trajectory.turns[0].token_ids)
        rows = field["prompt_logprob_token_ids"]
        assert field["prompt_logprob_start"] == prompt - 1, "rows of the answer only"
        assert {len(row) for row in rows} == {9}


def test_servers_that_cannot_are_refused_with_the_reason(
    models: tuple[Path, Path], server: VllmModel
) -> None:
    def refuse(number: int, path: str, body: Any) -> Any:
        if path == GENERATE and "prompt_logprob_token_ids" in body["sampling_params"]:
            text = "prompt_logprob_token_ids requires the V2 model runner"
            return respond({"error": {"message": text}}, 400)
        return "none"

    def ignore(number: int, path: str, body: Any) -> Any:
        if path == GENERATE:
            body["sampling_params"].pop("prompt_logprob_token_ids", None)
        return "none"

    for fault in (refuse, ignore):
        server.fault = fault
        with pytest.raises(RecipeError, match=r"losses\[0\].support.of = 'joint'.*V2 model runner"):
            assemble(small_recipe(models[0], teacher=served(server), losses=LOSSES["joint"]))
    server.fault = lambda n, path, body: "none"
    for of, k, flag in (("student", 20, 21), ("joint", 21, 21)):
        with pytest.raises(RecipeError, match=rf"support.k = {k}.*--max-logprobs {flag}"):
            losses = [on_support(of, k)]
            assemble(small_recipe(models[0], teacher=served(server), losses=losses))
    hints: dict[str, Any] = {
        "tasks": {"kind": "toolbox", "turns": 2, "num_tools": 2}, "reader": {"kind": "rules"},
    }  # fmt: skip
    with pytest.raises(RecipeError, match=r"support.of = 'joint' needs the teacher's whole"):
        losses = [on_support("joint", 4, on="hinted_turns")]
        small_recipe(models[0], teacher=served(server), losses=losses, **hints)


def change(array: np.ndarray, how: str) -> Any:
    if how == "another shape":
        return encode(array[1:])
    if how == "integers":
        return encode(array.astype(np.int64))
    if how == "NaN":
        return encode(np.where(np.isfinite(array), np.nan, array))
    if how == "positive":
        return encode(np.abs(array))
    return {"no base64": "%%%", "no array": base64.b64encode(b"hello").decode(), "a number": 5}[how]


@pytest.mark.parametrize(
    "how",
    ["another shape", "integers", "NaN", "positive", "no base64", "no array", "a number"],
)
def test_garbage_in_place_of_scores_is_never_used(
    how: str, models: tuple[Path, Path], server: VllmModel
) -> None:
    parts = assemble(small_recipe(models[0], teacher=served(server), losses=LOSSES["student"]))
    trajectories = parts.rollout(parts.tasks.batch(0, 2), 0)

    def spoil(number: int, path: str, body: Any) -> Any:
        response = server.answer(path, body)
        assert response is not None
        tree = json.loads(response[2])
        content = base64.b64decode(tree["prompt_token_id_logprobs"])
        tree["prompt_token_id_logprobs"] = change(np.load(io.BytesIO(content)), how)
        return respond(tree)

    server.fault = spoil
    with pytest.raises(RunError, match=r"Nothing of it was used"):
        parts.teacher(trajectories)


def test_scores_that_were_dropped_are_asked_for_again(
    models: tuple[Path, Path], server: VllmModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM answers null for a request that it preempted."""
    recipe = small_recipe(models[0], teacher=served(server), losses=LOSSES["student"])
    parts = assemble(recipe)
    parts.teacher.teacher.engine.pool.first_wait = 0.01
    trajectories = parts.rollout(parts.tasks.batch(0, 2), 0)
    lost: list[int] = []

    def drop(number: int, path: str, body: Any) -> Any:
        if len(lost) < 2:
            lost.append(number)
            body["sampling_params"].pop("prompt_logprob_token_ids")
        return "none"

    server.fault = drop
    scored = parts.teacher(trajectories)
    assert len(lost) == 2 and all(s.target is not None for s in scored)


def test_the_command_of_the_server_counts_the_token_itself(models: tuple[Path, Path]) -> None:
    teacher = {"kind": "server", "server": {"urls": ["http://localhost:1"], "model": "m"}}
    for of, flag in (("student", "33"), ("joint", "32"), ("teacher", "32")):
        recipe = small_recipe(models[0], teacher=teacher, losses=[on_support(of, 32)])
        (command,) = find_server_commands(recipe)
        assert command.flags[command.flags.index("--max-logprobs") + 1] == flag
