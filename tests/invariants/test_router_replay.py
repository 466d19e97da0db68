"""Router replay: the update goes through the experts that the sampler went through."""

from __future__ import annotations

from collections.abc import Callable
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
from support.small_runs import small_recipe, write_jsonl
from support.textbook import naive_loss

from courtside.assemble import assemble
from courtside.runtime import Runtime
from courtside.training.metrics import MetricAccumulator
from courtside.types import Scored

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
