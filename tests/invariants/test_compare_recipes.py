"""`courtside compare` of recipes: they are trained first, once, all checked before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.small_runs import small_tree
from typer.testing import CliRunner

import courtside
from courtside.cli.app import app
from courtside.errors import UserError
from courtside.recipe.pipeline import load_pipeline
from courtside.report.folder import toml
from courtside.report.folder.folder import RunFolder


@pytest.fixture
def recipes(tiny_folder: Path, tiny_teacher_folder: Path, tmp_path: Path) -> list[str]:
    files = []
    losses = {
        "taught": [{"kind": "divergence"}],
        "rewarded": [{"kind": "policy_gradient", "advantage": "reward"}],
    }
    for name, terms in losses.items():
        tree = small_tree(
            tiny_folder, tiny_teacher_folder if name == "taught" else None,
            losses=terms, train={"steps": 2, "prompts_per_step": 2, "learning_rate": 1e-3},
        )  # fmt: skip
        file = tmp_path / f"{name}.toml"
        file.write_text(toml.dumps(tree))
        files.append(str(file))
    return files


def test_recipes_are_trained_and_compared(
    recipes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["compare", *recipes, "--json"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    tree = json.loads(done.stdout)
    assert {arm["name"] for arm in tree["arms"]} == {"taught", "rewarded"}
    paths = [tmp_path / "runs" / name for name in ("taught", "rewarded")]
    rows = [RunFolder.read(path).metrics() for path in paths]
    assert [len(r) for r in rows] == [2, 2] and (tmp_path / "compare.html").is_file()
    # Once more: nothing is trained again, and a run may stand beside a recipe.
    mixed = ["compare", str(paths[0]), recipes[1], "--json"]
    compared = json.loads(CliRunner().invoke(app, mixed, catch_exceptions=False).stdout)
    assert [RunFolder.read(path).metrics() for path in paths] == rows
    assert [arm["spent"] for arm in compared["arms"]] == [arm["spent"] for arm in tree["arms"]]
    assert [arm["after"] for arm in compared["arms"]] == [arm["after"] for arm in tree["arms"]]


def test_nothing_trains_where_one_cannot(
    recipes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["compare", recipes[0], "missing.toml"])
    assert done.exit_code == 2 and "missing.toml" in done.output
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def pipeline(tiny_folder: Path, tmp_path: Path) -> str:
    """A student that is readied by worked solutions, then rewarded."""
    tree = small_tree(
        tiny_folder, train={"steps": 2, "prompts_per_step": 2, "learning_rate": 1e-3},
        tasks={"kind": "arithmetic"},
    )  # fmt: skip
    del tree["losses"]
    stages = [
        {"name": "sft", "rollout": {"student_fraction": 0}, "losses": [{"kind": "cross_entropy"}]},
        {
            "name": "rl",
            "student": {"model": "stage:sft"},
            "losses": [{"kind": "policy_gradient", "advantage": "reward"}],
            "evaluate": {"before": False},
        },
    ]
    file = tmp_path / "chain.toml"
    file.write_text(toml.dumps({"base": tree, "stages": stages}))
    return str(file)


def test_a_pipeline_is_its_last_stage_at_the_cost_of_all(
    pipeline: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["compare", pipeline, "--price-per-hour", "2", "--json"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    (arm,) = json.loads(done.stdout)["arms"]
    stages = [tmp_path / "runs" / "chain" / "stages" / name for name in ("01-sft", "02-rl")]
    alone = courtside.compare(stages, price_per_hour=2).arms
    assert arm["name"] == "chain" and arm["spent"]["steps"] == 4
    for unit in ("student_tokens", "flops", "seconds", "money"):
        assert arm["spent"][unit] == pytest.approx(sum(a.spent[unit] or 0 for a in alone)), unit
    assert arm["after"]["mean"] == alone[1].after.mean, "the last stage's"
    assert alone[0].before is not None and alone[1].before is None
    assert arm["before"]["mean"] == alone[0].before.mean, "where its student began"


def test_pipelines_with_other_seeds_are_an_arm_and_half_of_one_is_refused(
    pipeline: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for seed in (0, 1):
        courtside.train(load_pipeline(pipeline, [f"base.seed={seed}"]), f"chain-seed{seed}")
    (arm,) = courtside.compare([tmp_path / f"chain-seed{seed}" for seed in (0, 1)]).arms
    assert (arm.name, arm.seeds) == ("chain", (0, 1))
    record = tmp_path / "chain-seed1" / "stages" / "02-rl.json"
    record.write_text(record.read_text().replace('"is_done": true', '"is_done": false'))
    with pytest.raises(UserError, match="its stage 02-rl is not done"):
        courtside.compare([tmp_path / "chain-seed1"])
