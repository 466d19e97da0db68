"""Mixtures of experts on the device: recorded under CUDA graphs, replayed in scoring and update."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.float64 import relative_error
from support.gpu_models import save_qwen3
from support.gradients import accumulate, flatten_gradients, perturb_weights, score_batch
from support.mixtures import (
    KINDS,
    forced_experts,
    make_near_ties,
    mixture,
    routers_of,
    save_mixture,
    with_random_experts,
)
from support.small_runs import small_recipe, write_jsonl
from support.textbook import naive_loss
from support.tiny_model import tiny_tokenizer

from courtside.assemble import assemble
from courtside.engines.base import Sample, SampleRequest, Sampling, ScoreRequest
from courtside.engines.local import LocalEngine

RECORDED = Sampling(max_new_tokens=40, return_routed_experts=True)
EACH_KIND = pytest.mark.parametrize("kind", KINDS)


def make_engine(kind: str, device: torch.device) -> LocalEngine:
    engine = LocalEngine(mixture(kind).to(device), tiny_tokenizer(), name=kind)
    assert engine.recorded_routers is not None and engine.stateless_reason is None
    assert engine.uses_continuous_batching == (device.type == "cuda")
    return engine


def score_gap(
    engine: LocalEngine, conversations: list[tuple[tuple[int, ...], Sample]], *, replays: bool
) -> float:
    """Largest difference of the scores of these samples from what the sampler recorded."""
    requests = [
        ScoreRequest(
            token_ids=ids + sample.token_ids,
            scored=(False,) * len(ids) + (True,) * len(sample.token_ids),
            routed_experts=(sample.routed_experts,)
            if replays and sample.routed_experts is not None
            else (),
        )
        for ids, sample in conversations
    ]
    scores = engine.score(requests)
    return max(
        float((score.logp_T.cpu() - torch.tensor(sample.logp)).abs().max())
        for score, (_, sample) in zip(scores, conversations, strict=True)
    )


@EACH_KIND
def test_scores_through_the_recorded_experts_are_the_sampler_s(
    kind: str, device: torch.device
) -> None:
    """More requests than rows; rounding decides between experts with nearly equal scores."""
    engine = make_engine(kind, device)
    engine.passes  # noqa: B018 (probed before there are ties)
    make_near_ties(engine.model)
    engine.max_batch_tokens = 600
    prompts = [tuple(range(9, 40)), tuple(range(9, 33)), (3, 2), tuple(range(60, 190))]
    requests = [SampleRequest(prompt_ids=prompts[n % 4], seed=n) for n in range(12)]
    samples = engine.sample(requests, RECORDED)
    plain = engine.sample(requests, replace(RECORDED, return_routed_experts=False))
    for request, sample, other in zip(requests, samples, plain, strict=True):
        record = sample.routed_experts
        assert record is not None and other.routed_experts is None
        assert len(record) == len(request.prompt_ids) + len(sample.token_ids) - 1
    make_near_ties(engine.model)  # other experts of each four score highest
    pairs = [(r.prompt_ids, s) for r, s in zip(requests, samples, strict=True)]
    assert score_gap(engine, pairs, replays=True) < 2e-3
    assert score_gap(engine, pairs, replays=False) > 0.05


@EACH_KIND
@pytest.mark.parametrize("student", [{}, {"lora": {"rank": 2}}], ids=["all weights", "LoRA"])
def test_gradients_through_given_experts(
    kind: str, student: dict[str, Any], device: torch.device, tmp_path: Path
) -> None:
    """Against plain passes on the CPU, one sequence at a time, through the same experts."""
    folder = save_mixture(tmp_path / "model", kind)
    teacher_folder = save_qwen3(tmp_path / "teacher", seed=1)
    rows = [{"prompt": "Why? " * n, "split": "train"} for n in (1, 9, 2, 4)]
    parts = assemble(
        small_recipe(
            folder, teacher_folder,
            student={
                "model": str(folder), "dtype": "float32", "device": device.type,
                "router_replay": True, **student,
            },
            tasks={"kind": "jsonl", "path": str(write_jsonl(tmp_path / "tasks.jsonl", rows))},
            rollout={"samples_per_prompt": 2, "max_new_tokens": 12},
        )
    )  # fmt: skip
    teacher = parts.teacher.teacher
    teacher.engine.model.float()
    perturb_weights(parts, 0.02)
    model = parts.student.weights.model
    scored = with_random_experts(score_batch(parts, 4), len(routers_of(model)))
    plain = copy.deepcopy(model).cpu()
    teachers = {teacher.name: copy.deepcopy(teacher.engine.model).cpu()}
    with forced_experts(plain, scored) as naive:
        total, _ = naive_loss([{"kind": "divergence"}], scored, naive, teachers, naive)
        total.backward()
    expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    for budget in (1, 10**4):
        parts.student.micro_batch_tokens = budget
        gradients, _ = accumulate(parts, scored)
        error = relative_error(flatten_gradients(gradients), flatten_gradients(expected))
        assert error < (1e-4 if device.type == "cpu" else 2e-3)
