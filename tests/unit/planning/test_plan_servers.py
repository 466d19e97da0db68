"""Plans with GPUs of servers: who computes what, with corrections, budgets and pipelines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.plan_recipes import PROMPTS, make_recipe

import courtside
from courtside.cli.plan import format_plan, plan_tree
from courtside.errors import PlanError
from courtside.planning.gpus import GPUS
from courtside.planning.lengths import KnownLengths
from courtside.planning.pipeline import plan_pipeline
from courtside.planning.plan import PlanOptions, plan
from courtside.recipe import Recipe
from courtside.recipe.pipeline import parse_pipeline

TEACHER = {"kind": "server", "server": {"urls": ["http://a:1", "http://b:1"],
                                        "model": "Qwen/Qwen3-32B"}}  # fmt: skip
TOP_K = [{"kind": "divergence", "support": {"kind": "top_k", "k": 64, "of": "teacher"}}]
SAMPLER = {"urls": [f"http://localhost:{port}" for port in range(1, 5)], "model": "student"}


def served(**server: Any) -> Recipe:
    rollout = {"samples_per_prompt": 4, "max_new_tokens": 512}
    if server:
        rollout["server"] = SAMPLER | server
    return make_recipe(teacher=TEACHER, losses=TOP_K, rollout=rollout)


def seconds_of(result: courtside.CostPlan) -> dict[str, float]:
    return {phase.name: phase.seconds for phase in result.estimate.phases}


def test_servers_have_gpus_of_their_own() -> None:
    alone = plan(served(max_staleness=0), **PROMPTS)
    split = plan(served(max_staleness=0), rollout_gpus=4, teacher_gpus=4, **PROMPTS)
    assert (split.num_gpus, split.num_all_gpus, split.is_on_paper) == (1, 9, True)
    assert split.gpu_hours == 9 * split.hours
    before, after = seconds_of(alone), seconds_of(split)
    assert after["rollout"] < before["rollout"]
    assert before["teacher"] == 0 < after["teacher"]
    assert after["update"] == before["update"]
    assert split.estimate.step_seconds == pytest.approx(sum(after.values()))
    rollout, teacher = split.estimate.servers
    assert (teacher.servers.num_replicas, teacher.servers.tensor_parallel) == (2, 2)
    assert teacher.weight_bytes == 2 * split.estimate.servers[1].servers.shape.num_parameters / 2
    assert rollout.fits and teacher.fits
    memory = {phase.phase: phase.parts for phase in split.estimate.memory}
    assert "KV cache" not in memory["rollout"] and "KV cache" in {
        name for phase in alone.estimate.memory for name in phase.parts
    }
    assert any("never measured" in note for note in split.notes)


def test_the_teachers_time_is_that_of_whole_sequences() -> None:
    """By hand: no prefix is shared, and the LM head covers prompts, too."""
    result = plan(served(), teacher_gpus=4, **PROMPTS)
    shape = result.estimate.servers[0].servers.shape
    tokens, length = 256 * 640, 640
    matmuls = 2 * (shape.num_linear_parameters + shape.num_head_parameters) * tokens
    attention = 4 * shape.num_layers * shape.query_size * 256 * length**2 / 2
    rate = 4 * GPUS["h200"].flops
    expected = matmuls / (0.65 * rate) + attention / (0.28 * rate)
    assert seconds_of(result)["teacher"] == pytest.approx(expected)
    twice = plan(served(), teacher_gpus=8, **PROMPTS)
    assert seconds_of(twice)["teacher"] == pytest.approx(expected / 2)


def test_sampling_ahead_takes_the_longer_of_the_two() -> None:
    result = plan(served(max_staleness=1), rollout_gpus=4, teacher_gpus=4, **PROMPTS)
    seconds = seconds_of(result)
    training = sum(seconds.values()) - seconds["rollout"]
    assert result.estimate.step_seconds == pytest.approx(max(seconds["rollout"], training))


def test_a_model_that_its_server_cannot_hold_does_not_fit() -> None:
    """Qwen3-32B takes 61 GiB in bfloat16."""
    result = plan(served(), gpu="a100-40", teacher_gpus=2, **PROMPTS)
    assert not result.estimate.servers[0].fits and not result.fits
    assert plan(served(), gpu="h100", teacher_gpus=2, **PROMPTS).estimate.servers[0].fits


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout_gpus": 2}, r"--rollout-gpus 2: the recipe samples in the training process"),
        ({"teacher_gpus": 3}, r"--teacher-gpus 3: the recipe names 2 addresses.*multiple of 2"),
        ({"teacher_gpus": 0}, r"--teacher-gpus 0"),
        ({"teacher_gpus": 32}, r"at most 8"),
        ({"teacher_gpus": 2, "gpu": "cpu"}, r"with --gpu cpu: servers are planned on GPUs"),
    ],
)
def test_servers_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan(served(), **{"gpu": "h200", **options}, **PROMPTS)
    with pytest.raises(PlanError, match=r"--teacher-gpus 2: the recipe has 0 models"):
        plan(make_recipe(), teacher_gpus=2, **PROMPTS)


def test_a_split_that_training_refuses_today_says_so() -> None:
    transfer = {"max_staleness": 1, "weight_transfer": "nccl"}
    result = plan(served(**transfer), num_gpus=8, rollout_gpus=4, **PROMPTS)
    assert any(note.startswith("refused today with 8 processes: rollout.server") for note in
               result.notes)  # fmt: skip
    assert not any("refused" in note for note in plan(served(), num_gpus=8, **PROMPTS).notes)
    # The sampler stays on each rank: it checks the servers.
    parts = result.estimate.memory[-1].parts
    assert parts["sampler"] == 2 * result.models.num_student


REWRITE = {"kind": "rewrite", "reply": "whole", "prompt": "{task} {draft}", "max_new_tokens": 64}
IMITATE = {"kind": "cross_entropy", "on": "teacher"}


def test_a_served_teacher_writes_on_its_servers() -> None:
    """Drafts that it repairs and takes over: elsewhere without its GPUs, else in their time."""
    recipe = make_recipe(
        teacher=TEACHER, losses=[*TOP_K, IMITATE], drafts=[REWRITE],
        takeover={"select": "all", "require": "none"},
        rollout={"samples_per_prompt": 4, "max_new_tokens": 512},
    )  # fmt: skip
    without, planned, twice = (
        plan(recipe, teacher_gpus=number, **PROMPTS) for number in (None, 4, 8)
    )
    seconds = seconds_of(planned)
    assert seconds_of(without)["drafts"] == seconds_of(without)["teacher"] == 0
    assert 0 < seconds_of(twice)["drafts"] < seconds["drafts"]
    assert seconds_of(twice)["update"] == seconds["update"] == seconds_of(without)["update"]
    phases = {phase.name: phase for phase in planned.estimate.phases}
    assert [phases[name].num_gpus for name in ("rollout", "drafts", "teacher")] == [1, 4, 4]
    # Counted by the shape, where teacher.num_parameters says nothing.
    size = planned.estimate.servers[0].servers.shape.num_parameters
    drafts = phases["drafts"].flops
    assert drafts.counted == pytest.approx(2 * size * drafts.num_tokens)
    free = {phase.name: phase for phase in without.estimate.phases}["drafts"].flops
    assert free.counted == free.executed == 0 and free.num_tokens == drafts.num_tokens
    assert [m.phase for m in planned.estimate.memory] == ["rollout", "teacher", "update"]
    scoring = seconds_of(plan(served(), teacher_gpus=4, **PROMPTS))["teacher"]
    assert seconds["teacher"] > 2 * scoring  # repairs and take-overs are scored, too


def test_the_reference_stays_where_training_is() -> None:
    """A served teacher's phase takes the passes of the reference in addition."""
    losses = [*TOP_K, {"kind": "divergence", "against": "reference", "name": "kl"}]
    rollout = {"samples_per_prompt": 4, "max_new_tokens": 512}
    both = make_recipe(teacher=TEACHER, losses=losses, rollout=rollout)
    scored = seconds_of(plan(served(), teacher_gpus=4, **PROMPTS))["teacher"]
    alone = seconds_of(plan(both, **PROMPTS))["teacher"]
    result = plan(both, teacher_gpus=4, **PROMPTS)
    assert alone > 0 and seconds_of(result)["teacher"] == pytest.approx(scored + alone)
    assert {p.name: p.num_gpus for p in result.estimate.phases}["teacher"] == 5


def test_routes_share_tasks_between_here_and_servers() -> None:
    local = {"kind": "model", "model": "Qwen/Qwen3-8B"}
    recipe = make_recipe(teacher={"kind": "routes", "routes": {"a": TEACHER, "b": local},
                                  "default": "a"}, losses=TOP_K,
                         rollout={"samples_per_prompt": 4, "max_new_tokens": 512})  # fmt: skip
    scored = seconds_of(plan(served(), teacher_gpus=4, **PROMPTS))["teacher"]
    whole = seconds_of(plan(recipe, **PROMPTS))["teacher"]
    result = plan(recipe, teacher_gpus=4, **PROMPTS)
    assert seconds_of(result)["teacher"] == pytest.approx(scored / 2 + whole / 2, rel=0.05)
    assert len(result.models.teachers) == 1 and len(result.estimate.servers) == 1


def test_a_budget_of_seconds_is_spent_by_the_longer_of_the_two() -> None:
    """Of a rollout ahead a run measures the wait for it."""
    options = {"rollout_gpus": 4, "teacher_gpus": 4, **PROMPTS}
    whole = plan(served(max_staleness=1), **options).estimate
    record = next(phase.seconds for phase in whole.phases if phase.name == "record")
    recipe = served(max_staleness=1)
    train = recipe.train.model_copy(update={"max_seconds": 2.5 * (whole.step_seconds - record)})
    result = plan(recipe.model_copy(update={"train": train}), **options).estimate
    assert result.steps == 3 and "train.max_seconds" in (result.budget_end or "")
    alone = served(max_staleness=0)
    limit = train.model_copy(update={"max_seconds": 2.5 * (whole.step_seconds - record)})
    in_turns = plan(alone.model_copy(update={"train": limit}), **options).estimate
    assert in_turns.steps < 3


def test_stages_of_a_pipeline_have_the_servers_that_they_name() -> None:
    served_stage = {"name": "distil", "teacher": TEACHER, "losses": TOP_K,
                    "student": {"model": "stage:sft"},
                    "rollout": {"max_new_tokens": 512, "server": SAMPLER}}  # fmt: skip
    sft = {"name": "sft", "rollout": {"student_fraction": 0},
           "losses": [{"kind": "cross_entropy", "on": "dataset"}]}  # fmt: skip
    base = {"student": {"model": "Qwen/Qwen3-1.7B"}, "tasks": {"kind": "arithmetic"}}
    pipeline = parse_pipeline({"base": base, "stages": [sft, served_stage]})
    options = PlanOptions(
        device=GPUS["h200"], rollout_gpus=4, teacher_gpus=2, price_per_hour=2.0,
        lengths=KnownLengths(prompt_tokens=128, new_tokens=256),
    )  # fmt: skip
    result = plan_pipeline(pipeline, options, teacher_shape="qwen3-8b")
    first, second = result.stages.values()
    assert (first.num_all_gpus, second.num_all_gpus, result.num_all_gpus) == (1, 7, 7)
    assert second.estimate.servers[1].servers.shape.name == "qwen3-8b"
    assert result.gpu_hours == pytest.approx(first.hours + 7 * second.hours)
    assert result.cost == pytest.approx(2 * result.gpu_hours) and result.is_on_paper
    text = "\n".join(part for part in format_plan(result) if isinstance(part, str))
    assert "on 7 × h200" in text and "1 to train; 4 for 4 rollout servers" in text
    assert plan_tree(result)["num_all_gpus"] == 7
    alone = parse_pipeline({"base": base, "stages": [sft]})
    with pytest.raises(PlanError, match=r"--rollout-gpus 4: no stage has a rollout\.server"):
        plan_pipeline(alone, options)
    with pytest.raises(PlanError, match=r"--teacher-gpus 2: no stage has a teacher of kind"):
        plan_pipeline(alone, replace(options, rollout_gpus=None))
