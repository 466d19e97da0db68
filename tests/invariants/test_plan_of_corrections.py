"""Plans of draft stages, take-overs, mixed sampling and budgets, beside what runs record."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from support.chat_server import ChatServer, completion, serving_chat
from support.small_runs import small_recipe
from support.tiny_model import tiny_tokenizer

from courtside.api import train
from courtside.assemble.inputs import load_inputs
from courtside.chat.privileged_context import choose_contexts, insert_context_text
from courtside.chat.template import ChatTemplate
from courtside.planning.corrections import Rates
from courtside.planning.estimate import Estimate, estimate
from courtside.planning.gpus import find_device
from courtside.planning.measured import read_run
from courtside.planning.models import resolve_shapes
from courtside.planning.plan import plan
from courtside.planning.workload import Lengths, Workload, plan_models
from courtside.recipe import Recipe
from courtside.recipe.teacher import SelfTeacherConfig
from courtside.report.folder.folder import RunFolder
from courtside.types import Message, Trajectory

STEPS = 3
IMITATE = {"kind": "cross_entropy", "on": "teacher"}
PREFER = {"kind": "preference"}
SERVER = {"base_url": "SERVER", "model": "big", "max_retries": 0}
REPAIR = {"kind": "rewrite", "reply": "whole", "prompt": "{task} {draft}", "max_new_tokens": 5}
ALL = {"select": "all", "require": "none"}
TOOLBOX: dict[str, Any] = {
    "tasks": {"kind": "toolbox"},
    "rollout": {"samples_per_prompt": 2, "max_new_tokens": 6, "limits": {"turns": 3}},
}

CASES: dict[str, dict[str, Any]] = {
    "chosen by the teacher, DPO": {
        "drafts": [{"kind": "choose", "by": "teacher_logp"}], "losses": [PREFER],
    },
    "chosen by a judge behind a server, SFT on the best": {
        "drafts": [{"kind": "choose", "by": "judge", "endpoint": SERVER}],
        "losses": [{"kind": "cross_entropy", "on": "chosen"}], "teacher": None,
    },
    "repairs of the teacher": {
        "drafts": [REPAIR | {"max_failure_fraction": 1.0}],  # it ends no reply in time
        "losses": [IMITATE, {"kind": "divergence", "on": "student"}],
    },
    "repairs of a server that are better, DPO": {
        "drafts": [{"kind": "rewrite", "reference": "answer", "endpoint": SERVER, "pairs": True}],
        "losses": [PREFER, IMITATE], "teacher": None,
    },
    "repairs as context": {
        "drafts": [{"kind": "rewrite", "reference": "answer", "endpoint": SERVER}],
        "losses": [{"kind": "divergence"}],
        "teacher": {"kind": "self", "weights": "frozen", "context": {"kind": "repair"}},
    },
    "critiques as context": {
        "drafts": [{"kind": "criticize", "endpoint": SERVER}],
        "losses": [{"kind": "divergence"}],
        "teacher": {"kind": "self", "weights": "frozen", "context": {"kind": "critique"}},
    },
    "take-overs": {"takeover": ALL, "losses": [IMITATE]},
    "take-overs beside the student's own tokens": {
        "takeover": ALL | {"at": 0.5}, "losses": [IMITATE, {"kind": "divergence", "on": "student"}],
    },
    "take-overs with pairs": {"takeover": ALL | {"pair": True}, "losses": [PREFER, IMITATE]},
    "take-overs of a server": {
        "takeover": ALL | {"at": 0, "endpoint": SERVER}, "losses": [IMITATE], "teacher": None,
    },
    "take-overs of episodes by a server": {
        **TOOLBOX, "takeover": ALL | {"endpoint": SERVER}, "losses": [IMITATE], "teacher": None,
    },
    "take-overs of episodes": {**TOOLBOX, "takeover": ALL, "losses": [IMITATE]},
    "pairs at forks of episodes": {
        **TOOLBOX, "takeover": ALL | {"pair": True}, "losses": [PREFER],
    },
    "mixed sampling": {
        "rollout": {"samples_per_prompt": 2, "max_new_tokens": 6,
                    "mixed_sampling": {"top_k": 20, "fraction": 0.5}},
        "losses": [{"kind": "divergence"}],
    },
    "mixed sampling on a ramp, with a context": {
        "rollout": {"samples_per_prompt": 2, "max_new_tokens": 6, "mixed_sampling": {
            "top_k": 20, "fraction": {"start": 0.0, "end": 1.0, "steps": 3},
        }},
        "losses": [{"kind": "divergence"}],
        "teacher": {"kind": "self", "weights": "frozen",
                    "context": {"kind": "system", "text": "Be brief."}},
    },
}  # fmt: skip


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatServer]:
    with serving_chat(monkeypatch, reply) as server:
        yield server


def reply(number: int, body: dict[str, Any]) -> Any:
    """What judge, rewriter and critic are asked for; every fifth reply is no use."""
    text = body["messages"][0]["content"]
    if "For reference" not in text and "<critique>" not in text and "score" not in text:
        return play_on(number, body)
    if number % 5 == 4:
        return completion("no idea")
    if "score" in text:
        return completion(json.dumps({"score": number % 10}))
    if "<critique>" in text:
        return completion("<critique>It is wrong.</critique>")
    answer = re.findall(r"For reference:\n(.+)", text)[0]
    return completion(f"<answer>{answer}</answer>")


def play_on(number: int, body: dict[str, Any]) -> Any:
    """Tokens as the student's template counts them."""
    text = "yes" if number % 2 else "no"
    messages = tuple(Message(role=m["role"], content=m["content"]) for m in body["messages"])
    template = ChatTemplate(tiny_tokenizer(), name="tiny", eos_ids=[1])
    usage = {
        "prompt_tokens": len(template.prompt_ids(messages)),
        "completion_tokens": len(template.completion_ids(messages, text)),
    }
    return completion(text, usage=usage)


def make_recipe(
    name: str, student: Path, teacher: Path, server: ChatServer, /, **changes: Any
) -> Recipe:
    case = json.loads(json.dumps(CASES[name]).replace('"SERVER"', json.dumps(server.url)))
    is_alone = "teacher" in case and case["teacher"] is None
    tree: dict[str, Any] = {
        "tasks": {"kind": "arithmetic"},
        "rollout": {"samples_per_prompt": 2, "max_new_tokens": 6},
        "train": {"steps": STEPS, "prompts_per_step": 2, "learning_rate": 1e-3},
        "evaluate": {"num_tasks": 2, "teacher": False},
        "run": {"trajectories_every": 1},
        **{key: value for key, value in case.items() if value is not None},
    }
    return small_recipe(student, None if is_alone else teacher, **(tree | changes))


def measure(folder: RunFolder, recipe: Recipe) -> tuple[Lengths, Rates]:
    """Of the stored trajectories; the fractions as `--from-run` reads them."""
    everything = [s.trajectory for step in range(STEPS) for s in folder.trajectories(step)]
    drafts = [t for t in everything if t.correction not in ("rewrite", "takeover")]
    prompt, new = mean(len(t.turns[0].token_ids) for t in drafts), mean(map(new_of, drafts))
    lengths = Lengths(
        prompt=prompt,
        new=new,
        observed=mean(len(t.token_ids) for t in drafts) - prompt - new,
        turns=mean(sum(turn.role == "assistant" for turn in t.turns) for t in drafts),
        context=measure_context(recipe, everything),
    )
    rates: dict[str, float] = {}
    whole = [t for t in everything if not t.is_pair_copy]
    if repairs := [t for t in whole if t.correction == "rewrite"]:
        rates["repair_tokens"] = mean(len(t.token_ids) for t in repairs) - prompt
    if takeovers := [t for t in whole if t.correction == "takeover"]:
        rates["takeover_tokens"] = mean(map(new_of, takeovers))
        rates["prefix_tokens"] = mean(map(prefix_of, takeovers))
    measured = read_run(folder.path, find_device("cpu", 1)).rates
    return lengths, Rates(**{**measured, **rates})


def count_trailing(folder: RunFolder) -> int:
    """Tokens of messages after the last reply of an episode that a limit ended, in take-overs: the
    update ends before them, and a plan counts none."""
    if not any(loss.on == "teacher" for loss in folder.recipe().losses):
        return 0
    stored = [s.trajectory for step in range(STEPS) for s in folder.trajectories(step)]
    takeovers = [t for t in stored if t.correction == "takeover" and not t.is_pair_copy]
    return sum(t.completion_mask[::-1].index(True) for t in takeovers)


def prefix_of(takeover: Trajectory) -> int:
    """Tokens between the prompt and the first one that the teacher sampled."""
    return takeover.completion_mask.index(True) - len(takeover.turns[0].token_ids)


def measure_context(recipe: Recipe, trajectories: list[Trajectory]) -> float:
    """Mean tokens that the teacher reads in addition to a trajectory that it scores."""
    config = recipe.teacher.context if isinstance(recipe.teacher, SelfTeacherConfig) else None
    if config is None:
        return 0.0
    template, texts = load_inputs(recipe).template, choose_contexts(config, trajectories)
    prompts = [
        (t.task.messages, insert_context_text(config, t.task, text))
        for t in trajectories
        if (text := texts[t.id]) is not None
    ]
    return mean(len(template.prompt_ids(b)) - len(template.prompt_ids(a)) for a, b in prompts)


def new_of(trajectory: Trajectory) -> int:
    return trajectory.num_completion_tokens


def make_work(recipe: Recipe, lengths: Lengths, rates: Rates) -> Workload:
    device = find_device("cpu", 1)
    student, teachers = resolve_shapes(recipe, shape=None, teacher_shape=None)
    models = plan_models(recipe, student, teachers, device)
    return Workload(recipe=recipe, models=models, lengths=lengths, device=device, rates=rates)


def assert_counts(result: Estimate, folder: RunFolder, rel: float = 1e-9) -> None:
    costs, trailing = folder.read_costs(), count_trailing(folder)
    update = costs["update"]
    per_token = update.flops / update.input_tokens
    costs["update"] = replace(
        update,
        input_tokens=update.input_tokens + trailing,
        flops=update.flops + trailing * per_token,
    )
    for phase in result.phases:
        if phase.name == "record":
            continue
        measured, times = costs[phase.name], result.steps
        for planned, counted in (
            (phase.flops.input_tokens, measured.input_tokens),
            (phase.flops.output_tokens, measured.output_tokens),
            (phase.flops.counted, measured.flops),
        ):
            assert times * planned == pytest.approx(counted, rel=rel), phase.name
    assert {phase.name for phase in result.phases if phase.flops.num_tokens} == {
        name for name, cost in costs.items() if cost.input_tokens and name != "evaluate"
    }
    rows = folder.metrics()
    for unit in ("student_tokens", "teacher_tokens"):
        planned = result.steps * getattr(result.step_flops, unit)
        counted = sum(row[f"cost/{unit}"] for row in rows)
        counted += trailing if unit == "student_tokens" else 0
        assert planned == pytest.approx(counted, rel=rel)


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_flops_are_those_of_the_run(
    name: str, tiny_folder: Path, tiny_teacher_folder: Path, tmp_path: Path, server: ChatServer
) -> None:
    recipe = make_recipe(name, tiny_folder, tiny_teacher_folder, server)
    folder = train(recipe, tmp_path / "run", quiet=True)
    lengths, rates = measure(folder, recipe)
    result = estimate(make_work(recipe, lengths, rates))
    # Exact where all rows do the same; a part of them, and what follows a fork in an episode, has
    # lengths that differ from the mean.
    loose = {
        "chosen by a judge behind a server, SFT on the best": 0.05,
        "repairs of a server that are better, DPO": 0.05,
        "repairs as context": 0.02,
        "critiques as context": 0.02,
        "take-overs of episodes": 0.1,
        "take-overs of episodes by a server": 0.2,  # each turn's request repeats those before it
        "pairs at forks of episodes": 0.1,
        "mixed sampling": 0.01,
        "mixed sampling on a ramp, with a context": 0.01,
    }
    assert_counts(result, folder, loose.get(name, 1e-9))
    rel = 0.2 if "episodes" in name else 0
    assert result.step_flops.calls * STEPS == pytest.approx(len(server.bodies), rel=rel)


@pytest.mark.parametrize(
    "name", ["take-overs", "take-overs of a server", "critiques as context", "mixed sampling"]
)
def test_a_plan_from_a_run_counts_what_it_counted(
    name: str, tiny_folder: Path, tiny_teacher_folder: Path, tmp_path: Path, server: ChatServer
) -> None:
    """Lengths and rates are those of the run: nothing is given."""
    recipe = make_recipe(name, tiny_folder, tiny_teacher_folder, server)
    folder = train(recipe, tmp_path / "run", quiet=True)
    result = plan(recipe, gpu="cpu", run=folder.path)
    assert_counts(result.estimate, folder, 0.02)
    assert not any("assumed" in line for line in result.assumptions), result.assumptions
    rows = folder.metrics()
    for phase in result.estimate.phases:  # also the endpoint's calls
        if phase.name != "record":
            seconds = sorted(row[f"seconds/{phase.name}"] for row in rows)
            rel = 0.7 if phase.name == "drafts" else 1e-6  # their mean, not their median
            assert phase.seconds == pytest.approx(seconds[len(seconds) // 2], rel=rel)


# ── budgets ──────────────────────────────────────────────────────────────────────────────────────

BUDGETS = {
    "student_tokens": {"losses": [{"kind": "divergence"}]},
    "teacher_tokens": {"losses": [{"kind": "divergence"}]},
    "flops": {"losses": [IMITATE], "takeover": ALL},
    "with a ramp": {
        "losses": [{"kind": "divergence"}, IMITATE],
        "rollout": {
            "samples_per_prompt": 2, "max_new_tokens": 6, "off_policy_source": "teacher",
            "student_fraction": {"start": 0.0, "end": 1.0, "steps": 7},
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("name", BUDGETS)
def test_a_budget_ends_the_plan_where_it_ends_the_run(
    name: str, tiny_folder: Path, tiny_teacher_folder: Path, tmp_path: Path
) -> None:
    unit = "student_tokens" if name == "with a ramp" else name
    train_config = {"steps": 8, "prompts_per_step": 2, "learning_rate": 1e-3}
    recipe = small_recipe(
        tiny_folder, tiny_teacher_folder, tasks={"kind": "arithmetic"}, train=train_config,
        evaluate={"num_tasks": 2, "every": 3}, **BUDGETS[name],
    )  # fmt: skip
    whole = train(recipe, tmp_path / "whole", quiet=True)
    spent = [row[f"cost/{unit}"] for row in whole.metrics()]
    limit = sum(spent[:5]) - min(spent) // 2  # in the middle of the fifth step
    limited = recipe.model_copy(
        update={"train": recipe.train.model_copy(update={f"max_{unit}": limit})}
    )
    run = train(limited, tmp_path / "run", quiet=True)
    assert len(run.metrics()) == 5
    result = plan(limited, gpu="cpu", run=whole.path)
    assert result.estimate.steps == 5
    assert result.estimate.budget_end is not None and f"train.max_{unit}" in (
        result.estimate.budget_end
    )
    # With those of the last step.
    assert result.estimate.num_evaluations == len(run.evaluations())
    assert plan(recipe, gpu="cpu", run=whole.path).estimate.budget_end is None


def test_seconds_and_large_budgets(tiny_folder: Path, tiny_teacher_folder: Path) -> None:
    def make(**limits: float) -> Recipe:
        settings = {"steps": 100, "prompts_per_step": 2, **limits}
        return small_recipe(tiny_folder, tiny_teacher_folder, train=settings)

    plain = plan(make(), gpu="cpu").estimate
    trained = sum(phase.seconds for phase in plain.phases if phase.name != "record")
    assert plan(make(max_seconds=10.5 * trained), gpu="cpu").estimate.steps == 11
    roomy = plan(make(max_seconds=1000 * trained, max_flops=1e30), gpu="cpu").estimate
    assert (roomy.steps, roomy.budget_end) == (100, None)
    assert plan(make(max_flops=1), gpu="cpu").estimate.steps == 1
