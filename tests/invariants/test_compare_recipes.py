"""`courtside compare` of recipes: they are trained first, once, all checked before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.small_runs import small_tree
from typer.testing import CliRunner

from courtside.cli.app import app
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
    for other, message in (
        ("continual", "is a pipeline, of which a stage is compared"),
        ("missing.toml", "missing.toml"),
    ):
        done = CliRunner().invoke(app, ["compare", recipes[0], other])
        assert done.exit_code == 2 and message in done.output
    assert not (tmp_path / "runs").exists()
