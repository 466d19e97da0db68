"""The teacher in the student's states on a GPU: take-overs and mixed sampling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.gpu_models import qwen3, save_qwen3
from support.small_runs import small_recipe
from support.tiny_model import tiny_tokenizer

from courtside.assemble import assemble
from courtside.engines.base import Sampling, ScoreRequest
from courtside.engines.local import LocalEngine
from courtside.engines.mixed_sampling import MixedRequest, MixedSampler, mix_distributions

PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "autocast": {"autocast": torch.bfloat16},
    "bfloat16": {"dtype": torch.bfloat16},
}


def make_engine(
    device: torch.device, *, seed: int, dtype: torch.dtype = torch.float32, **options: Any
) -> LocalEngine:
    model = qwen3(seed=seed).to(device, dtype)
    return LocalEngine(model, tiny_tokenizer(), name=f"small {seed}", **options)


def whole_logits(
    engine: LocalEngine, prompt_ids: tuple[int, ...], ids: tuple[int, ...]
) -> torch.Tensor:
    scored = (False,) * len(prompt_ids) + (True,) * len(ids)
    (scores,) = engine.score([ScoreRequest(token_ids=prompt_ids + ids, scored=scored)],
                             want="hidden")  # fmt: skip
    assert scores.hidden_TD is not None
    logits_TV: torch.Tensor = engine.head(scores.hidden_TD)
    return logits_TV.detach().float()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_mixed_samples_have_the_mixtures_log_probs(precision: str, device: torch.device) -> None:
    student, teacher = (make_engine(device, seed=s, **PRECISIONS[precision]) for s in (0, 1))
    prompts = [(0, 5, 9), (0, 7, 7, 7, 30, 31), (0, 40), tuple(2 + i % 250 for i in range(70))]
    requests = [
        MixedRequest(prompt_ids=prompts[n % 4], teacher_prompt_ids=(0, 8, *prompts[n % 4]), seed=n)
        for n in range(12)
    ]
    sampler = MixedSampler(student=student, teacher=teacher, top_k=20)
    samples = sampler.sample(requests, Sampling(max_new_tokens=24))
    limit = 1e-3 if precision == "float32" else 0.25
    num_inside, num_tokens, num_replaced = 0, 0, 0
    for request, (sample, replaced) in zip(requests, samples, strict=True):
        ids = sample.token_ids
        ids_TK, logp_TK, _ = mix_distributions(
            whole_logits(student, request.prompt_ids, ids),
            whole_logits(teacher, request.teacher_prompt_ids, ids),
            temperature=1.0, top_k=20,
        )  # fmt: skip
        is_sampled_TK = ids_TK == torch.tensor(ids, device=ids_TK.device)[:, None]
        inside_T = is_sampled_TK.any(-1)
        expected = logp_TK[is_sampled_TK].cpu()
        logp_T = torch.tensor(sample.logp)[inside_T.cpu()]
        torch.testing.assert_close(logp_T, expected, atol=limit, rtol=0)
        num_inside, num_tokens = num_inside + int(inside_T.sum()), num_tokens + len(ids)
        num_replaced += replaced
    # Rounding may exchange the last of the teacher's twenty.
    assert num_inside >= (1.0 if precision == "float32" else 0.95) * num_tokens
    assert 0 < num_replaced < num_tokens


@pytest.mark.parametrize("lora", [False, True])
def test_takeovers_in_episodes_are_samples_of_the_teacher(
    lora: bool, device: torch.device, tmp_path: Path
) -> None:
    """A frozen self-teacher: with an adapter, the same module with the adapter off."""
    folder = save_qwen3(tmp_path / "model")
    student: dict[str, Any] = {"model": str(folder)}
    if lora:
        student["lora"] = {"rank": 4}
    recipe = small_recipe(
        folder,
        student=student,
        tasks={"kind": "toolbox"},
        rollout={"samples_per_prompt": 4, "max_new_tokens": 12, "limits": {"turns": 3}},
        teacher={"kind": "self", "weights": "frozen",
                 "context": {"kind": "system", "text": "Call one tool at a time."}},
        takeover={"select": "all", "require": "none"},
        losses=[{"kind": "cross_entropy", "on": "teacher"}],
    )  # fmt: skip
    parts = assemble(recipe)
    assert parts.student.weights.device.type == device.type
    with torch.no_grad():
        torch.manual_seed(2)
        for parameter in parts.student.weights.trained.values():
            parameter += 0.05 * torch.randn_like(parameter)
    scored = parts.teacher(parts.rollout(parts.tasks.batch(0, 3), 0))
    takeovers = [s for s in scored if s.trajectory.correction == "takeover"]
    assert len(takeovers) == 12
    limit = 1e-2 if parts.student.weights.autocast is None else 0.3
    for s in takeovers:
        assert s.target is not None
        torch.testing.assert_close(
            torch.tensor(s.trajectory.sampler_logp), s.target.logp_T.float().cpu(),
            atol=limit, rtol=0,
        )  # fmt: skip
    assert parts.student.step(0, scored).num_tokens["cross_entropy"] > 0
