"""Contrasts that a plan fixes: pairing, episodes, Holm over the whole plan, verdicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from courtside.api import train
from courtside.errors import UserError
from courtside.experiment.arms import read_stored_arm
from courtside.experiment.contrasts import (
    ArmRuns,
    Design,
    compare_arms,
    compare_fixed,
    explore,
    is_better,
    judge,
    measure_of,
    verdict,
)
from courtside.experiment.episode_counts import (
    count_errors,
    resample_weights,
    resampled_rates,
    split_measure,
    variance_of_test_set,
)
from courtside.experiment.outcomes import error_by_side, measure_run, measures, steps_to_half
from courtside.experiment.plan import describe_design, read_plan
from courtside.experiment.schedule import list_recipes, make_job
from courtside.experiment.statistics import detectable_effect, estimate_paired
from courtside.experiment.task_check import check_tasks
from courtside.recipe.load import load_recipe

ROOT = Path(__file__).resolve().parents[3]


def arm(errors: dict[int, float], **more: dict[int, float]) -> ArmRuns:
    """Runs with that error rate by seed."""
    measures = {seed: {"error_rate_after": value} for seed, value in errors.items()}
    for name, values in more.items():
        for seed, value in values.items():
            measures[seed][f"{name}_after"] = value
    return ArmRuns(measures=measures, episodes={})


def test_arms_are_paired_over_the_seeds_that_both_have() -> None:
    first, other = arm({0: 0.1, 1: 0.3, 2: 0.2, 3: 0.9}), arm({2: 0.3, 0: 0.15, 1: 0.38})
    row = compare_arms(first, other, "error_rate")
    assert row is not None and (row["method"], row["seeds"]) == ("paired", 3)
    expected = estimate_paired([0.1, 0.3, 0.2], [0.15, 0.38, 0.3])
    assert (row["mean"], (row["low"], row["high"])) == (expected.mean, expected.interval())
    assert row["variance"] == "seeds only", "no counts of episodes are stored"
    # Other seeds: by Welch. One seed: nothing.
    row = compare_arms(first, arm({4: 0.1, 5: 0.3}), "error_rate")
    assert row is not None and (row["method"], row["seeds"]) == ("welch", 2)
    assert compare_arms(first, arm({4: 0.1}), "error_rate") is None
    assert compare_arms(first, other, "kl_estimate") is None
    unpaired = ArmRuns(measures=other.measures, episodes={}, is_pairable=False)
    row = compare_arms(first, unpaired, "error_rate")
    assert row is not None and (row["method"], row["seeds"]) == ("welch", 3)


def test_holm_counts_what_is_planned_and_not_yet_run() -> None:
    design = Design(
        pairs=(("a", "b"), ("a", "c"), ("a", "d")), outcomes={"error_rate": 0.1, "score": 0.1}
    )
    variants = {"a": ["x", "y"], "b": ["x", "y"], "c": ["x", "y"], "d": ["y"]}
    assert design.num_tests(variants) == 2 + 2 + 1
    arms = {
        "a": arm({0: 0.10, 1: 0.11, 2: 0.12, 3: 0.13, 4: 0.14}),
        "b": arm({0: 0.20, 1: 0.212, 2: 0.223, 3: 0.229, 4: 0.24}),
        "c": arm({0: 0.10, 1: 0.15, 2: 0.10, 3: 0.15, 4: 0.12}),
    }
    rows = compare_fixed(arms, design)
    assert [row["contrast"] for row in rows] == ["a minus b", "a minus c"], "d has no run yet"
    judge(rows, design, 5)
    assert rows[0]["p_holm"] == pytest.approx(5 * rows[0]["p"])
    assert rows[1]["p_holm"] == pytest.approx(min(1.0, 4 * rows[1]["p"]))
    assert [row["verdict"] for row in rows] == ["better", "not decided"], "fewer errors are better"
    sd = float(np.std([-0.10, -0.102, -0.103, -0.099, -0.10], ddof=1))
    assert rows[0]["detectable"] == pytest.approx(detectable_effect(sd, 5, 5))
    json.dumps(rows)


def test_verdicts() -> None:
    def row(outcome: str, mean: float, variance: str = "with episodes") -> dict[str, Any]:
        return {"outcome": outcome, "mean": mean, "variance": variance}

    assert verdict(row("error_rate", -0.1), 0.01, 1.0) == "better"
    assert verdict(row("error_rate", 0.1), 0.01, 1.0) == "worse"
    assert verdict(row("held_out/score", 0.1), 0.01, 1.0) == "better"
    assert verdict(row("score", 0.001), 0.6, 0.01) == "equivalent"
    assert verdict(row("score", 0.001), 0.6, 0.06) == "not decided"
    assert verdict(row("score", 0.001, "seeds only"), 0.6, 0.01) == "not decided"
    assert is_better("kl_estimate", -1.0) and not is_better("decisions/habit_right", 1.0)
    assert measure_of("score") == "after" and measure_of("held_out/score") == "held_out/after"
    assert measure_of("training/decisions/x") == "training/decisions/x_after"


def test_exploratory_differences_leave_out_the_fixed_ones() -> None:
    design = Design(pairs=(("b", "a"),), outcomes={"error_rate": 0.1})
    arms = {name: arm({0: 0.1, 1: 0.2}, kl_estimate={0: 1.0, 1: 2.0}) for name in ("a", "b", "c")}
    rows = explore(arms, design)
    assert {name: [*row] for name, row in rows.items()} == {
        "b minus a": ["kl_estimate"],
        "b minus c": ["error_rate", "kl_estimate"],
    }


# ── test episodes ────────────────────────────────────────────────────────────────────────────────


def turn(decision: str | None, *events: str, role: str = "assistant") -> dict[str, Any]:
    return {"role": role, "decision": decision, "events": [{"kind": kind} for kind in events]}


def test_counts_give_the_measures_back() -> None:
    episodes = [
        {"task": "a", "stop": "end", "grade_score": 0.5, "turns": [
            turn(None, role="environment"), turn("date/wrong", "date"), turn("date/wrong"),
            turn("talk/wrong", "talk", "date")]},
        {"task": "b", "stop": "end", "grade_score": 1, "turns": [
            turn("date/wrong"), turn("date/right", "x"), turn(None)]},
        {"task": "c", "stop": "fault", "grade_score": None, "turns": [turn("date/wrong", "x")]},
    ]  # fmt: skip
    counts = count_errors(episodes)
    assert counts["decisions/date/wrong"] == ["1 0", "2 1"]
    assert counts["error_rate"] == ["2 1", "3 3"] and counts["score"] == ["0.5 1", "1 1"]
    once, second = np.ones((1, 2)), np.array([[0.0, 3.0]])
    assert resampled_rates(counts, "decisions/wrong", once)[0] == pytest.approx((1 / 3 + 1) / 2)
    assert resampled_rates(counts, "error_rate", once)[0] == pytest.approx((2 / 3 + 1 / 3) / 2)
    assert resampled_rates(counts, "error_rate", second)[0] == pytest.approx(1 / 3)
    assert resampled_rates(counts, "score", once)[0] == 0.75
    assert split_measure("held_out/decisions/wrong") == ("held_out", "decisions/wrong")
    assert split_measure("held_out/error_rate") == ("held_out", "error_rate")


def counts_of(errors_E: Any, tasks: str = "same") -> dict[str, Any]:
    text = " ".join(f"{x:.6f}" for x in errors_E)
    return {"": {"tasks": tasks, "score": [text, " ".join("1" for _ in errors_E)]}}


def test_the_variance_of_a_shared_test_set_is_that_of_the_crossed_design() -> None:
    """Against the closed form: the episodes' mean square over seeds, less that within them."""
    rng = np.random.default_rng(0)
    gaps_SE = rng.normal(size=(4, 50)) * 0.1 + rng.normal(size=50)
    zero = [counts_of(np.zeros(50))] * 4
    added = variance_of_test_set([counts_of(g) for g in gaps_SE], zero, "score", is_paired=True)
    assert added is not None and added[1] == 49
    joint = gaps_SE.mean(0).var() / 50
    within = gaps_SE.var(axis=1).sum() / 50 / 16
    assert added[0] == pytest.approx((joint - within) * 4 / 3, rel=0.1)
    other = [counts_of(np.zeros(50), tasks="other")] * 4
    assert (
        variance_of_test_set([counts_of(g) for g in gaps_SE], other, "score", is_paired=True)
        is None
    ), "of other episodes"


def test_runs_with_other_tasks_are_not_paired() -> None:
    measures = {seed: {"after": 0.1 * seed} for seed in range(3)}
    same, other = (
        ArmRuns(measures=measures, episodes={s: counts_of([0.0, 1.0], tasks) for s in range(3)})
        for tasks in ("same", "other")
    )
    rows = [compare_arms(same, arm, "score") for arm in (same, other)]
    assert [row and row["method"] for row in rows] == ["paired", "welch"]
    assert [row and row["variance"] for row in rows] == ["with episodes", "seeds only"]


def test_intervals_with_episodes_cover_what_those_over_seeds_alone_do_not() -> None:
    rng = np.random.default_rng(5)
    covered = {"seeds": 0, "episodes": 0}
    num_studies, num_seeds, num_episodes = 300, 4, 24
    resample_weights(num_episodes)
    for _ in range(num_studies):
        episode_E = rng.normal(0.1, 0.3, size=num_episodes)
        seed_S = rng.normal(0, 0.03, size=num_seeds)
        noise_SE = rng.normal(0, 0.2, size=(num_seeds, num_episodes))
        gaps_SE = episode_E + seed_S[:, None] + noise_SE
        arms = [
            ArmRuns(
                measures={s: {"after": float(values_E.mean())} for s, values_E in enumerate(rows)},
                episodes={s: counts_of(values_E) for s, values_E in enumerate(rows)},
            )
            for rows in (gaps_SE, np.zeros_like(gaps_SE))
        ]
        row = compare_arms(arms[0], arms[1], "score")
        assert row is not None and row["variance"] == "with episodes"
        covered["episodes"] += row["low"] < 0.1 < row["high"]
        low, high = estimate_paired(
            arms[0].values("after", range(num_seeds)), [0.0] * num_seeds
        ).interval()
        covered["seeds"] += low < 0.1 < high
    assert covered["seeds"] / num_studies < 0.88
    assert 0.92 < covered["episodes"] / num_studies < 0.985


def test_counts_of_a_run_are_those_of_its_rates(tmp_path: Path, roomy_folder: Path) -> None:
    overrides = [
        f"student.model={roomy_folder}", "student.adapter=null", "tasks.turns=8", "train.steps=2",
        "train.prompts_per_step=1", "train.warmup_steps=0", "evaluate.num_tasks=16",
        "rollout.max_new_tokens=4", "evaluate.suites.held_out.turns=8", "reader=null",
        "hints=null", "teacher=null", "losses=[{kind='policy_gradient', advantage='reward'}]",
    ]  # fmt: skip
    recipe = load_recipe(ROOT / "recipes/switchboard/hint.toml", overrides)
    run = measure_run(train(recipe, tmp_path / "run").path)
    once = np.ones((1, 16))
    for suite, part in {"": run, **run["suites"]}.items():
        rates = {"score": part["after"], **part["metrics_after"]}
        rates |= error_by_side(part["metrics_after"])
        compared = [n for n in rates if n in ("score", "error_rate") or n.startswith("decisions/")]
        assert {"decisions/habit_wrong", "decisions/habit_right", "decisions/talk/habit_wrong"} < {
            *compared
        }
        for name in compared:
            rate = resampled_rates(run["episodes"][suite], name, once)[0]
            assert rate == pytest.approx(rates[name], abs=1e-4), name
    assert len(json.dumps(run["episodes"])) < 4000
    values = measures(run)
    series = run["training_decisions"]["decisions/habit_wrong"]
    assert values["training/decisions/habit_wrong_after"] == pytest.approx(np.mean(series))
    assert [steps_to_half(s) for s in ([0.8, 0.5, 0.4, 0.1], [0.8, 0.5], [0.0])] == [2, 2, 0]


# ── the plans of the repository ──────────────────────────────────────────────────────────────────

EXPERIMENTS = sorted((ROOT / "recipes").glob("*/experiment.toml"))


@pytest.mark.parametrize("file", EXPERIMENTS, ids=lambda path: path.parent.name)
def test_every_run_of_a_plan_is_a_recipe_and_arms_of_a_seed_share_it(file: Path) -> None:
    plan = read_plan(file, ROOT / "runs")
    assert sum(1 for _ in list_recipes(plan)) >= len(plan.arms)
    check_tasks(plan)
    for planned_arm in plan.arms.values():
        for variant in planned_arm.variants:
            planned = make_job(plan, planned_arm, variant, 1e-5, planned_arm.seeds[-1])
            recipe = load_recipe(planned.recipe, planned.overrides)
            assert recipe.seed == planned_arm.seeds[-1]
    for first, other in plan.design.pairs:
        assert plan.arms[first].seeds == plan.arms[other].seeds, "paired"


def test_the_plan_tells_what_its_seeds_can_show() -> None:
    plan = read_plan(ROOT / "recipes/switchboard/experiment.toml", ROOT / "runs")
    assert plan.num_tests == 5
    lines = list(describe_design(plan))
    effect = detectable_effect(0.008, 8, 5)
    assert f"detectable {effect:.4f}" in lines[3] and "training/decisions/habit_wrong" in lines[3]
    with pytest.raises(UserError, match="contrasts: there is no 'x'"):
        _refused(plan.folder, 'contrasts = [["x", "y"]]\n[outcomes]\nscore = 0.1')
    with pytest.raises(UserError, match="without outcomes"):
        _refused(plan.folder, 'contrasts = [["a", "b"]]')


def _refused(folder: Path, text: str) -> None:
    import tempfile

    arms = "".join(f'[arms.{name}]\nrecipe = "{name}.toml"\n' for name in "ab")
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "experiment.toml").write_text(
            f"seeds = [0, 1]\nlearning_rates = [1e-4]\n{text}\n{arms}"
        )
        read_plan(Path(name) / "experiment.toml", folder)


STUDIES = [file.parent / "results.json" for file in sorted(ROOT.glob("recipes/*/experiment.toml"))]
RESULTS = [file for file in STUDIES if file.exists()]


@pytest.mark.parametrize(
    "path", [p for p in RESULTS if p.exists()], ids=lambda path: path.parent.name
)
def test_stored_contrasts_follow_from_the_stored_values(path: Path) -> None:
    results = json.loads(path.read_text())
    design = Design(
        pairs=tuple((first, other) for first, other in results["design"]["contrasts"]),
        outcomes=results["design"]["outcomes"],
        margin=results["design"]["margin"],
        unpaired=tuple(results["design"]["unpaired"]),
    )
    stored, computed = [], []
    for section in (results.get("variants") or {"": results}).values():
        arms = {
            name: read_stored_arm(row, is_pairable=name not in design.unpaired)
            for name, row in section["arms"].items()
        }
        stored += section["contrasts"]
        computed += compare_fixed(arms, design)
    judge(computed, design, results["design"]["num_tests"])
    assert len(stored) == len(computed)
    for row, expected in zip(stored, computed, strict=True):
        assert (row["contrast"], row["outcome"]) == (expected["contrast"], expected["outcome"])
        assert row["mean"] == pytest.approx(expected["mean"], abs=5e-5)
        if row["variance"] == "with episodes":
            continue  # what test episodes add is not stored
        for name in ("low", "high", "p", "p_equivalent"):
            assert row[name] == pytest.approx(expected[name], abs=1e-3, rel=2e-2)
        # Corrected ones depend on the whole family.
        if all(r["variance"] != "with episodes" for r in stored if r["outcome"] == row["outcome"]):
            assert row["verdict"] == expected["verdict"]
            for name in ("p_holm", "p_equivalent_holm"):
                assert row[name] == pytest.approx(expected[name], abs=1e-3, rel=2e-2)
