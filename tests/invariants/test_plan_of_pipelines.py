"""Plans of pipelines: the shapes and lengths that stages hand on, and what a run of it counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.small_runs import write_jsonl
from typer.testing import CliRunner

from courtside.api import train
from courtside.cli.app import app
from courtside.errors import PlanError
from courtside.planning.gpus import find_device
from courtside.planning.lengths import KnownLengths
from courtside.planning.pipeline import plan_pipeline
from courtside.planning.plan import PlanOptions
from courtside.recipe.pipeline import Pipeline, parse_pipeline
from courtside.report.folder.folder import RunFolder

CPU = find_device("cpu", 1)
REWARD = [{"kind": "policy_gradient", "advantage": "reward"}]


@pytest.fixture
def pipeline(tiny_folder: Path, tiny_teacher_folder: Path, tmp_path: Path) -> Pipeline:
    """A student of one layer drafts, a teacher learns to go on from there, the student learns from
    it, and a last stage from what that one sampled."""
    rows = [
        {"prompt": f"say {n}", "completion": "yes no yes no", "answer": "yes", "grader": "contains"}
        for n in range(40)
    ]
    tasks = {"kind": "jsonl", "path": str(write_jsonl(tmp_path / "words.jsonl", rows))}
    tree: dict[str, Any] = {
        "base": {
            "tasks": tasks,
            "rollout": {"samples_per_prompt": 2, "max_new_tokens": 14},
            "train": {"steps": 2, "prompts_per_step": 4, "learning_rate": 1e-3},
            "evaluate": {"num_tasks": 1},
            "student": {"model": str(tiny_folder), "keep_layers": [0]},
            "run": {"trajectories_every": 1},
        },
        "stages": [
            {
                "name": "sft",
                "rollout": {"student_fraction": 0},
                "losses": [{"kind": "cross_entropy", "on": "dataset"}],
                "train": {"steps": 60, "prompts_per_step": 8, "learning_rate": 3e-2},
            },
            {"name": "draft", "student": {"model": "stage:sft"}, "losses": REWARD},
            {
                "name": "adapt",
                "student": {"model": str(tiny_teacher_folder)},
                "remove": ["student.keep_layers"],
                "tasks": {"kind": "prefixes", "path": "stage:draft", "depths": [0.0, 1.0]},
                "losses": REWARD,
            },
            {
                "name": "distil",
                "student": {"model": "stage:draft"},
                "teacher": {"kind": "model", "model": "stage:adapt"},
                "losses": [{"kind": "divergence"}],
            },
        ],
    }
    return parse_pipeline(tree)


def test_stages_hand_on_shapes_and_lengths(pipeline: Pipeline) -> None:
    result = plan_pipeline(pipeline, PlanOptions(device=CPU, price_per_hour=2.0))
    sft, draft, adapt, distil = result.stages.values()
    assert sft.models.student.num_layers == 1 and adapt.models.student.num_layers == 3
    assert draft.models.student == distil.models.student == sft.models.student
    assert [teacher.shape for teacher in distil.models.teachers] == [adapt.models.student]
    assert adapt.lengths.prompt == draft.lengths.prompt + draft.lengths.new / 2
    assert any("(of stage draft)" in line for line in adapt.assumptions)
    assert result.seconds == sum(stage.estimate.seconds for stage in result.stages.values())
    assert result.flops.counted == sum(s.estimate.flops.counted for s in result.stages.values())
    assert result.cost == pytest.approx(2.0 * result.hours) and result.fits
    assert result.peak[1].total == max(s.estimate.peak.total for s in result.stages.values())


def test_a_plan_from_its_run_counts_what_it_counted(pipeline: Pipeline, tmp_path: Path) -> None:
    train(pipeline, tmp_path / "run", quiet=True)
    result = plan_pipeline(pipeline, PlanOptions(device=CPU), run=tmp_path / "run")
    for stage in pipeline.stages:
        costs = RunFolder.read(tmp_path / "run" / "stages" / stage.folder_name).read_costs()
        estimate = result.stages[stage.name].estimate
        for phase in estimate.phases:
            if phase.flops.num_tokens:
                measured = costs[phase.name]
                counted = measured.input_tokens + measured.output_tokens
                assert estimate.steps * phase.flops.num_tokens == pytest.approx(counted, rel=0.02)
                flops = estimate.steps * phase.flops.counted
                assert flops == pytest.approx(measured.flops, rel=0.02), (stage.name, phase.name)


def test_options_that_fit_no_stage_are_refused(pipeline: Pipeline, tmp_path: Path) -> None:
    options = PlanOptions(device=CPU, lengths=KnownLengths(prompt_tokens=9))
    with pytest.raises(PlanError, match="no stage has a teacher that is another model"):
        plan_pipeline(pipeline, options, teacher_shape="qwen3-8b")
    with pytest.raises(PlanError, match="is not a folder of a pipeline; it has no stages/"):
        plan_pipeline(pipeline, options, run=tmp_path)
    with pytest.raises(PlanError, match="nothing in this recipe depends on it"):
        plan_pipeline(pipeline, PlanOptions(device=CPU, assume={"pair_fraction": 0.5}))
    larger = plan_pipeline(pipeline, options, shape="qwen3-0.6b")
    assert larger.stages["distil"].models.student.num_layers == 1
    assert larger.stages["distil"].models.student.hidden_size == 1024
    assert larger.stages["adapt"].models.student.num_layers == 28


def test_the_command_plans_all_stages(tmp_path: Path) -> None:
    args = ["plan", "continual", "--gpu", "cpu", "--prompt-tokens", "30"]
    page = tmp_path / "plan.html"
    done = CliRunner().invoke(app, [*args, "--html", str(page)], catch_exceptions=False)
    assert done.exit_code == 0
    for text in ("a pipeline of 2 stages", "all stages", "── stage recover", "fits: "):
        assert text in done.stdout
    html = page.read_text()
    assert "Stage recover" in html and html.count("<h3>Memory</h3>") == 2 and "all stages" in html
    done = CliRunner().invoke(app, [*args, "--json"], catch_exceptions=False)
    tree = json.loads(done.stdout)
    assert list(tree["stages"]) == ["learn", "recover"]
    hours = [stage["hours"] for stage in tree["stages"].values()]
    assert tree["hours"] == pytest.approx(sum(hours)) and tree["fits"] is True
