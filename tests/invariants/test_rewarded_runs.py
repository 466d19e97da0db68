"""Whole runs with rewards: resumed as uninterrupted, and without any signal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.small_runs import small_recipe, train_until_killed

from courtside.api import rescore, train

RL: dict[str, Any] = {"kind": "policy_gradient", "advantage": "reward", "name": "rl"}


def plain(rows: Any) -> Any:
    return [{k: v for k, v in row.items() if "second" not in k} for row in rows]


def test_a_resumed_run_has_the_same_rewards_and_depth(roomy_folder: Path, tmp_path: Path) -> None:
    recipe = small_recipe(
        roomy_folder,
        # A process of its own does not know that tests compute in float32 on every machine.
        student={"model": str(roomy_folder), "dtype": "float32"},
        tasks={"kind": "toolbox", "turns": 3, "num_tools": 2},
        teacher={"kind": "self"},
        rollout={
            "samples_per_prompt": 2, "max_new_tokens": 6,
            "limits": {"turns": {"start": 1, "end": 3, "steps": 2}},
        },
        rewards=[
            {"kind": "grade"},
            {"kind": "length", "free_tokens": 4, "max_tokens": 18},
            {"kind": "reference_kl", "weight": 0.1},
        ],
        losses=[
            {**RL, "group_baseline": "leave_one_out", "zero_variance_groups": "drop",
             "normalize": "constant", "normalize_tokens": 18, "turn_penalty": 0.1},
            {"kind": "divergence", "gate": {"temperature": 2.0}, "normalize": "sequence"},
        ],
        train={"steps": 3, "prompts_per_step": 2, "learning_rate": 1e-3},
        run={"checkpoint_every": 1},
    )  # fmt: skip
    whole = train(recipe, tmp_path / "whole")
    train_until_killed(recipe, tmp_path / "cut", 2)
    cut = train(recipe, tmp_path / "cut")
    rows = plain(whole.metrics())
    assert plain(cut.metrics()) == rows
    assert [row["turn_limit"] for row in rows] == [1, 2, 3]
    assert [row["turns"] for row in rows] == [1, 2, 3]
    assert all(row["reward/length/varied"] >= 0 and 0 < row["divergence/gate"] < 1 for row in rows)
    # Stored rewards are those that were compared.
    assert rescore(tmp_path / "whole")[0]["reward/sum"] == pytest.approx(rows[0]["reward/sum"])


@pytest.mark.parametrize("choice", ["count", "drop"])
def test_steps_in_which_all_samples_fail_alike(
    choice: str, tiny_folder: Path, tmp_path: Path
) -> None:
    """Not an error: they are counted, and no weight changes."""
    recipe = small_recipe(
        tiny_folder,
        tasks={"kind": "arithmetic"},
        losses=[{**RL, "zero_variance_groups": choice}],
        train={"steps": 2, "prompts_per_step": 2, "learning_rate": 1e-3},
    )
    run = train(recipe, tmp_path / "run")
    for row in run.metrics():
        assert row["reward/mean"] == 0 and row["grad_norm"] == 0
        assert row["reward/groups"] == row["reward/zero_variance_groups"] == 2
        assert (row["tokens/rl"] == 0) == (choice == "drop")
    assert any("trained" in alarm["message"] for alarm in run.alarms()) == (choice == "drop")
