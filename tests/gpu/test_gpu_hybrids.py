"""Recurrent and hybrid models on the device, against plain passes of one sequence on the CPU."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.float64 import relative_error
from support.gpu_models import save_qwen3
from support.gradients import accumulate, flatten_gradients, perturb_weights, score_batch
from support.hybrids import make_hybrid, plain_logp
from support.small_runs import small_recipe, write_jsonl
from support.textbook import naive_loss
from support.tiny_model import tiny_tokenizer
from support.varlen import make_branch

from courtside.assemble import assemble
from courtside.engines.base import BranchRequest, SampleRequest, Sampling, score_branches_separately
from courtside.engines.generation.recurrent_session import RecurrentSession
from courtside.engines.generation.state_batching import StateBatchingSession
from courtside.engines.local import LocalEngine

KINDS = ("qwen3_5_text", "granitemoehybrid", "lfm2", "nemotron_h", "falcon_h1", "mamba2")
LIMITS = {"float32": 1e-3, "autocast": 0.5}
EACH_KIND = pytest.mark.parametrize("kind", KINDS)
EACH_PRECISION = pytest.mark.parametrize("precision", LIMITS)


def prompt(length: int, start: int = 0) -> tuple[int, ...]:
    return tuple(2 + (7 * i * i + 5 * start + i) % 250 for i in range(length))


def make_engine(kind: str, precision: str, device: torch.device) -> tuple[LocalEngine, Any]:
    """And the same model on the CPU. Every seventh token ends an answer."""
    model = make_hybrid(kind)
    model.generation_config.eos_token_id = list(range(1, 258, 7))
    plain = copy.deepcopy(model)
    autocast = torch.bfloat16 if precision == "autocast" else None
    engine = LocalEngine(model.to(device), tiny_tokenizer(), name=kind, autocast=autocast)
    return engine, plain


def largest_gap(plain: Any, ids: tuple[int, ...], logp: tuple[float, ...]) -> float:
    return float((torch.tensor(logp) - plain_logp(plain, ids)[-len(logp) :]).abs().max())


@EACH_PRECISION
@EACH_KIND
def test_turns_continue_from_their_states(kind: str, precision: str, device: torch.device) -> None:
    engine, plain = make_engine(kind, precision, device)
    session = engine.session(4)
    by_graphs = device.type == "cuda"
    assert isinstance(session, StateBatchingSession if by_graphs else RecurrentSession)
    contexts: dict[int, tuple[int, ...]] = dict.fromkeys(range(4), ())
    gaps = []
    for turn, rows in enumerate([[0, 1, 2, 3], [0, 2], [3, 1, 0]]):
        if turn == 2:
            session.restart(1)
            contexts[1] = ()
        requests = []
        for row in rows:
            new = contexts[row][-1:] + prompt(40 if row == 3 else 3 + 2 * (row % 2), row % 3 + turn)
            contexts[row] = contexts[row][:-1] + new
            requests.append(SampleRequest(prompt_ids=new, seed=row + 10 * turn))
        samples = session.sample(rows, requests, Sampling(max_new_tokens=8 + turn))
        for row, sample in zip(rows, samples, strict=True):
            contexts[row] += sample.token_ids
            gaps.append(largest_gap(plain, contexts[row], sample.logp))
    if precision == "autocast" and hasattr(plain.config, "num_experts_per_tok"):
        gaps = sorted(gaps)[: -len(gaps) // 4]  # rounding sends single tokens to other experts
    assert max(gaps) < LIMITS[precision], gaps


@EACH_KIND
def test_branches_continue_a_state_at_the_splice(kind: str, device: torch.device) -> None:
    engine, _ = make_engine(kind, "float32", device)
    branches = tuple(
        make_branch(splice, prompt(length, splice))
        for splice, length in ((120, 20), (57, 9), (57, 33), (20, 3))
    )
    request = BranchRequest(token_ids=prompt(120), branches=branches)
    (tree,) = engine.score_branches([request])
    (apart,) = score_branches_separately(engine, [request])
    for ours, expected in zip(tree.branches, apart.branches, strict=True):
        torch.testing.assert_close(ours.logp_T, expected.logp_T, rtol=0, atol=1e-3)


@pytest.mark.parametrize("student", [{}, {"lora": {"rank": 2}}], ids=["all weights", "LoRA"])
@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2", "nemotron_h"])
def test_gradients_are_those_of_one_sequence_at_a_time(
    kind: str, student: dict[str, Any], device: torch.device, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    make_hybrid(kind, max_position_embeddings=2048).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    rows = [{"prompt": "Why? " * n, "split": "train"} for n in (1, 9, 2, 4)]
    parts = assemble(
        small_recipe(
            folder, save_qwen3(tmp_path / "teacher", seed=1),
            student={
                "model": str(folder), "dtype": "float32", "device": device.type, **student,
            },
            tasks={"kind": "jsonl", "path": str(write_jsonl(tmp_path / "tasks.jsonl", rows))},
        )
    )  # fmt: skip
    teacher = parts.teacher.teacher
    teacher.engine.model.float()
    perturb_weights(parts, 0.02)
    scored = score_batch(parts, 4)
    plain, plain_teacher = (
        copy.deepcopy(model).cpu() for model in (parts.student.weights.model, teacher.engine.model)
    )
    losses = [{"kind": "divergence"}]
    total, _ = naive_loss(losses, scored, plain, {teacher.name: plain_teacher}, plain)
    total.backward()
    expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    for budget in (1, None):  # one trajectory at a time, and in padded micro-batches
        parts.student.micro_batch_tokens = budget
        gradients, _ = accumulate(parts, scored)
        error = relative_error(flatten_gradients(gradients), flatten_gradients(expected))
        assert error < (1e-4 if device.type == "cpu" else 2e-3)
