"""Router replay: the update goes through the experts that the sampler went through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gradients import (
    accumulate,
    flatten_gradients,
    perturb_weights,
    score_batch,
    take_gradients,
)
from support.mixtures import (
    KINDS,
    forced_experts,
    jitter_routers,
    make_near_ties,
    routers_of,
    save_mixture,
    with_random_experts,
)
from support.model_kinds import ModelKind, build_model
from support.small_runs import small_recipe, write_jsonl
from support.textbook import naive_loss
from support.tiny_model import tiny_tokenizer

from courtside.api import train
from courtside.assemble import assemble
from courtside.errors import ModelError
from courtside.report.folder.folder import RunFolder
from courtside.runtime import Runtime
from courtside.training.metrics import MetricAccumulator
from courtside.types import Hint, Scored

Save = Callable[[str], Path]
EACH_KIND = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Save:
    folders: dict[str, Path] = {}

    def save_kind(kind: str) -> Path:
        if kind not in folders:
            folders[kind] = save_mixture(tmp_path_factory.mktemp(kind), kind)
        return folders[kind]

    return save_kind


def assembled(
    folder: Path, teacher: Path, tmp_path: Path, *, lines: int = 4, **student: Any
) -> Runtime:
    """Prompts of several lengths, two samples of each, which share it in packed passes."""
    rows = [{"prompt": "Why? " * n, "split": "train"} for n in (1, 9, 2, 4)[:lines]]
    return assemble(
        small_recipe(
            folder, teacher,
            student={"model": str(folder), "dtype": "float32", **student},
            tasks={"kind": "jsonl", "path": str(write_jsonl(tmp_path / "tasks.jsonl", rows))},
            rollout={"samples_per_prompt": 2, "max_new_tokens": 12},
        )
    )  # fmt: skip


def update_logps(parts: Runtime, scored: list[Scored]) -> tuple[torch.Tensor, dict[str, float]]:
    """Differences of the update's log-probs from the sampler's, and metrics."""
    metrics = MetricAccumulator()
    terms = parts.student.make_terms(scored)
    logps = parts.student.accumulate(0, scored, terms, metrics)
    take_gradients(parts.student.weights.trained)
    differences = [
        torch.tensor(logps.student[s.trajectory.id]) - torch.tensor(s.trajectory.sampler_logp)
        for s in scored
    ]
    return torch.cat(differences).abs(), metrics.means()


@EACH_KIND
def test_log_probs_are_the_sampler_s_where_rounding_decides_between_experts(
    kind: str, save: Save, tiny_teacher_folder: Path, tmp_path: Path
) -> None:
    results = {}
    for replays in (False, True):
        parts = assembled(save(kind), tiny_teacher_folder, tmp_path, router_replay=replays)
        score_batch(parts, 1)  # probes come first: ties would fail them
        assert parts.student.passes.unshared_reason is None
        make_near_ties(parts.student.weights.model)
        scored = score_batch(parts, 4)
        jitter_routers(parts.student.weights.model)
        for budget in (1, 10**4):
            parts.student.micro_batch_tokens = budget
            results[replays, budget] = update_logps(parts, scored)
    for budget in (1, 10**4):
        difference, metrics = results[True, budget]
        assert float(difference.max()) < 5e-4
        assert metrics["sampler/routing_diff"] > 0.1, "the example has ties"
        assert metrics["sampler/routing_diff_tokens"] >= metrics["sampler/routing_diff"]
    assert float(results[False, 10**4][0].max()) > 0.05


@pytest.mark.parametrize(
    ("kind", "student"),
    [
        *((kind, {}) for kind in KINDS),
        ("qwen3_moe", {"gradient_checkpointing": True}),
        ("deepseek_v3", {"gradient_checkpointing": True}),
        ("gpt_oss", {"lora": {"rank": 2}}),
        ("qwen3_moe", {"lora": {"rank": 2}, "gradient_checkpointing": True}),
    ],
)
def test_gradients_are_those_of_plain_passes_through_the_given_experts(
    kind: str, student: dict[str, Any], save: Save, tiny_teacher_folder: Path, tmp_path: Path
) -> None:
    """Any experts, also such that no router would select."""
    parts = assembled(save(kind), tiny_teacher_folder, tmp_path, router_replay=True, **student)
    perturb_weights(parts, 0.02)
    model, teacher = parts.student.weights.model, parts.teacher.teacher
    scored = with_random_experts(score_batch(parts, 4), len(routers_of(model)))
    losses: list[dict[str, Any]] = [{"kind": "divergence"}]
    with forced_experts(model, scored) as naive:
        teachers = {teacher.name: teacher.engine.model}
        total, _ = naive_loss(losses, scored, naive, teachers, naive)
        total.backward()
    expected = flatten_gradients(take_gradients(parts.student.weights.trained))
    if "lora" not in student:
        assert all(r.weight.requires_grad for r in routers_of(model)), "routers train"
    assert float(expected.norm()) > 1e-3
    assert parts.student.passes.unshared_reason is None
    for budget in (1, 10**4):
        parts.student.micro_batch_tokens = budget
        gradients, _ = accumulate(parts, scored)
        error = (flatten_gradients(gradients) - expected).norm() / expected.norm()
        assert float(error) < 1e-4


@pytest.mark.parametrize("reads_hints", [False, True])
def test_turns_of_episodes_replay_with_their_experts(
    reads_hints: bool, save: Save, roomy_folder: Path
) -> None:
    """Also where the update scores hints over its own pass, which have experts of their own."""
    folder = save("qwen3_moe")
    hints: dict[str, Any] = {
        "reader": {"kind": "rules"},
        "hints": {"harmful": "train"},
        "teacher": {"kind": "self", "weights": "live"},
        "losses": [{"kind": "divergence", "on": "hinted_turns"}, {"kind": "policy_gradient",
                    "advantage": "reward", "weight": 0.1, "name": "rl"}],
    }  # fmt: skip
    parts = assemble(
        small_recipe(
            folder, None if reads_hints else roomy_folder,
            student={"model": str(folder), "dtype": "float32", "router_replay": True},
            tasks={"kind": "toolbox", "turns": 3, "num_tools": 2},
            rollout={"samples_per_prompt": 2, "max_new_tokens": 6},
            **(hints if reads_hints else {}),
        )
    )  # fmt: skip
    parts.rollout(parts.tasks.batch(0, 1), 0)
    assert parts.student.passes.unshared_reason is None
    if reads_hints:
        assert parts.local_engine.separate_branches_reason is None
    model = parts.student.weights.model
    make_near_ties(model)
    trajectories = parts.rollout(parts.tasks.batch(0, 2), 0)
    for t in trajectories:
        assert sum(turn.role == "assistant" for turn in t.turns) > 1
        processed = [turn.num_routed for turn in t.turns[:-1]]
        assert processed[:-1] == [len(turn.token_ids) for turn in t.turns[:-2]]
    jitter_routers(model)
    if reads_hints:
        turn_hints = [
            Hint(trajectory=t.id, turn=turn, text=f"Look again, {turn}.", source="rules")
            for t in trajectories
            for turn in t.hintable_turns[:2]
        ]
        scored = parts.teacher(trajectories, turn_hints)
        assert all(s.deferred is not None for s in scored)
    else:
        scored = parts.teacher(trajectories)
    metrics = MetricAccumulator()
    terms = parts.student.make_terms(scored)
    logps = parts.student.accumulate(0, scored, terms, metrics)
    take_gradients(parts.student.weights.trained)
    errors = [
        (torch.tensor(logps.student[s.trajectory.id]) - torch.tensor(s.trajectory.sampler_logp))
        for s in scored
    ]
    error = torch.cat(errors)
    error = error[~error.isnan()].abs()
    assert len(error) > 10 and float(error.max()) < 5e-4
    assert metrics.means()["sampler/routing_diff"] > 0.1


def test_without_replay_nothing_changes(
    save: Save, tiny_teacher_folder: Path, tmp_path: Path
) -> None:
    """Bit for bit: samples, log-probs and gradients, recorded or not."""
    parts = assembled(save("qwen3_moe"), tiny_teacher_folder, tmp_path)
    scored = score_batch(parts, 4)
    gradients, metrics = accumulate(parts, scored)
    assert "sampler/routing_diff" in metrics.means()
    unrecorded = [replace(s, trajectory=s.trajectory.without_experts()) for s in scored]
    parts.rollout.sampling = replace(parts.rollout.sampling, return_routed_experts=False)
    repeated = score_batch(parts, 4)
    assert [s.trajectory for s in repeated] == [s.trajectory for s in unrecorded]
    assert all(not s.trajectory.routed_experts for s in repeated)
    object.__setattr__(parts.student.passes, "routers", None)
    expected, metrics = accumulate(parts, repeated)
    assert "sampler/routing_diff" not in metrics.means()
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)


def test_a_run_logs_how_often_routing_differs(
    save: Save, tiny_teacher_folder: Path, tmp_path: Path
) -> None:
    folder = save("mixtral")
    recipe = small_recipe(
        folder, tiny_teacher_folder,
        student={
            "model": str(folder), "dtype": "bfloat16", "router_replay": True,
            "router_aux_loss_coef": 0.01,
        },
        train={"steps": 2, "prompts_per_step": 2},
    )  # fmt: skip
    train(recipe, tmp_path / "run")
    rows = RunFolder.read(tmp_path / "run").metrics()
    assert len(rows) == 2
    for row in rows:
        assert 0 <= row["sampler/routing_diff"] <= row["sampler/routing_diff_tokens"] <= 1
        assert row["loss/router_aux"] > 0


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("phimoe", "router_replay = true: the routing of .* is out of reach "
                   r"\(PhimoeTopKRouter selects experts without a top-k\)"),
        ("jamba", "router_replay = true: .* samples without a plain KV cache"),
        ("llama", "router_replay = true: .* has no experts. Leave it out"),
    ],
)  # fmt: skip
def test_models_whose_routing_cannot_be_replayed_are_refused(
    kind: str, message: str, tiny_teacher_folder: Path, tmp_path: Path
) -> None:
    build_model(ModelKind(model_type=kind)).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    recipe = small_recipe(
        tmp_path, tiny_teacher_folder, student={"model": str(tmp_path), "router_replay": True}
    )
    with pytest.raises(ModelError, match=message):
        assemble(recipe)
