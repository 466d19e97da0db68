"""The load-balancing loss of an update against the formula on whole sequences, in float64."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gradients import accumulate, flatten_gradients, make_float64, score_batch
from support.mixtures import NUM_EXPERTS, TOP_K, forced_experts, routers_of, save_mixture
from support.small_runs import small_recipe, write_jsonl
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from courtside.assemble import assemble
from courtside.errors import ModelError
from courtside.runtime import Runtime
from courtside.types import Scored

COEFFICIENT = 0.7


@pytest.fixture
def make_parts(tmp_path: Path, tiny_teacher_folder: Path) -> Callable[..., Runtime]:
    def make(kind: str, **student: Any) -> Runtime:
        folder = save_mixture(tmp_path / kind, kind)
        rows = [{"prompt": "Why? " * n, "split": "train"} for n in (1, 9, 2, 4)]
        return assemble(
            small_recipe(
                folder, tiny_teacher_folder,
                student={"model": str(folder), "dtype": "float32", **student},
                tasks={"kind": "jsonl", "path": str(write_jsonl(tmp_path / "tasks.jsonl", rows))},
                rollout={"samples_per_prompt": 3, "max_new_tokens": 9},
            )
        )  # fmt: skip

    return make


def naive_balance(
    model: Any, scored: list[Scored], *, replays: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """Sequence by sequence: mean over layers of E · Σ_e f_e · P_e; and each layer's logits."""
    logits: dict[int, list[Tensor]] = {}
    hooks = [
        router.register_forward_hook(
            lambda _, args, output, i=i: logits.setdefault(i, []).append(output[0])
        )
        for i, router in enumerate(routers_of(model))
    ]
    experts = []
    with forced_experts(model, scored) if replays else nullcontext(model) as plain:
        for s in scored:
            plain(input_ids=torch.tensor([s.trajectory.token_ids]))
            experts.append(torch.cat(s.trajectory.routed_experts).long())
    for hook in hooks:
        hook.remove()
    # Nothing comes after the last token, so that the update does not process it.
    logits = {i: [x[:-1] for x in of_layer] for i, of_layer in logits.items()}
    experts_NLK = torch.cat(experts)
    by_layer = []
    for i in range(len(logits)):
        logits_NE = torch.cat(logits[i])
        assert len(logits_NE) == len(experts_NLK)
        f_E = torch.nn.functional.one_hot(experts_NLK[:, i], NUM_EXPERTS).sum(1).double().mean(0)
        by_layer.append(NUM_EXPERTS * (f_E * logits_NE.softmax(-1).mean(0)).sum())
    return torch.stack(by_layer).mean(), [torch.cat(logits[i]) for i in range(len(logits))]


@pytest.mark.parametrize(
    ("kind", "student", "tolerance"),
    [
        ("gpt_oss", {}, 1e-8),
        ("gpt_oss", {"gradient_checkpointing": True, "router_replay": True}, 1e-8),
        ("gpt_oss", {"lora": {"rank": 2}}, 1e-8),
        ("qwen3_moe", {"router_replay": True}, 1e-5),  # its router computes in float32
    ],
)
def test_value_and_gradient_are_those_of_the_whole_batch(
    kind: str, student: dict[str, Any], tolerance: float, make_parts: Callable[..., Runtime]
) -> None:
    """Packed with shared prefixes, or padded; in one pass or in many."""
    parts = make_parts(kind, router_aux_loss_coef=COEFFICIENT, **student)
    scored = score_batch(parts, 4)
    passes = parts.student.passes
    assert passes.unshared_reason is None
    model = parts.student.weights.model
    model.set_experts_implementation("eager")  # others take no float64
    make_float64(parts)
    value, _ = naive_balance(model, scored, replays=parts.recipe.student.router_replay)
    trained = parts.student.weights.trained
    gradients = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
    expected = flatten_gradients(
        {
            name: torch.zeros_like(parameter) if gradient is None else gradient
            for (name, parameter), gradient in zip(trained.items(), gradients, strict=True)
        }
    )
    assert float(expected.norm()) > 1e-3 and value.item() > TOP_K

    plain = parts.recipe.model_copy(
        update={"student": parts.recipe.student.model_copy(update={"router_aux_loss_coef": 0.0})}
    )
    for budget, padded in ((1, False), (10**4, False), (60, False), (10**4, True)):
        parts.student.micro_batch_tokens = budget
        parts.student.passes = replace(passes, padding_reason="asked for" if padded else None)
        results = []
        for recipe in (parts.recipe, plain):
            parts.student.recipe = recipe
            flat, metrics = accumulate(parts, scored)
            results.append(flatten_gradients(flat))
        parts.student.recipe = parts.recipe
        assert "router_aux" not in metrics.losses
        difference = (results[0] - results[1]) / COEFFICIENT
        assert float((difference - expected).norm() / expected.norm()) < tolerance
        parts.student.recipe = parts.recipe
        _, metrics = accumulate(parts, scored)
        assert metrics.losses["router_aux"] == pytest.approx(float(value), rel=1e-7)


def test_it_is_transformers_loss_of_each_layer(make_parts: Callable[..., Runtime]) -> None:
    parts = make_parts("mixtral", router_aux_loss_coef=COEFFICIENT)
    scored = score_batch(parts, 4)
    with torch.no_grad():
        _, logits = naive_balance(parts.student.weights.model, scored)
    layers = [load_balancing_loss_func((x,), NUM_EXPERTS, TOP_K) for x in logits]
    expected = float(torch.stack(layers).mean())
    update = parts.student.step(0, scored)
    assert update.components["router_aux"] == pytest.approx(expected, rel=1e-5)
    assert update.loss == pytest.approx(
        update.components["divergence"] + COEFFICIENT * expected, rel=1e-5
    )


def test_off_policy_texts_are_not_part_of_it(make_parts: Callable[..., Runtime]) -> None:
    """Nobody has recorded their experts."""
    parts = make_parts("gpt_oss", router_aux_loss_coef=COEFFICIENT)
    scored = score_batch(parts, 4)
    unrecorded = [
        replace(s, trajectory=s.trajectory.without_experts()) if i % 2 else s
        for i, s in enumerate(scored)
    ]
    with torch.no_grad():
        expected, _ = naive_balance(parts.student.weights.model, scored[::2])
    _, metrics = accumulate(parts, unrecorded)
    assert metrics.losses["router_aux"] == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("deepseek_v3", r"router_aux_loss_coef = 0.7: transformers has no load-balancing loss for "
                        r"DeepseekV3ForCausalLM.*Leave it out"),
    ],
)  # fmt: skip
def test_models_without_one_are_refused(
    kind: str, message: str, make_parts: Callable[..., Runtime]
) -> None:
    with pytest.raises(ModelError, match=message):
        make_parts(kind, router_aux_loss_coef=COEFFICIENT)
