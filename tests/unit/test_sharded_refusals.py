"""What several processes do not train: the field, the reason and the fix."""

from __future__ import annotations

from typing import Any

import pytest
from support.small_runs import small_tree

from courtside.assemble.sharded import find_sharding_problems, note_idle_ranks
from courtside.ranks import Ranks
from courtside.recipe.load import parse_recipe

HINTS = {
    "tasks": {"kind": "toolbox"},
    "teacher": {"kind": "self", "weights": "live"},
    "losses": [{"kind": "divergence", "on": "hinted_turns"}],
}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"train": {"optimizer_offload": True}}, "train.optimizer_offload"),
        ({"rollout": {"mixed_sampling": {"top_k": 20}}}, "rollout.mixed_sampling"),
        (HINTS | {"reader": {"kind": "rules", "control": "random_hint"}}, "reader.control"),
    ],
)
def test_refusals_name_field_reason_and_fix(changes: dict[str, Any], field: str) -> None:
    teacher = None if "teacher" in changes else "another"
    recipe = parse_recipe(small_tree("student", teacher, **changes))
    (problem,) = find_sharding_problems(recipe, 2)
    assert problem.startswith(field)
    assert problem.endswith("train with one process")


def test_ordinary_recipes_and_controls_within_a_trajectory_are_not_refused() -> None:
    for reader in ({"kind": "rules"}, {"kind": "rules", "control": "random_turn"}):
        recipe = parse_recipe(small_tree("student", **HINTS, reader=reader))
        assert list(find_sharding_problems(recipe, 8)) == []


def test_idle_processes_are_noted() -> None:
    recipe = parse_recipe(small_tree("student", "another", train={"prompts_per_step": 2}))
    ranks = Ranks()
    assert note_idle_ranks(recipe, ranks) is None
    ranks.size = 5
    note = note_idle_ranks(recipe, ranks)
    assert note is not None
    assert "3 of 5 processes have nothing" in note
