"""What several processes do not train is refused with the field, the reason and the fix."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_runs import small_recipe

from courtside.assemble.sharded import find_sharding_problems, note_idle_ranks, shards_model
from courtside.ranks import ALONE, ProcessGroupRanks, Ranks


@pytest.mark.parametrize(
    ("field", "changes", "from_one_rank"),
    [
        ("train.optimizer_offload", {"train": {"optimizer_offload": True}}, True),
        ("student.lora.base_dtype",
         {"student": {"model": "m", "lora": {"base_dtype": "nf4"}}}, True),
        ("sharding.teachers = 'shards': teacher.model = 't' has dtype = 'int8'",
         {"sharding": {"teachers": "shards"},
          "teacher": {"kind": "model", "model": "t", "dtype": "int8"}}, True),
        ("sharding.teachers = 'shards': no model of this recipe",
         {"sharding": {"teachers": "shards"}, "student": {"model": "m", "lora": {"rank": 2}},
          "teacher": {"kind": "self", "weights": "frozen", "context": {
              "kind": "system", "text": "x"}}}, True),
        ("rollout.server.weight_transfer = 'nccl'", {"rollout": {"server": {
            "urls": ["http://127.0.0.1:1"], "model": "m", "weight_transfer": "nccl"}}}, False),
        ("rollout.mixed_sampling", {"rollout": {"mixed_sampling": {"top_k": 4}}}, False),
    ],
)  # fmt: skip
def test_it_is_refused_with_a_fix(field: str, changes: dict[str, Any], from_one_rank: bool) -> None:
    recipe = small_recipe(Path("m"), Path("t"), **changes)
    (problem,) = find_sharding_problems(recipe, 2)
    assert problem.startswith(field) and "train with one process" in problem
    assert bool(list(find_sharding_problems(recipe, 1))) == from_one_rank


def test_what_is_sharded_is_not_refused() -> None:
    assert list(find_sharding_problems(small_recipe(Path("m"), Path("t")), 8)) == []


def test_which_models_are_in_shards() -> None:
    small, large = (torch.nn.Linear(n, 10**6, bias=False, device="meta") for n in (4999, 5001))
    ranks = ProcessGroupRanks.__new__(ProcessGroupRanks)  # as a launcher makes it, unconnected

    def sharded(choice: str, num_ranks: int) -> list[bool]:
        ranks.size = num_ranks
        recipe = small_recipe(Path("m"), Path("t"), sharding={"teachers": choice})
        return [shards_model(recipe, ranks, model) for model in (small, large)]

    assert sharded("auto", 2) == [False, True], "more than 20 GB"
    assert sharded("auto", 1) == [False, False], "a launcher's only process"
    assert sharded("whole", 2) == [False, False]
    assert sharded("shards", 2) == sharded("shards", 1) == [True, True]
    recipe = small_recipe(Path("m"), Path("t"), sharding={"teachers": "shards"})
    assert not shards_model(recipe, ALONE, large), "without a launcher"


def test_idle_processes_are_noted() -> None:
    recipe = small_recipe(Path("m"), Path("t"), train={"prompts_per_step": 2})
    ranks = Ranks()
    assert note_idle_ranks(recipe, ranks) is None
    ranks.size = 5
    note = note_idle_ranks(recipe, ranks)
    assert note is not None
    assert "3 of 5 processes have nothing" in note


def test_an_error_that_is_caught_leaves_no_rank_apart() -> None:
    """As those of probes are, on all ranks. One that ends the run leaves it so."""
    ranks = object.__new__(ProcessGroupRanks)
    ranks._num_apart = 0
    with suppress(ValueError), ranks.work_apart():
        raise ValueError
    assert ranks.is_apart
    with ranks.work_apart():
        with ranks.work_apart():
            pass
        assert ranks.is_apart, "the outer block goes on"
    assert not ranks.is_apart
