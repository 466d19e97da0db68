"""Whole steps of models with windows, sinks, soft caps: the gradient of the update, live hints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import windowed
from support.gradients import (
    accumulate,
    flatten_gradients,
    perturb_weights,
    score_batch,
    take_gradients,
)
from support.small_runs import small_recipe, write_jsonl
from support.textbook import naive_loss
from support.tiny_model import tiny_tokenizer

from courtside.assemble import assemble
from courtside.runtime import Runtime
from courtside.types import Hint

Save = Callable[[str], Path]


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Save:
    folders: dict[str, Path] = {}

    def save_windowed(kind: str) -> Path:
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp(kind)
            windowed(kind, max_position_embeddings=2048).save_pretrained(folders[kind])
            tiny_tokenizer().save_pretrained(folders[kind])
        return folders[kind]

    return save_windowed


def relative_error(gradients: torch.Tensor, expected: torch.Tensor) -> float:
    return float((gradients - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        ("gemma2", {"rank": 2}), ("gemma3_text", None), ("gemma4_text", None), ("gpt_oss", None),
        ("gpt_oss", {"rank": 2}),
    ],
)  # fmt: skip
def test_gradients_are_those_of_one_plain_pass_per_sequence(
    kind: str, lora: dict[str, Any] | None, save: Save, tiny_teacher_folder: Path, tmp_path: Path
) -> None:
    """Packed, with prompts that samples share."""
    folder = save(kind)
    lines = [{"prompt": "Why? " * n, "split": "train"} for n in (1, 9, 2, 4)]
    parts = assemble(
        small_recipe(
            folder, tiny_teacher_folder,
            student={"model": str(folder), **({"lora": lora} if lora else {})},
            tasks={"kind": "jsonl", "path": str(write_jsonl(tmp_path / "tasks.jsonl", lines))},
        )
    )  # fmt: skip
    assert parts.student.passes.padding_reason is None
    assert parts.student.passes.unshared_reason is None
    perturb_weights(parts, 0.02)
    scored = score_batch(parts, 4)
    model, teacher = parts.student.weights.model, parts.teacher.teacher
    losses: list[dict[str, Any]] = [{"kind": "divergence"}]
    total, _ = naive_loss(losses, scored, model, {teacher.name: teacher.engine.model}, model)
    total.backward()
    expected = flatten_gradients(take_gradients(parts.student.weights.trained))
    assert float(expected.norm()) > 1e-3
    for budget in (1, 10**4):
        parts.student.micro_batch_tokens = budget
        gradients, _ = accumulate(parts, scored)
        assert relative_error(flatten_gradients(gradients), expected) < 1e-4


def hinted(parts: Runtime) -> Any:
    trajectories = parts.rollout(parts.tasks.batch(0, 2), 0)
    hints = [
        Hint(trajectory=t.id, turn=turn, text=f"Look again, {turn}.", source="rules")
        for t in trajectories
        for turn in [i for i, t_turn in enumerate(t.turns) if t_turn.role == "assistant"][:3]
    ]
    return parts.teacher(trajectories, hints)


def test_live_hints_are_branches_of_the_update_s_pass(
    save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Episodes of several turns; the same gradients where every hint is a sequence of its own."""
    recipe = small_recipe(
        save("gemma3_text"),
        tasks={"kind": "toolbox", "turns": 3, "num_tools": 2},
        rollout={"samples_per_prompt": 2, "max_new_tokens": 6},
        reader={"kind": "rules"},
        hints={"harmful": "train"},
        teacher={"kind": "self", "weights": "live"},
        losses=[{"kind": "divergence", "on": "hinted_turns"}],
    )
    results = []
    for separate in (False, True):
        if separate:
            monkeypatch.setattr(
                "courtside.training.hint_branches.probe_tree_scoring", lambda *args: "asked for"
            )
            monkeypatch.setattr(
                "courtside.engines.local.probe_tree_scoring", lambda *args: "asked for"
            )
        parts = assemble(recipe)
        scored = hinted(parts)
        assert any(s.deferred is not None for s in scored) != separate
        gradients, _ = accumulate(parts, scored)
        results.append(flatten_gradients(gradients))
    assert float(results[1].norm()) > 1e-4
    assert relative_error(*results) < 1e-4
