"""The recipe that the viewer offers to copy: whole, valid, and it trains."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from support.small_runs import small_recipe
from unit.report.made_up import make_recipe

from courtside.api import train
from courtside.recipe import Recipe
from courtside.recipe.builtin import builtin_recipe_files
from courtside.recipe.load import load_recipe, parse_recipe
from courtside.recipe.pipeline import is_pipeline
from courtside.report.folder.folder import RunFolder
from courtside.report.folder.hints_file import append_hint
from courtside.types import Hint
from courtside.viewer.hints_recipe import hints_recipe

ROUTES = {
    "kind": "routes",
    "routes": {
        "a": {"kind": "self", "context": {"kind": "field", "field": "x"}},
        "b": {"kind": "model", "model": "m"},
    },
}
HINTED = {"tasks": {"kind": "toolbox"}, "reader": {"kind": "rules"}, "teacher": {"kind": "self"}}
CHANGES: list[dict[str, Any]] = [
    {},
    {"teacher": ROUTES, "losses": [{"kind": "divergence"}]},
    {"teacher": {"kind": "custom", "path": "m:f"}, "losses": [{"kind": "divergence"}]},
    {"student": {"model": "m", "adapter": "x", "lora": {"rank": 2}}, "seed": 5},
    HINTED
    | {
        "hints": {"resamples": 2, "min_pass_rate": 0.5, "min_shift": 0.5},
        "losses": [{"kind": "divergence", "on": "hinted_turns", "divergence": "forward_kl"}],
        "evaluate": {"suites": {"far": {"names": "held_out"}}, "num_tasks": 4},
        "rollout": {"limits": {"turns": 3}, "temperature": 0.5},
    },
    {"teacher": None, "losses": [{"kind": "policy_gradient", "advantage": "reward"}],
     "rollout": {"samples_per_prompt": 4}},
    {"teacher": None,
     "rewards": [{"kind": "grade"}, {"kind": "length", "free_tokens": 2, "max_tokens": 4}],
     "rollout": {"samples_per_prompt": 4}, "drafts": [{"kind": "choose"}],
     "losses": [{"kind": "preference"}, {"kind": "policy_gradient", "advantage": "reward"}]},
    {"teacher": {"kind": "model", "model": "m"}, "takeover": {"at": 0.5},
     "losses": [{"kind": "cross_entropy", "on": "teacher"}]},
    HINTED
    | {
        "reader": {"kind": "human", "path": "old.jsonl", "max_chars": 50},
        "losses": [
            {"kind": "divergence", "on": "hinted_turns"},
            {"kind": "divergence", "on": "unhinted_turns", "against": "reference", "name": "stay"},
        ],
    },
]  # fmt: skip


def offered(recipe: Recipe) -> Recipe:
    text = hints_recipe(recipe, run=Path("runs/first"), hints=Path("runs/first/hints.jsonl"))
    return parse_recipe(tomllib.loads(text))


@pytest.mark.parametrize("changes", CHANGES)
def test_it_is_valid_for_every_kind_of_run(changes: dict[str, Any]) -> None:
    recipe = make_recipe(**changes)
    result = offered(recipe)
    assert result.student == recipe.student and result.train == recipe.train
    assert result.seed == recipe.seed and result.tasks.kind == "trajectories"
    assert any(loss.on == "hinted_turns" for loss in result.losses)
    for reader in recipe.human_readers:
        assert result.human_readers[0].max_chars == reader.max_chars


@pytest.mark.parametrize(
    "name", [name for name, file in builtin_recipe_files().items() if not is_pipeline(file)]
)
def test_it_is_valid_for_every_built_in_recipe(name: str) -> None:
    recipe = load_recipe(name)
    assert offered(recipe).student == recipe.student


def test_recorded_conversations_stay_the_tasks() -> None:
    recipe = make_recipe(
        tasks={"kind": "conversations", "path": "logs.jsonl"},
        rollout={"student_fraction": 0.0},
        reader={"kind": "rules"},
        teacher={"kind": "self"},
        losses=[{"kind": "divergence", "on": "hinted_turns"}],
    )
    result = offered(recipe)
    assert result.tasks == recipe.tasks and result.human_readers


def test_it_trains(roomy_folder: Path, tmp_path: Path) -> None:
    recipe = small_recipe(
        roomy_folder,
        tasks={"kind": "toolbox", "turns": 2, "num_tools": 2},
        teacher={"kind": "self"},
        train={"steps": 1, "prompts_per_step": 4, "learning_rate": 1e-3},
    )
    run = train(recipe, tmp_path / "run", quiet=True)
    stored = run.trajectories(0)[0].trajectory
    hints = tmp_path / "hints.jsonl"
    turn = stored.hintable_turns[0]
    append_hint(hints, Hint(trajectory=stored.id, turn=turn, text="Call a tool.", source="human"))
    file = tmp_path / "second_run.toml"
    file.write_text(hints_recipe(RunFolder.read(run.path).recipe(), run=run.path, hints=hints))
    second_run = train(file, tmp_path / "second_run", quiet=True)
    (row,) = second_run.metrics()
    assert row["hints/trained"] == 1 and row["tokens/divergence"] > 0
