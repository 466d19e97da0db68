"""A suite with a kind of its own is answered as if it were the recipe's own tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.small_runs import small_recipe, write_jsonl

from courtside.api import train
from courtside.assemble import assemble
from courtside.assemble.rollouts import find_max_turns

ARITHMETIC = {"kind": "arithmetic", "digits": 1}
TOOLBOX = {"kind": "toolbox", "turns": 2, "num_tools": 1, "tool_call_format": "plain"}
REWARD = [{"kind": "policy_gradient", "advantage": "reward"}]


def parts_of(model: Path, tasks: Any, **suites: Any) -> Any:
    return assemble(
        small_recipe(
            model,
            tasks=tasks,
            losses=REWARD,
            rollout={"samples_per_prompt": 2, "max_new_tokens": 5},
            evaluate={"num_tasks": 3, "suites": suites},
        )
    )


@pytest.mark.parametrize(("tasks", "suite"), [(ARITHMETIC, TOOLBOX), (TOOLBOX, ARITHMETIC)])
def test_answers_are_those_of_the_tasks_alone(tasks: Any, suite: Any, roomy_folder: Path) -> None:
    mixed = parts_of(roomy_folder, tasks, other=suite)
    results = mixed.evaluator.evaluate_suites("test", ["student", "student:other"], step=0)
    for policy, config in (("student", tasks), ("student:other", suite)):
        alone = parts_of(roomy_folder, config).evaluator.evaluate("test", step=0)
        answers = results[policy]
        assert [t.token_ids for t in answers.trajectories] == [
            t.token_ids for t in alone.trajectories
        ]
        assert answers.evaluation.scores == alone.evaluation.scores
        assert ("error_rate" in answers.evaluation.metrics) == (config is TOOLBOX)


def test_a_suite_of_its_own_kind_inherits_nothing(roomy_folder: Path) -> None:
    recipe = parts_of(roomy_folder, TOOLBOX | {"limit": 2}, other=TOOLBOX | {"turns": 7}).recipe
    assert recipe.suite_tasks("other").limit is None
    assert find_max_turns(recipe) == 7
    changed = parts_of(roomy_folder, TOOLBOX | {"limit": 2}, other={"turns": 5}).recipe
    assert changed.suite_tasks("other").limit == 2 and find_max_turns(changed) == 5


def test_a_teacher_does_not_score_a_suite_whose_fields_it_does_not_know(
    roomy_folder: Path,
) -> None:
    """Its context names a field that only the recipe's own tasks have."""
    recipe = small_recipe(
        roomy_folder,
        tasks={"kind": "instructions", "instruction_in_prompt": False},
        teacher={"kind": "self", "weights": "live", "context": {"kind": "field", "field": "rule"}},
        rollout={"samples_per_prompt": 1, "max_new_tokens": 4},
        evaluate={"num_tasks": 2, "suites": {"sums": ARITHMETIC}},
    )
    results = assemble(recipe).evaluator.evaluate_suites(
        "test", ["student", "student:sums"], step=0
    )
    assert "kl_estimate" in results["student"].evaluation.metrics
    assert "kl_estimate" not in results["student:sums"].evaluation.metrics


def test_few_prompts_are_evaluated_next_to_held_out_ones(tiny_folder: Path, tmp_path: Path) -> None:
    """A prompt that is trained over and over is memorized: its completion becomes likelier."""
    rows = [
        {"prompt": f"say {n}", "completion": f"{n}" * 6, "split": split, "grader": "contains",
         "answer": f"{n}"}
        for n, split in enumerate(["train", "train", "train", "test", "test"])
    ]  # fmt: skip
    recipe = small_recipe(
        tiny_folder,
        tasks={"kind": "jsonl", "path": str(write_jsonl(tmp_path / "t.jsonl", rows)), "limit": 1},
        rollout={"student_fraction": 0, "max_new_tokens": 4},
        losses=[{"kind": "cross_entropy", "on": "dataset"}],
        train={"steps": 8, "prompts_per_step": 1, "learning_rate": 1e-2},
        evaluate={"num_tasks": 4},
    )
    run = train(recipe, tmp_path / "run", quiet=True)
    logps = {(e.split, e.step): e.metrics["completion_logp"] for e in run.evaluations()}
    assert logps.keys() == {(split, n) for split in ("train", "test") for n in (0, 8)}
    sizes = {e.split: len(e.scores) for e in run.evaluations()}
    assert sizes == {"train": 1, "test": 2}
    gains = {split: logps[split, 8] - logps[split, 0] for split in sizes}
    assert gains["train"] > gains["test"] + 0.5
    first_loss = run.metrics()[0]["loss"]
    assert logps["train", 0] == pytest.approx(-first_loss, rel=1e-4)
    assert "trained prompts" in (run.path / "report.html").read_text()
