"""Experiments: what is run in which order, what is chosen, what is written down."""

from __future__ import annotations

import json
import runpy
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from courtside.errors import UserError
from courtside.experiment.arms import format_summary, mean_costs, over_seeds
from courtside.experiment.outcomes import measure_run, measures
from courtside.experiment.pictures import draw_pictures
from courtside.experiment.plan import Plan, read_plan
from courtside.experiment.results_json import format_json
from courtside.experiment.runner import Runner
from courtside.experiment.schedule import (
    best_rate,
    count_runs,
    list_recipes,
    make_job,
    planned_jobs,
)
from courtside.experiment.summary import summarize

ROOT = Path(__file__).resolve().parents[3]

Tree = dict[str, Any]


def plan_of(folder: Path, text: str, *extra: str) -> Plan:
    (folder / "experiment.toml").write_text(text)
    return read_plan(folder / "experiment.toml", folder / "runs", extra)


def measured(errors: float, *, held_out: float = 0.5, events: bool = True) -> Tree:
    """An outcome as a run of episodes has it."""

    def part(value: float) -> Tree:
        after = {"error_rate": value, "logp_drop/clean_turns": 0.01}
        return {
            "before": 0.5,
            "after": 1 - value,
            "metrics_before": {"error_rate": 0.4, "events/tool_not_found": 0.3},
            "metrics_after": after | ({"events/tool_not_found": value / 2} if events else {}),
        }

    return {
        **part(errors),
        "suites": {"held_out": part(held_out)},
        "trained_tokens": 100,
        "validation": [[0, 0, 0.5, None, 0.4], [5, 100, 1 - errors, None, errors]],
        "training_errors": [0.4, errors],
        "seconds": {"rollout": 1.0},
        "environment": {},
        "wall_seconds": 2.0,
    }


# ── which runs ───────────────────────────────────────────────────────────────────────────────────

PLAN = """
learning_rates = [1e-5, 1e-4]
seeds = [0, 1]
choose_by = "error_rate"
sweep_on = "long"
first = ["main"]
with = ["train.steps=3"]
[variants.short]
with = ["tasks.turns=2"]
[variants.long]
with = ["tasks.turns=4"]
[arms.other]
recipe = "other.toml"
learning_rates = [1e-3]
[arms.main]
recipe = "main.toml"
with = ["tasks.reward=all"]
[arms.noisy]
recipe = "main.toml"
rate_of = "main"
variants = ["long"]
"""


def test_first_arms_come_first_and_seed_by_seed(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, PLAN)
    sweep = ["main-long-lr1e-05-seed0", "main-long-lr0.0001-seed0"]
    later_jobs = [
        "other-short-lr0.001-seed0", "other-long-lr0.001-seed0",
        "other-short-lr0.001-seed1", "other-long-lr0.001-seed1",
    ]  # fmt: skip
    assert [planned.name for planned in planned_jobs(plan, {})] == [*sweep, *sweep, *later_jobs]
    outcomes = {sweep[0]: measured(0.2), sweep[1]: measured(0.1)}
    names = list(dict.fromkeys(planned.name for planned in planned_jobs(plan, outcomes)))
    assert names == [
        *sweep,
        "main-short-lr0.0001-seed0", "main-short-lr0.0001-seed1", "main-long-lr0.0001-seed1",
        later_jobs[0], later_jobs[1], "noisy-long-lr0.0001-seed0",
        later_jobs[2], later_jobs[3], "noisy-long-lr0.0001-seed1",
    ]  # fmt: skip


def test_a_learning_rate_is_chosen_by_the_least_errors_of_those_that_ran(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, PLAN)
    small, large = (make_job(plan, plan.arms["main"], "long", r, 0).name for r in (1e-5, 1e-4))
    main, noisy, other = (plan.arms[name] for name in ("main", "noisy", "other"))
    assert best_rate(plan, main, {small: measured(0.1)}) is None, "the sweep is not done"
    assert best_rate(plan, main, {small: measured(0.1), large: measured(0.2)}) == 1e-5
    assert best_rate(plan, noisy, {small: measured(0.3), large: measured(0.2)}) == 1e-4
    assert best_rate(plan, main, {small: {"failed": "NaN"}, large: measured(0.9)}) == 1e-4
    assert best_rate(plan, main, {small: {"failed": ""}, large: {"failed": ""}}) is None
    assert best_rate(plan, other, {}) == 1e-3, "one rate is no choice"


def test_overrides_of_the_command_line_go_over_those_of_the_plan(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, PLAN, "tasks.turns=1")
    long_job = make_job(plan, plan.arms["main"], "long", 1e-4, 1)
    assert long_job.overrides == (
        "train.steps=3", "tasks.turns=4", "tasks.reward=all", "train.learning_rate=0.0001",
        "seed=1", "tasks.turns=1",
    )  # fmt: skip


def test_an_arm_may_differ_in_one_variant(tmp_path: Path) -> None:
    plan = plan_of(
        tmp_path, PLAN.replace('rate_of = "main"', 'rate_of = "main"\nin.long = ["a=1"]')
    )
    noisy = plan.arms["noisy"]
    with_it, without = (make_job(plan, noisy, variant, 1e-4, 0) for variant in ("long", "short"))
    where = with_it.overrides.index("a=1")
    assert with_it.overrides[where - 1] == plan.variants["long"][-1], "over the variant's"
    assert with_it.overrides[where + 1] == "train.learning_rate=0.0001"
    assert "a=1" not in without.overrides


def test_results_are_read_line_by_line_with_five_digits() -> None:
    tree = {"short": [1, 2.34567891], "long": {f"k{i}": {"x": 1 / 3, "é": None} for i in range(9)}}
    text = format_json(tree)
    assert json.loads(text)["long"]["k3"] == {"x": 0.33333, "é": None}
    assert json.loads(text)["short"] == [1, 2.3457]
    assert text.splitlines()[1:4] == [
        ' "short": [1, 2.3457],', ' "long": {', '  "k0": {"x": 0.33333, "é": null},'
    ]  # fmt: skip


def test_only_some_arms_and_variants_with_the_sweeps_they_need(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, PLAN)
    names = {planned.name for planned in planned_jobs(plan, {}, "^other-short")}
    assert names == {"other-short-lr0.001-seed0", "other-short-lr0.001-seed1"}
    names = {planned.name for planned in planned_jobs(plan, {}, "^noisy")}
    assert names == {"main-long-lr1e-05-seed0", "main-long-lr0.0001-seed0"}


def test_runs_are_counted_before_their_learning_rate_is_chosen(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, PLAN)
    outcomes: Tree = {}
    while new := [p.name for p in planned_jobs(plan, outcomes) if p.name not in outcomes]:
        outcomes |= {name: measured(0.1) for name in new}
    # A run of the sweep that is chosen is also the final run of its seed.
    assert count_runs(plan) == len(outcomes) == 2 + 3 + 4 + 2
    assert count_runs(plan, "^noisy") == 2 + 2, "with the sweep that it needs"


# ── models that are prepared from each other ─────────────────────────────────────────────────────

PREPARED = """
learning_rates = [1e-5]
seeds = [0]
[prepare]
first = "first.toml"
other = "first.toml"
of_model = "of_model.toml"
of_run = "of_run.toml"
[arms.a]
recipe = "first.toml"
"""


def write_prepared(folder: Path) -> None:
    model = '[student]\nmodel = "{}"\n'
    end = '[[losses]]\nkind = "policy_gradient"\nadvantage = "reward"\n'
    addition = '[tasks]\nkind = "arithmetic"\n'
    runs = folder / "runs" / "experiment"
    prefixes = f'[tasks]\nkind = "prefixes"\npath = "{runs}/prepare-of_model"\n'
    (folder / "first.toml").write_text(model.format("smollm2-135m") + addition + end)
    (folder / "of_model.toml").write_text(model.format(f"{runs}/first/") + addition + end)
    (folder / "of_run.toml").write_text(model.format("smollm2-135m") + prefixes + end)


def next_name(runner: Runner, under_way: set[str]) -> str | None:
    job = runner.next_job(under_way)
    return None if job is None else job.name


def test_what_is_prepared_waits_for_the_models_and_runs_that_it_names(tmp_path: Path) -> None:
    write_prepared(tmp_path)
    plan = replace(plan_of(tmp_path, PREPARED), folder=tmp_path / "runs" / "experiment")
    runner = Runner(plan, only="", report=lambda _: None)
    under_way: set[str] = set()
    while (job := runner.next_job(under_way)) is not None:
        under_way.add(job.name)
    assert under_way == {"prepare-first", "prepare-other"}, "these two at a time"
    runner.outcomes["prepare-first"] = {}
    assert [job.name for job in runner.jobs()] == [
        "prepare-first", "prepare-other", "prepare-of_model"
    ]  # fmt: skip
    runner.outcomes["prepare-of_model"] = {}
    assert next_name(runner, {"prepare-other"}) == "prepare-of_run"
    runner.outcomes |= {"prepare-other": {}, "prepare-of_run": {}}
    assert next_name(runner, set()) == "a-lr1e-05-seed0", "an arm waits for all of them"


def test_nothing_is_prepared_of_what_failed(tmp_path: Path) -> None:
    write_prepared(tmp_path)
    plan = replace(plan_of(tmp_path, PREPARED), folder=tmp_path / "runs" / "experiment")
    runner = Runner(plan, only="", report=lambda _: None)
    runner.outcomes |= {"prepare-first": {"failed": "NaN"}, "prepare-other": {}}
    assert runner.next_job(set()) is None


def test_a_recipe_that_names_what_is_prepared_after_it_is_refused(tmp_path: Path) -> None:
    write_prepared(tmp_path)
    line = 'of_run = "of_run.toml"\n'
    text = PREPARED.replace(line, "").replace("[prepare]\n", "[prepare]\n" + line)
    plan = replace(plan_of(tmp_path, text), folder=tmp_path / "runs" / "experiment")
    with pytest.raises(UserError, match=r"prepare\.of_run: its recipe names .*of_model.*earlier"):
        list(list_recipes(plan))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('sweep_on = "long"', 'sweep_on = "mid"', "sweep_on: there is no 'mid'"),
        ('first = ["main"]', 'frist = ["main"]', "frist: unknown key; did you mean 'first'"),
        ('variants = ["long"]', 'in.lang = ["a=1"]', "arms.noisy.in: there is no 'lang'"),
        ('rate_of = "main"', 'rate_of = "mein"', "arms.noisy.rate_of: there is no 'mein'"),
        (
            'choose_by = "error_rate"',
            'choose_by = "error"',
            "choose_by: must be 'rate', 'kl' or 'error_rate'; got \"error\"",
        ),
        ("seeds = [0, 1]", "seeds = [0, 0]", r"arms.main.seeds: \[0, 0\] has a seed twice"),
        ("seeds = [0, 1]", "seeds = 5", "seeds: must be a list; got 5"),
        (
            "seeds = [0, 1]",
            "seeds = [0]\nbudget = { }",
            "budget: give one of steps, student_tokens",
        ),
        (
            "seeds = [0, 1]",
            "seeds = [0]\nbudget = { steps = 3, flops = 1e9 }",
            "budget: give one of steps",
        ),
        ('with = ["train.steps=3"]', 'with = "train.steps=3"', "with: must be a list"),
        (
            "learning_rates = [1e-3]",
            "learning_rates = []",
            "arms.other.learning_rates: there are none",
        ),
    ],
)
def test_a_plan_that_says_nothing_sensible_is_refused(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        plan_of(tmp_path, PLAN.replace(old, new))


# ── what they say ────────────────────────────────────────────────────────────────────────────────


def test_an_event_that_no_longer_occurs_counts_as_zero() -> None:
    values = measures(measured(0.1, held_out=0.3, events=False))
    assert values["events/tool_not_found_before"] == 0.3
    assert values["events/tool_not_found_after"] == 0.0
    assert values["held_out/error_rate_after"] == 0.3 and values["error_rate_after"] == 0.1
    assert (
        values["logp_drop/clean_turns_after"] == 0.01
        and "logp_drop/clean_turns_before" not in values
    )


def decided(date: float, desk: float, mirror: float, seed: int) -> Tree:
    """An outcome of an environment that tells decisions apart."""
    run = measured(0.1)
    run["metrics_after"] |= {
        "decisions/date/habit_wrong": date,
        "decisions/desk/habit_wrong": desk,
        "decisions/date/habit_right": mirror,
        "decisions/filler": 0.5,
        "collateral/turns": 0.25,
    }
    steps = {"decisions/habit_wrong": [0.9, 0.5, date], "decisions/filler": [0.0, 0.0, 0.3]}
    return run | {"training_decisions": steps, "seed": seed}


def test_costs_are_means_also_where_a_run_had_no_such_phase() -> None:
    first = {"seconds": {"update": 2.0}, "costs": {"update": {"flops": 8.0}}}
    other = {
        "seconds": {"update": 4.0, "checkpoint": 6.0},  # the first was stopped and went on
        "costs": {"update": {"flops": 4.0}, "checkpoint": {"flops": 0.0, "input_tokens": 2.0}},
    }
    for runs in ([first, other], [other, first]):
        assert mean_costs(runs) == {
            "update": {"seconds": 3.0, "flops": 6.0},
            "checkpoint": {"seconds": 3.0, "flops": 0.0, "input_tokens": 1.0},
        }


def test_decisions_are_measured_by_side_and_over_the_steps() -> None:
    values = measures(decided(0.2, 0.6, 0.1, seed=0))
    assert values["decisions/date/habit_wrong_after"] == 0.2
    assert values["decisions/habit_wrong_after"] == pytest.approx(0.4), "the mean over kinds"
    assert values["decisions/habit_right_after"] == 0.1 and values["decisions/filler_after"] == 0.5
    assert values["decisions/both_sides_after"] == pytest.approx(0.25), "the mean of 0.4 and 0.1"
    assert values["collateral/turns_after"] == 0.25 and "collateral/turns_before" not in values
    assert values["training/decisions/habit_wrong_after"] == pytest.approx((0.9 + 0.5 + 0.2) / 3)
    assert values["training/decisions/filler_after"] == pytest.approx(0.1)
    assert "decisions/habit_wrong_before" not in values


def test_a_run_is_read_with_its_decisions(tmp_path: Path) -> None:
    rows = [
        {"step": n, "error_rate": 0.1, "decisions/date/habit_wrong": date,
         "decisions/desk/habit_wrong": 0.5, "decisions/filler": 0.0,
         "topk_mass/student": date / 3, "topk_mass/teacher": None,
         "hints/trained": 4 + n, "hints/shift": date}
        for n, date in enumerate((0.9, 0.7))
    ]  # fmt: skip
    del rows[1]["decisions/desk/habit_wrong"]  # no such turn in that step
    rows[0] |= {"drafts/rewrite/repairs": 6, "takeover/pass_rate": 0.5}
    evaluation = {"step": 0, "policy": "student", "split": "test", "mean_score": 0.5, "metrics": {}}
    for name, lines in {"metrics": rows, "evaluations": [evaluation]}.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"{name}.jsonl").write_text(text)
    (tmp_path / "costs.json").write_text("{}")
    (tmp_path / "environment.json").write_text("{}")
    run = measure_run(tmp_path)
    masses = {"topk_mass/student": [pytest.approx(0.3), pytest.approx(0.7 / 3)]}
    assert run["training_masses"] == masses
    means = {"drafts/rewrite/repairs": 3.0, "takeover/pass_rate": 0.5, "hints/trained": 4.5}
    assert run["training_means"] == means | {"hints/shift": pytest.approx(0.8)}
    assert measures(run)["training/drafts/rewrite/repairs_after"] == 3.0
    assert measures(run)["last_step/topk_mass/student_after"] == pytest.approx(0.7 / 3)
    assert run["training_decisions"] == {
        "decisions/date/habit_wrong": [0.9, 0.7],
        "decisions/desk/habit_wrong": [0.5],
        "decisions/filler": [0.0, 0.0],
        "decisions/habit_wrong": [pytest.approx(0.7), 0.7],
    }


def test_a_summary_has_every_variant_with_the_seeds_that_are_finished(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, PLAN)
    outcomes: Tree = {}
    for errors in (0.2, 0.1):  # the sweep, then all that follows from it
        new = [
            planned.name for planned in planned_jobs(plan, outcomes) if planned.name not in outcomes
        ]
        outcomes |= {name: measured(errors + 0.01 * i) for i, name in enumerate(new)}
    del outcomes["main-short-lr1e-05-seed1"]
    outcomes["other-long-lr0.001-seed0"] = {"failed": "ended with 1"}
    results = summarize(plan, outcomes)
    assert results["learning_rates"] == {"other": 1e-3, "main": 1e-5, "noisy": 1e-5}
    assert (results["chosen_on"], results["swept_on"]) == ("error_rate", "long")
    short, long = results["variants"]["short"]["arms"], results["variants"]["long"]["arms"]
    assert short["main"]["error_rate_after"]["seeds"] == 1 and "noisy" not in short
    assert long["main"]["error_rate_after"]["seeds"] == 2
    assert long["other"]["error_rate_after"]["seeds"] == 1
    curve = long["noisy"]["error_rate_curve"]
    finals = [outcomes[f"noisy-long-lr1e-05-seed{seed}"] for seed in (0, 1)]
    last = [run["validation"][-1][4] for run in finals]
    interval = {name: over_seeds(last)[name] for name in ("mean", "low", "high", "seeds")}
    assert curve[1] == {"step": 5, **interval} and curve[0]["mean"] == 0.4
    exploratory = results["variants"]["long"]["exploratory"]
    gap = exploratory["main minus noisy"]["held_out/error_rate"]
    assert (gap["mean"], gap["low"], gap["high"]) == (0.0, 0.0, 0.0)
    assert (gap["method"], gap["seeds"]) == ("paired", 2), "of the same seeds"
    assert all("other" not in name for name in exploratory), "one run says nothing of a difference"
    finals[1]["metrics_after"]["events/wrong_tool"] = 0.2
    row = summarize(plan, outcomes)["variants"]["long"]["arms"]["noisy"]
    assert row["events/wrong_tool_after"]["mean"] == 0.1, "the other seed had none"
    assert results["failed"] == {"other-long-lr0.001-seed0": "ended with 1"}


def test_fixed_contrasts_get_verdicts_and_all_else_is_exploratory(tmp_path: Path) -> None:
    design = """
contrasts = [["main", "other"], ["main", "noisy"]]
margin = 0.05
[outcomes]
error_rate = 0.01
"training/error_rate" = 0.01
[variants.short]
"""
    text = PLAN.replace("seeds = [0, 1]", "seeds = [0, 1, 2, 3]").replace(
        "\n[variants.short]", design
    )
    plan = plan_of(tmp_path, text)
    assert plan.num_tests == 3, "noisy has one variant"
    outcomes: Tree = {}
    while new := [p.name for p in planned_jobs(plan, outcomes) if p.name not in outcomes]:
        for name in new:
            seed = int(name[-1])
            errors = 0.5 if name.startswith("other") else 0.1
            outcomes[name] = measured(errors + 0.01 * seed + 0.001 * (hash_of(name) % 7))
    del outcomes["other-short-lr0.001-seed3"], outcomes["other-long-lr0.001-seed0"]
    results = summarize(plan, outcomes)
    rows = [row for s in results["variants"].values() for row in s["contrasts"]]
    assert [(row["contrast"], row["seeds"]) for row in rows if row["outcome"] == "error_rate"] == [
        ("main minus other", 3), ("main minus other", 3), ("main minus noisy", 4),
    ]  # fmt: skip
    assert {row["verdict"] for row in rows if "other" in row["contrast"]} == {"better"}
    noisy = {row["outcome"]: row for row in rows if "noisy" in row["contrast"]}
    # Nothing is known of its test episodes; those of training are other ones in every seed.
    assert noisy["error_rate"]["verdict"] == "not decided"
    assert noisy["error_rate"]["p_equivalent_holm"] < 0.05
    assert noisy["training/error_rate"]["verdict"] == "equivalent"
    assert results["design"]["num_tests"] == 3 and results["design"]["margin"] == 0.05
    exploratory = results["variants"]["long"]["exploratory"]
    assert "error_rate" not in exploratory["main minus noisy"]
    assert {"score", "held_out/error_rate"} <= exploratory["main minus noisy"].keys()
    lines = list(format_summary(results))
    assert sum(" minus " in line for line in lines) == len(rows) == 6
    json.loads(format_json(results))


def test_runs_of_different_lengths_are_summarized_where_they_have_the_same_steps(
    tmp_path: Path,
) -> None:
    text = PLAN.replace("seeds = [0, 1]", "seeds = [0, 1]\nbudget = { student_tokens = 100 }")
    plan = plan_of(tmp_path, text)
    outcomes: Tree = {}
    while new := [p.name for p in planned_jobs(plan, outcomes) if p.name not in outcomes]:
        outcomes |= {name: measured(0.1) | {"spent": {"steps": 5, "flops": 2.0}} for name in new}
    longer = outcomes["noisy-long-lr1e-05-seed1"]
    longer["validation"] = [[0, 0, 0.5, None, 0.4], [4, 9, 0.6, None, 0.3], [7, 140, 1, None, 0.2]]
    longer["training_errors"] = [0.5, 0.3, 0.1]
    longer["spent"] = {"steps": 7, "flops": 4.0}
    results = summarize(plan, outcomes)
    row = results["variants"]["long"]["arms"]["noisy"]
    assert [point["step"] for point in row["error_rate_curve"]] == [0]
    assert [point["mean"] for point in row["training_errors"]] == [pytest.approx(0.45), 0.2]
    assert row["spent"]["steps"]["values"] == [5, 7] and row["spent"]["flops"]["mean"] == 3.0
    assert results["budget"] == {"student_tokens": 100}
    job = make_job(plan, plan.arms["noisy"], "long", 1e-5, 0)
    assert job.overrides[-1] == "train.max_student_tokens=100"


def hash_of(name: str) -> int:
    return zlib.crc32(name.encode())


def test_the_pictures_show_every_arm_and_number(tmp_path: Path) -> None:
    plan = read_plan(ROOT / "recipes/targeted-hints/experiment.toml", tmp_path)
    outcomes: Tree = {}
    while new := [
        planned.name for planned in planned_jobs(plan, outcomes) if planned.name not in outcomes
    ]:
        outcomes |= {name: measured(0.05) for name in new}
    results = summarize(plan, outcomes)
    assert set(results["variants"]) == {"N4", "N16", "N64"}
    plots = runpy.run_path(str(ROOT / "recipes/targeted-hints/plots.py"))
    assert plots["ARMS"].keys() == plan.arms.keys()
    after, training, shifted = draw_pictures(plots["PICTURES"], results, tmp_path)
    dots = {}
    for path in (after, training, shifted):
        tree = ElementTree.fromstring(path.read_text())
        dots[path] = sum(element.tag.endswith("circle") for element in tree.iter())
    num_rows = sum(len(arm.variants) for arm in plan.arms.values())
    per_row = 1 + len(plan.arms["hint"].seeds)  # the mean and every seed
    assert dots[after] == 2 * num_rows * per_row
    assert dots[training] == 3 * len(plots["ALONG"]) * 2
    assert dots[shifted] == num_rows * per_row, "made up: no turn was wrong before"


@pytest.mark.parametrize("name", ["ways", "ways-agent"])
def test_cost_pictures_show_every_arm_once_and_no_label_on_another(
    tmp_path: Path, name: str
) -> None:
    folder = ROOT / "recipes" / name
    results = json.loads((folder / "results.json").read_text())
    for path in draw_pictures(
        runpy.run_path(str(folder / "plots.py"))["PICTURES"], results, tmp_path
    ):
        assert path.read_text() == (folder / path.name).read_text(), "run plots.py again"
        texts = [e for e in ElementTree.fromstring(path.read_text()).iter() if e.tag[-4:] == "text"]
        labels = [e for e in texts if e.text in results["arms"]]
        assert sorted(e.text or "" for e in labels) == sorted(results["arms"])
        spots = [(float(e.attrib["x"]), float(e.attrib["y"])) for e in labels]
        for i, (x, y) in enumerate(spots):
            assert not any(abs(x - u) < 20 and abs(y - v) < 12 for u, v in spots[:i])


def test_the_picture_of_forgetting_shows_every_arm(tmp_path: Path) -> None:
    folder = ROOT / "recipes/forgetting"
    results = json.loads((folder / "results.json").read_text())
    (path,) = draw_pictures(runpy.run_path(str(folder / "plots.py"))["PICTURES"], results, tmp_path)
    assert path.read_text() == (folder / path.name).read_text(), "run plots.py again"
    dots = [e for e in ElementTree.fromstring(path.read_text()).iter() if e.tag[-6:] == "circle"]
    num_arms = sum(len(variant["arms"]) for variant in results["variants"].values())
    assert len(dots) == num_arms + 2, "the start, and the legend's average"


def test_the_switchboard_pictures_show_every_arm_seed_and_step(tmp_path: Path) -> None:
    folder = ROOT / "recipes/switchboard-both"
    results = json.loads((folder / "results.json").read_text())
    plots = runpy.run_path(str(folder / "plots.py"))
    assert plots["ARMS"].keys() == results["arms"].keys()
    num_seeds = sum(len(arm["runs"]) for arm in results["arms"].values())
    num_steps = len(results["arms"]["hint"]["training_errors"])
    expected = {
        "both-sides.svg": num_seeds + 6 + 6 + 1,  # seeds, means, the legend, the start
        "by-fault.svg": 4 * 2 * (num_seeds + 6) + 2,
        "along-training.svg": 2 * 6 * num_steps,
    }
    for path in draw_pictures(plots["PICTURES"], results, tmp_path):
        tree = ElementTree.fromstring(path.read_text())
        dots = sum(element.tag.endswith("circle") for element in tree.iter())
        assert dots == expected[path.name]
        assert path.read_text() == (folder / path.name).read_text(), "run plots.py"
