"""Finished runs side by side: arms, paired differences, costs, scores at equal budgets."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import courtside
from courtside.cli.app import app
from courtside.comparison.budgets import interpolate
from courtside.comparison.formats import format_p
from courtside.errors import UserError
from courtside.evaluate.intervals import paired_difference
from courtside.experiment.statistics import estimate_mean, estimate_paired
from courtside.report.folder.folder import RunFolder

SEEDS = (0, 1, 2)


def scores_of(path: Path, step: int, split: str = "test") -> dict[str, float]:
    evaluations = RunFolder.read(path).evaluations()
    (scores,) = [
        e.scores for e in evaluations if (e.step, e.split, e.policy) == (step, split, "student")
    ]
    return dict(scores)


def rewrite_rows(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        change(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def copy_runs(runs: Path, to: Path, *names: str) -> list[Path]:
    for name in names:
        shutil.copytree(runs / name, to / name)
    return [to / name for name in names]


# ── arms and differences ─────────────────────────────────────────────────────────────────────────


def test_runs_of_a_recipe_with_other_seeds_are_an_arm(runs: Path) -> None:
    comparison = courtside.compare([runs])
    assert [(arm.name, arm.seeds) for arm in comparison.arms] == [
        ("rewarded", SEEDS),
        ("taught", SEEDS),
    ]
    for arm in comparison.arms:
        before, after = (
            [np.mean(list(scores_of(Path(run), step).values())) for run in arm.runs]
            for step in (0, 4)
        )
        assert arm.after.mean == pytest.approx(np.mean(after))
        low, high = estimate_mean([float(x) for x in after]).interval()
        assert (arm.after.low, arm.after.high) == pytest.approx((max(0, low), min(1, high)))
        assert arm.gain is not None
        assert arm.gain.mean == pytest.approx(np.mean(np.subtract(after, before)))
    assert any(line.startswith("losses[0].kind") for line in comparison.arms[1].settings)
    assert not comparison.notes


def test_arms_are_paired_by_seed_and_the_interval_covers_the_tasks(runs: Path) -> None:
    (difference,) = courtside.compare([runs]).differences
    scores = {
        arm: [scores_of(runs / f"{arm}-seed{seed}", 4) for seed in SEEDS]
        for arm in ("rewarded", "taught")
    }
    means = {arm: [float(np.mean(list(s.values()))) for s in rows] for arm, rows in scores.items()}
    expected = estimate_paired(means["rewarded"], means["taught"])
    assert (difference.first, difference.other) == ("rewarded", "taught")
    assert difference.interval.mean == pytest.approx(expected.mean)
    assert (difference.pairing, difference.interval.num_seeds) == ("seeds", 3)
    assert difference.interval.method == "seeds and tasks"
    low, high = expected.interval()
    assert difference.interval.low <= low + 1e-12 and difference.interval.high >= high - 1e-12


def test_one_seed_is_paired_by_task(runs: Path) -> None:
    pair = [runs / "taught-seed1", runs / "rewarded-seed1"]
    comparison = courtside.compare(pair)
    (difference,) = comparison.differences
    mean, low, high, p_value = paired_difference(*(scores_of(p, 4) for p in reversed(pair)))
    assert (difference.first, difference.pairing) == ("taught", "tasks")
    interval = difference.interval
    assert (interval.mean, interval.low, interval.high) == pytest.approx((mean, low, high))
    assert difference.p_value == p_value and interval.method == "tasks"
    assert any("nothing about other seeds" in note for note in comparison.notes)


def test_one_shared_seed_is_the_one_that_is_paired(runs: Path) -> None:
    taught = [runs / f"taught-seed{seed}" for seed in SEEDS]
    (difference,) = courtside.compare([*taught, runs / "rewarded-seed1"]).differences
    mean, low, high, _ = paired_difference(
        scores_of(runs / "rewarded-seed1", 4), scores_of(runs / "taught-seed1", 4)
    )
    interval = difference.interval
    assert difference.pairing == "tasks"
    assert (interval.mean, interval.low, interval.high) == pytest.approx((mean, low, high))


def test_arms_without_a_shared_seed_are_not_paired(runs: Path, tmp_path: Path) -> None:
    paths = [runs / f"taught-seed{seed}" for seed in SEEDS]
    for seed in SEEDS:
        (copy,) = copy_runs(runs, tmp_path, f"rewarded-seed{seed}")
        text = (copy / "recipe.toml").read_text()
        assert f"seed = {seed}\n" in text
        (copy / "recipe.toml").write_text(text.replace(f"seed = {seed}\n", f"seed = {seed + 7}\n"))
        paths.append(copy)
    (difference,) = courtside.compare(paths).differences
    assert (difference.pairing, difference.interval.num_seeds) == ("none", 3)


def test_the_same_arm_and_seed_twice_is_refused(runs: Path, tmp_path: Path) -> None:
    (copy,) = copy_runs(runs, tmp_path, "taught-seed0")
    with pytest.raises(UserError, match="the same recipe with the same seed 0"):
        courtside.compare([runs, copy])


# ── tasks ────────────────────────────────────────────────────────────────────────────────────────


def test_runs_without_a_task_in_common_are_refused(runs: Path, tmp_path: Path) -> None:
    (other,) = copy_runs(runs, tmp_path, "taught-seed0")

    def rename(row: dict[str, Any]) -> None:
        row["scores"] = {f"other-{task}": score for task, score in row["scores"].items()}

    rewrite_rows(other / "evaluations.jsonl", rename)
    with pytest.raises(UserError, match="no test task in common"):
        courtside.compare([runs / "rewarded-seed0", other])


def test_runs_that_share_tasks_are_compared_on_those(runs: Path, tmp_path: Path) -> None:
    (other,) = copy_runs(runs, tmp_path, "taught-seed0")
    whole = scores_of(other, 4)
    dropped = sorted(whole)[:5]

    def drop(row: dict[str, Any]) -> None:
        row["scores"] = {t: s for t, s in row["scores"].items() if t not in dropped}

    rewrite_rows(other / "evaluations.jsonl", drop)
    comparison = courtside.compare([runs / "rewarded-seed0", other])
    assert len(comparison.tasks.ids) == 7 and comparison.tasks.num_dropped == 5
    assert "7 tasks that all of them answered; 5 others" in comparison.notes[0]
    scores = scores_of(runs / "rewarded-seed0", 4)
    expected = np.mean([s for task, s in scores.items() if task not in dropped])
    assert comparison.arms[0].after.mean == pytest.approx(expected)
    page = comparison.write_html(tmp_path / "page.html").read_text()
    assert "7 tasks that all of them answered" in page


def test_a_run_without_an_evaluation_after_training_is_refused(runs: Path, tmp_path: Path) -> None:
    (other,) = copy_runs(runs, tmp_path, "taught-seed0")
    lines = (other / "evaluations.jsonl").read_text().splitlines()
    first = [line for line in lines if json.loads(line)["step"] == 0]
    (other / "evaluations.jsonl").write_text("\n".join(first) + "\n")
    with pytest.raises(UserError, match="no evaluation of the student after training"):
        courtside.compare([runs / "rewarded-seed0", other])


# ── costs and budgets ────────────────────────────────────────────────────────────────────────────


def test_what_was_spent_is_what_the_phases_cost(runs: Path) -> None:
    phases = ("rollout", "drafts", "reader", "teacher", "update")
    for arm in courtside.compare([runs], price_per_hour=3.6).arms:
        costs = [
            {phase: cost for phase, cost in RunFolder.read(run).read_costs().items()}
            for run in arm.runs
        ]
        student = [
            c["rollout"].input_tokens + c["rollout"].output_tokens + c["update"].input_tokens
            for c in costs
        ]
        assert arm.spent["student_tokens"] == np.mean(student)
        teacher = [c["teacher"].input_tokens for c in costs]
        assert arm.spent["teacher_tokens"] == np.mean(teacher)
        assert (min(teacher) > 0) == (arm.name == "taught")
        flops = [sum(c[phase].flops for phase in phases if phase in c) for c in costs]
        assert arm.spent["flops"] == pytest.approx(np.mean(flops))
        seconds = np.mean([sum(c[p].seconds for p in phases if p in c) for c in costs])
        assert arm.spent["seconds"] == pytest.approx(seconds)
        assert arm.spent["money"] == pytest.approx(seconds / 1000)
        assert arm.spent["steps"] == 4
        assert arm.gain is not None
        for unit, value in arm.per_point.items():
            spent = arm.spent[unit]
            assert spent is not None
            expected = spent / (100 * arm.gain.mean) if arm.gain.mean > 0 else None
            assert value == (None if expected is None else pytest.approx(expected))


def test_runs_that_measured_no_tokens_say_so(runs: Path, tmp_path: Path) -> None:
    names = [f"taught-seed{seed}" for seed in SEEDS]
    for path in copy_runs(runs, tmp_path, *names):
        rewrite_rows(
            path / "metrics.jsonl",
            lambda row: [row.pop(key) for key in [*row] if key.startswith("cost/")],
        )
    comparison = courtside.compare([tmp_path, *(runs / f"rewarded-seed{s}" for s in SEEDS)])
    spent = comparison.arms[0].spent
    assert spent["student_tokens"] is None and spent["money"] is None
    assert spent["flops"] == pytest.approx(courtside.compare([runs]).arms[1].spent["flops"])
    assert {budget.unit for budget in comparison.budgets} == {"steps", "seconds"}
    page = comparison.write_html(tmp_path / "page.html").read_text()
    assert "student tokens: not measured in taught" in page
    assert "No common budget of student tokens, teacher tokens, FLOPs" in page


def test_interpolation_is_linear_and_ends_with_the_measured_range() -> None:
    rng = np.random.default_rng(0)
    for num_points in (1, 2, 3, 6):
        xs = np.sort(rng.choice(50, size=num_points, replace=False)).astype(float)
        ys = rng.uniform(size=num_points)
        points = [(float(x), float(y)) for x, y in zip(xs, ys, strict=True)]
        for x in [*xs, *rng.uniform(-5, 60, size=40)]:
            value = interpolate(points, float(x))
            if xs[0] <= x <= xs[-1]:
                assert value == pytest.approx(np.interp(x, xs, ys))
            else:
                assert value is None


def test_budgets_that_stand_still_take_the_later_score() -> None:
    assert interpolate([(0.0, 0.1), (5.0, 0.2), (5.0, 0.4), (6.0, 0.5)], 5.0) == 0.2
    assert interpolate([(0.0, 0.1), (0.0, 0.4)], 0.0) == 0.4


def test_scores_at_a_budget_are_means_of_interpolated_curves(runs: Path) -> None:
    comparison = courtside.compare([runs])
    units = {budget.unit for budget in comparison.budgets}
    assert units == {"steps", "student_tokens", "flops", "seconds"}, "one arm has no teacher"
    for budget in comparison.budgets:
        if budget.unit != "student_tokens":
            continue
        values = []
        for seed in SEEDS:
            folder = RunFolder.read(runs / f"taught-seed{seed}")
            rows = [row["cost/student_tokens"] for row in folder.metrics()]
            xs = [sum(rows[:step]) for step in (0, 2, 4)]
            ys = [
                np.mean(list(scores_of(folder.path, step, "validation").values()))
                for step in (0, 2, 4)
            ]
            values.append(np.interp(budget.budget, xs, ys))
        score = budget.scores["taught"]
        assert score is not None and score.mean == pytest.approx(np.mean(values))
        difference = budget.differences["rewarded minus taught"]
        other = budget.scores["rewarded"]
        assert difference is not None and other is not None
        assert difference.mean == pytest.approx(other.mean - score.mean)
    largest = max(b.budget for b in comparison.budgets if b.unit == "student_tokens")
    totals = [
        sum(row["cost/student_tokens"] for row in RunFolder.read(path).metrics())
        for path in runs.iterdir()
    ]
    assert largest == min(totals)


# ── what comes out ───────────────────────────────────────────────────────────────────────────────


def test_frames_have_a_row_for_each_record(runs: Path) -> None:
    comparison = courtside.compare([runs])
    assert list(comparison.arms_frame()["arm"]) == ["rewarded", "taught"]
    assert list(comparison.differences_frame()["mean"]) == [comparison.differences[0].interval.mean]
    curves = comparison.curves_frame()
    assert list(curves["step"]) == [0, 2, 4] * 2
    assert list(comparison.budgets_frame()["arm"][:2]) == ["rewarded", "taught"]
    json.dumps(comparison.to_dict())


def test_an_experiment_compares_its_final_runs(runs: Path, tmp_path: Path) -> None:
    names = [path.name for path in runs.iterdir()]
    copy_runs(runs, tmp_path, *names)
    arms = {"teacher-short": ["taught-seed0", "taught-seed1"], "reward-short": ["rewarded-seed0"]}
    (tmp_path / "arms.json").write_text(json.dumps(arms))
    comparison = courtside.compare([tmp_path])
    assert {arm.name: arm.seeds for arm in comparison.arms} == {
        "teacher-short": (0, 1),
        "reward-short": (0,),
    }
    only = courtside.compare([tmp_path], only="^teacher")
    assert [arm.name for arm in only.arms] == ["teacher-short"] and not only.differences
    with pytest.raises(UserError, match="matches none of teacher-short, reward-short"):
        courtside.compare([tmp_path], only="x")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: no such folder"),
        (["EMPTY"], "has no finished run"),
        (["PIPELINE"], "no stage of this pipeline has begun"),
        (["FILE"], "results.json has no scores by task"),
        (["RUNS", "--price-per-hour", "0"], "price_per_hour = 0.0; give a number above 0"),
        (["RUNS", "--only", "("], "no regular expression"),
    ],
)
def test_what_cannot_be_compared_ends_with_2(
    runs: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    pipeline = tmp_path / "others" / "pipeline"
    pipeline.mkdir(parents=True)
    (pipeline / "pipeline.json").write_text("{}")
    places = {"RUNS": str(runs), "EMPTY": str(tmp_path), "FILE": __file__}
    places["PIPELINE"] = str(pipeline)
    command = ["compare", *(places.get(word, word) for word in arguments)]
    result = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "page.html")])
    assert result.exit_code == 2 and message in result.output
    with pytest.raises(UserError, match="give a list of run folders"):
        courtside.compare(str(runs))  # type: ignore[arg-type]


def test_the_command_prints_tables_or_json(runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "pages" / "compare.html"
    result = CliRunner().invoke(app, ["compare", str(runs), "--out", str(page)])
    assert result.exit_code == 0, result.output
    assert "rewarded minus taught" in result.output and page.is_file()
    assert "money" not in result.output
    result = CliRunner().invoke(
        app, ["compare", str(runs), "--out", str(page), "--json", "--price-per-hour", "2"]
    )
    tree = json.loads(result.stdout)
    assert [arm["name"] for arm in tree["arms"]] == ["rewarded", "taught"]
    assert tree["arms"][0]["spent"]["money"] > 0


def test_small_p_values_are_no_zeros() -> None:
    assert [format_p(p) for p in (0.0, 3e-7, 1e-4, 0.0123, 1.0)] == [
        "<0.0001", "<0.0001", "0.0001", "0.012", "1",
    ]  # fmt: skip
