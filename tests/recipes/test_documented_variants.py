"""Variants that pages give as commands: each is a few fields away from its pipeline, and runs."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path

import pytest

from courtside.api import train
from courtside.recipe import Recipe
from courtside.recipe.pipeline import Pipeline, load_pipeline
from courtside.report.folder.folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]


def read_variants(page: str) -> dict[str, list[str]]:
    """By what the table's row says: the arguments after `courtside train`."""
    rows = re.findall(r"^\| ([^|]+) \| `courtside train ([^`]+)` \|$", (ROOT / page).read_text(),
                      re.MULTILINE)  # fmt: skip
    return {name.strip(): shlex.split(command) for name, command in rows}


BASELINES = {
    name: arguments[1:]
    for name, arguments in read_variants("docs/continual.md").items()
    if arguments[0] == "continual"
}


def load_small(student: Path, overrides: list[str]) -> Pipeline:
    """The built-in pipeline with a tiny model and one or two steps a stage, then changed."""
    small = [
        "base.evaluate.num_tasks=2", "base.evaluate.max_new_tokens=4",
        "stages.learn.train.prompts_per_step=8", "stages.learn.train.steps=2",
        "stages.recover.train.prompts_per_step=2", "stages.recover.train.steps=1",
        "stages.recover.rollout.max_new_tokens=4", "stages.recover.gate.max_loss=1",
        f"base.student.model={student}", f"stages.recover.teacher.model={student}",
    ]  # fmt: skip
    return load_pipeline("continual", [*small, *overrides])


def find_stage(pipeline: Pipeline, name: str) -> Recipe:
    return pipeline.stage(name).recipe


def test_the_page_has_the_baselines() -> None:
    """Replay, a lower rate, LoRA, averaging and KL to the start: an override or two each."""
    assert len(BASELINES) == 5
    fields = {name: {o.partition("=")[0] for o in args} for name, args in BASELINES.items()}
    names = ("replay", "lower rate", "LoRA", "KL", "averaging")
    assert all(any(word in name for name in fields) for word in names)
    sections = {name: {f.rpartition(".")[0] for f in paths} for name, paths in fields.items()}
    assert all(len(paths) <= 2 for paths in sections.values())


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_of_continual_learning_runs(
    name: str, roomy_folder: Path, tmp_path: Path
) -> None:
    overrides = [o.replace("smollm2-135m", str(roomy_folder)) for o in BASELINES[name]]
    plain, pipeline = load_small(roomy_folder, []), load_small(roomy_folder, overrides)
    assert [s.recipe for s in pipeline.stages] != [s.recipe for s in plain.stages]
    last = train(pipeline, tmp_path / "run", quiet=True)
    assert last.path.name == "02-recover"
    learn = RunFolder.read(tmp_path / "run" / "stages" / "01-learn")
    rows = learn.metrics()
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows)
    recipe = find_stage(pipeline, "learn")
    if "replay" in name:
        assert recipe.tasks.kind == "documents" and recipe.tasks.background is not None
        other = (ROOT / "recipes" / recipe.tasks.background.path).read_text()
        windows = [s.trajectory.response for s in learn.trajectories(0)]
        from_other = [window[40:80] in other for window in windows]
        assert any(from_other) and not all(from_other)
    elif "rate" in name:
        assert recipe.learning_rate < find_stage(plain, "learn").learning_rate
    elif "LoRA" in name:
        weights = (learn.checkpoints / "step-000002" / "weights.safetensors").stat().st_size
        whole = sum(f.stat().st_size for f in roomy_folder.glob("*.safetensors"))
        assert weights < whole, "the adapter alone"
    elif "KL" in name:
        assert rows[0]["loss/divergence"] == pytest.approx(0, abs=1e-5)
        assert rows[1]["loss/divergence"] > 0, "the first step moved it away from its start"
    else:
        assert find_stage(pipeline, "recover").student.average_with is not None
        assert {e.step for e in last.evaluations()} == {0, 1}, "the average is measured"


@pytest.mark.parametrize("name", read_variants("recipes/three-fixes/README.md"))
def test_variants_of_the_three_fixes_are_valid(name: str) -> None:
    recipe, *overrides = read_variants("recipes/three-fixes/README.md")[name]
    folder = overrides.index("--run")
    pipeline = load_pipeline(recipe, overrides[:folder])
    assert [s.recipe for s in pipeline.stages] != [s.recipe for s in load_pipeline(recipe).stages]
