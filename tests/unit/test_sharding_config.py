"""What several processes do not train is refused with the field, the reason and the fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.small_runs import small_recipe

from courtside.assemble.sharded import find_sharding_problems, note_idle_ranks
from courtside.ranks import Ranks

HINTS = {
    "tasks": {"kind": "toolbox"},
    "teacher": {"kind": "self", "weights": "live"},
    "losses": [{"kind": "divergence", "on": "hinted_turns"}],
}


@pytest.mark.parametrize(
    ("field", "changes", "from_one_rank"),
    [
        ("train.optimizer_offload", {"train": {"optimizer_offload": True}}, True),
        ("student.lora.base_dtype",
         {"student": {"model": "m", "lora": {"base_dtype": "nf4"}}}, True),
        ("student.router_replay", {"student": {"model": "m", "router_replay": True}}, True),
        ("student.router_aux_loss_coef",
         {"student": {"model": "m", "router_aux_loss_coef": 0.01}}, True),
        ("rollout.mixed_sampling", {"rollout": {"mixed_sampling": {"top_k": 4}}}, False),
        ("reader.control = 'random_hint'",
         {**HINTS, "reader": {"kind": "rules", "control": "random_hint"}}, False),
    ],
)  # fmt: skip
def test_it_is_refused_with_a_fix(field: str, changes: dict[str, Any], from_one_rank: bool) -> None:
    recipe = small_recipe(Path("m"), Path("t"), **changes)
    (problem,) = find_sharding_problems(recipe, 2)
    assert problem.startswith(field) and "train with one process" in problem
    assert bool(list(find_sharding_problems(recipe, 1))) == from_one_rank


def test_what_is_sharded_is_not_refused() -> None:
    assert list(find_sharding_problems(small_recipe(Path("m"), Path("t")), 8)) == []


def test_controls_within_a_trajectory_are_not_refused() -> None:
    for control in ("random_turn", "all_turns"):
        recipe = small_recipe(Path("m"), **HINTS, reader={"kind": "rules", "control": control})
        assert list(find_sharding_problems(recipe, 8)) == []


def test_idle_processes_are_noted() -> None:
    recipe = small_recipe(Path("m"), Path("t"), train={"prompts_per_step": 2})
    ranks = Ranks()
    assert note_idle_ranks(recipe, ranks) is None
    ranks.size = 5
    note = note_idle_ranks(recipe, ranks)
    assert note is not None
    assert "3 of 5 processes have nothing" in note
