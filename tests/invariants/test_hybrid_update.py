"""Whole steps of recurrent and hybrid models: episodes, hints, scores and the update's gradient."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
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
from support.hybrids import KINDS, make_hybrid, plain_logp
from support.small_runs import small_recipe, write_jsonl
from support.textbook import naive_loss
from support.tiny_model import tiny_tokenizer

from courtside.assemble import assemble
from courtside.engines.base import StatelessSession
from courtside.runtime import Runtime
from courtside.types import Hint

TRAINED = (
    "qwen3_5_text", "qwen3_next", "granitemoehybrid", "lfm2", "nemotron_h", "falcon_h1", "jamba",
)  # fmt: skip
ADAPTED = ("qwen3_5_text", "nemotron_h")
EPISODES = ("qwen3_5_text", "nemotron_h")

Save = Callable[..., Path]


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Save:
    def save_hybrid(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        make_hybrid(kind, max_position_embeddings=2048).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        return folder

    return save_hybrid


def relative_error(gradients: torch.Tensor, expected: torch.Tensor) -> float:
    return float((gradients - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("kind", "lora"),
    [*((kind, None) for kind in TRAINED), *((kind, {"rank": 2}) for kind in ADAPTED)],
)
def test_gradients_are_those_of_one_sequence_at_a_time(
    kind: str, lora: dict[str, Any] | None, save: Save, tiny_teacher_folder: Path, tmp_path: Path
) -> None:
    folder = save(kind)
    lines = [{"prompt": "Why? " * n, "split": "train"} for n in (1, 9, 2, 4)]
    parts = assemble(
        small_recipe(
            folder, tiny_teacher_folder,
            student={"model": str(folder), **({"lora": lora} if lora else {})},
            tasks={"kind": "jsonl", "path": str(write_jsonl(tmp_path / "tasks.jsonl", lines))},
        )
    )  # fmt: skip
    perturb_weights(parts, 0.02)
    scored = score_batch(parts, 4)
    model, teacher = parts.student.weights.model, parts.teacher.teacher
    losses: list[dict[str, Any]] = [{"kind": "divergence"}]
    total, _ = naive_loss(losses, scored, model, {teacher.name: teacher.engine.model}, model)
    total.backward()
    expected = flatten_gradients(take_gradients(parts.student.weights.trained))
    assert len({len(s.trajectory.token_ids) for s in scored}) > 3 and float(expected.norm()) > 1e-3
    for budget in (1, None):  # one trajectory at a time, and in padded micro-batches
        parts.student.micro_batch_tokens = budget
        gradients, _ = accumulate(parts, scored)
        assert relative_error(flatten_gradients(gradients), expected) < 1e-4
    assert parts.student.passes.padding_reason is not None


def play(parts: Runtime) -> Any:
    trajectories = parts.rollout(parts.tasks.batch(0, 2), 0)
    hints = [
        Hint(trajectory=t.id, turn=turn, text=f"Look again, {turn}.", source="rules")
        for t in trajectories
        for turn in [i for i, t_turn in enumerate(t.turns) if t_turn.role == "assistant"][:3]
    ]
    return trajectories, parts.teacher(trajectories, hints)


@pytest.mark.parametrize("kind", EPISODES)
def test_episodes_with_hints_agree_with_plain_passes(
    kind: str, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = assemble(
        small_recipe(
            save(kind),
            tasks={"kind": "toolbox", "turns": 3, "num_tools": 2},
            rollout={"samples_per_prompt": 2, "max_new_tokens": 6},
            reader={"kind": "rules"},
            hints={"harmful": "train"},
            teacher={"kind": "self", "weights": "live"},
            losses=[{"kind": "divergence", "on": "hinted_turns"}],
        )
    )
    model = parts.engine.model
    trajectories, scored = play(parts)
    for t in trajectories:
        chosen = [i - 1 for i, is_chosen in enumerate(t.completion_mask) if is_chosen]
        logp_T = plain_logp(model, t.token_ids)[chosen]
        torch.testing.assert_close(torch.tensor(t.sampler_logp), logp_T, rtol=0, atol=1e-4)
        assert sum(turn.role == "assistant" for turn in t.turns) > 1
    # Without saved states: every turn and every hint is read with all that precedes it.
    engine = parts.engine
    monkeypatch.setattr(
        type(engine), "session",
        lambda self, num_rows, **_: StatelessSession(self.sample, num_rows=num_rows, note=""),
    )  # fmt: skip
    monkeypatch.setattr(type(engine), "separate_branches_reason", "asked for")
    plain_trajectories, plain_scored = play(parts)
    assert [t.token_ids for t in plain_trajectories] == [t.token_ids for t in trajectories]
    for s, plain in zip(scored, plain_scored, strict=True):
        torch.testing.assert_close(s.target.logp_T, plain.target.logp_T, rtol=0, atol=1e-4)
    before = {n: p.detach().clone() for n, p in parts.student.weights.trained.items()}
    update = parts.student.step(0, scored)
    assert update.metrics["grad_norm"] > 0
    assert any(not torch.equal(p, before[n]) for n, p in parts.student.weights.trained.items())


@pytest.mark.parametrize("kind", KINDS)
def test_paths_without_kernels_ignore_boundaries(kind: str) -> None:
    """Why passes are padded (docs/supported-models.md): two sequences in one row, with every
    argument that transformers has for it, which 5.23 refuses. If this fails, packed passes can be
    taken here."""
    model = make_hybrid(kind).eval()
    first, second = [3 + 7 * i % 200 for i in range(13)], [5 + 11 * i % 190 for i in range(21)]
    lengths = torch.tensor([0, len(first), len(first) + len(second)], dtype=torch.int32)
    with torch.no_grad(), suppress(ValueError):
        packed_ND = model(
            input_ids=torch.tensor([first + second]),
            position_ids=torch.tensor([[*range(len(first)), *range(len(second))]]),
            seq_idx=torch.tensor([[0] * len(first) + [1] * len(second)], dtype=torch.int32),
            cu_seq_lens_q=lengths, cu_seq_lens_k=lengths,
            max_length_q=len(second), max_length_k=len(second), use_cache=False,
        ).logits[0]  # fmt: skip
        plain_ND = model(input_ids=torch.tensor([second]), use_cache=False).logits[0]
        assert float((packed_ND[len(first) :] - plain_ND).abs().max()) > 0.1
