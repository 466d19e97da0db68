"""A run with a budget ends with the step that spends it, resumed or not."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from support.small_runs import small_recipe, train_until_killed, without_clocks

from courtside.api import train
from courtside.errors import RecipeError
from courtside.recipe import Recipe
from courtside.report.folder.folder import RunFolder

STEPS = 8


def recipe_with(student: Path, teacher: Path, **settings: Any) -> Recipe:
    base = {"steps": STEPS, "prompts_per_step": 2, "learning_rate": 1e-3}
    return small_recipe(
        student,
        teacher,
        student={"model": str(student), "dtype": "float32"},  # also in a process of its own
        teacher={"kind": "model", "model": str(teacher), "dtype": "float32"},
        train=base | settings,
        evaluate={"num_tasks": 2, "every": 3},
        run={"checkpoint_every": 2},
    )


@pytest.fixture(scope="module")
def whole(
    tiny_folder: Path, tiny_teacher_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> RunFolder:
    """Without a budget."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return train(recipe_with(tiny_folder, tiny_teacher_folder), folder, quiet=True)


@pytest.mark.parametrize("unit", ["student_tokens", "teacher_tokens", "flops"])
def test_a_run_ends_with_the_step_that_spends_its_budget(
    whole: RunFolder, tiny_folder: Path, tiny_teacher_folder: Path, tmp_path: Path, unit: str
) -> None:
    totals = list(accumulate(row[f"cost/{unit}"] for row in whole.metrics()))
    for limit, num_steps in ((totals[4], 5), (totals[4] + 1, 6), (totals[0] // 2, 1)):
        recipe = recipe_with(tiny_folder, tiny_teacher_folder, **{f"max_{unit}": limit})
        run = train(recipe, tmp_path / f"{num_steps}", quiet=True)
        assert without_clocks(run) == without_clocks(whole)[:num_steps]
        students = [(e.step, e.split) for e in run.evaluations() if e.policy == "student"]
        # The last step is tested, and ends the curve on validation tasks.
        assert (num_steps, "test") in students and (num_steps, "validation") in students
        assert (run.checkpoints / f"step-{num_steps:06d}").is_dir()
        assert f"train.max_{unit}: " in (run.path / "report.html").read_text()


def test_seconds_end_a_run(tiny_folder: Path, tiny_teacher_folder: Path, tmp_path: Path) -> None:
    recipe = recipe_with(tiny_folder, tiny_teacher_folder, max_seconds=1e-6)
    assert len(train(recipe, tmp_path / "run", quiet=True).metrics()) == 1


def test_a_killed_run_ends_where_an_uninterrupted_one_does(
    whole: RunFolder, tiny_folder: Path, tiny_teacher_folder: Path, tmp_path: Path
) -> None:
    limit = sum(row["cost/student_tokens"] for row in whole.metrics()[:5])
    recipe = recipe_with(tiny_folder, tiny_teacher_folder, max_student_tokens=limit)
    unbroken = train(recipe, tmp_path / "unbroken", quiet=True)
    train_until_killed(recipe, tmp_path / "killed", 3)
    resumed = train(recipe, tmp_path / "killed", quiet=True)
    assert without_clocks(resumed) == without_clocks(unbroken)
    scores = [[e.scores for e in run.evaluations()] for run in (resumed, unbroken)]
    assert scores[0] == scores[1]


def test_a_finished_run_stays_and_a_larger_budget_goes_on(
    whole: RunFolder,
    tiny_folder: Path,
    tiny_teacher_folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    totals = list(accumulate(row["cost/flops"] for row in whole.metrics()))
    first = recipe_with(tiny_folder, tiny_teacher_folder, max_flops=totals[1])
    rows = train(first, tmp_path / "run", quiet=True).metrics()
    with caplog.at_level("INFO", logger="courtside"):
        assert train(first, tmp_path / "run", quiet=True).metrics() == rows
    assert "are spent; nothing to train" in caplog.text
    larger = recipe_with(tiny_folder, tiny_teacher_folder, max_flops=totals[3])
    assert without_clocks(train(larger, tmp_path / "run", quiet=True)) == without_clocks(whole)[:4]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_flops": 1e9, "lr_schedule": "cosine"}, "reaches zero at train.steps"),
        ({"max_student_tokens": 0}, "train.max_student_tokens: must be greater than 0"),
    ],
)
def test_budgets_that_cannot_work_are_refused(
    tiny_folder: Path, tiny_teacher_folder: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe_with(tiny_folder, tiny_teacher_folder, **settings)


def test_teacher_tokens_need_a_teacher(tiny_folder: Path) -> None:
    with pytest.raises(RecipeError, match="no teacher, no reference"):
        small_recipe(
            tiny_folder,
            train={"max_teacher_tokens": 5},
            losses=[{"kind": "policy_gradient", "advantage": "reward"}],
        )
