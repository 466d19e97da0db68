"""A step of the student on the device against the same step in float64 on a CPU.

The reference, `textbook`, shares no code with the package but the model itself.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.float64 import in_float64, relative_error
from support.gpu_models import VOCAB_SIZE, save_qwen3
from support.gradients import accumulate, compute_gradients, flatten_gradients, perturb_weights
from support.small_runs import small_recipe
from support.textbook import naive_loss
from torch import Tensor

from courtside.assemble import assemble
from courtside.losses.fused import linear_divergence
from courtside.losses.fused.types import DivergenceSpec
from courtside.runtime import Runtime
from courtside.types import Grade, Message, Scored, Task, Trajectory, Turn

TOP_K = {"kind": "divergence", "support": {"kind": "top_k", "k": 20, "of": "teacher"}}
LOSSES: dict[str, list[dict[str, Any]]] = {
    "reverse": [{"kind": "divergence"}],
    "forward": [{"kind": "divergence", "divergence": "forward_kl"}],
    "jsd": [{"kind": "divergence", "divergence": "jsd", "beta": 0.3}],
    "top k": [{**TOP_K, "support": {**TOP_K["support"], "form": "tail"}}],  # type: ignore[dict-item]
    "mixed": [
        {"kind": "divergence", "weight": 0.5},
        {"kind": "policy_gradient", "weight": 2.0, "baseline": True},
        {"kind": "policy_gradient", "name": "rl", "advantage": "reward"},
    ],
    "variants": [
        {"kind": "divergence", "gate": {"temperature": 2.0}, "normalize": "sequence"},
        {
            "kind": "policy_gradient",
            "name": "rl",
            "advantage": "reward",
            "clip": [0.2, 0.28],
            "dual_clip": 1.5,
            "group_baseline": "leave_one_out",
            "normalize": "constant",
            "normalize_tokens": 50,
        },
    ],
    "in autograd": [{"kind": "divergence", "entropy_aware": {"threshold": 4.0, "weight": 0.7}}],
}
FULL: dict[str, Any] = {}
LORA: dict[str, Any] = {"lora": {"rank": 8}}
HEAD: dict[str, Any] = {"lora": {"rank": 8, "target_modules": ["v_proj", "lm_head"]}}


def make_trajectory(parts: Runtime, number: int) -> Trajectory:
    """Two answers with something between them; lengths and temperatures differ."""
    draw = random.Random(number)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(2, VOCAB_SIZE) for _ in range(count))

    def answer() -> Turn:
        token_ids = ids(draw.randint(3, 25))
        logps = tuple(draw.uniform(-7, -4) for _ in token_ids)
        return Turn(role="assistant", text="", token_ids=token_ids,
                    completion_mask=(True,) * len(token_ids), sampler_logp=logps)  # fmt: skip

    task = Task(
        id=f"task{number % 3}",
        split="train",
        messages=(Message(role="user", content="x" * (1 + number % 3)),),
    )
    prompt, between = parts.renderer.prompt_ids(task.messages), ids(4)
    return Trajectory(
        id=f"t{number}",
        task=task,
        turns=(
            Turn(role="prompt", text="", token_ids=prompt, completion_mask=(False,) * len(prompt)),
            answer(),
            Turn(role="environment", text="", token_ids=between, completion_mask=(False,) * 4),
            answer(),
        ),
        source="student",
        policy_version=0,
        temperature=(0.7, 1.0, 1.3)[number % 3],
        stop="eos",
        grade=Grade(score=draw.random(), passed=True, feedback=""),
    )  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    make = tmp_path_factory.mktemp
    return {
        "tied": save_qwen3(make("tied")),
        "untied": save_qwen3(make("untied"), tied=False, size=96),
        "teacher": save_qwen3(make("teacher"), seed=1, layers=3, size=128, tied=False),
    }


def make_parts(
    folders: dict[str, Path],
    device: torch.device,
    losses: list[dict[str, Any]],
    *,
    dtype: str,
    model: str = "tied",
    **student: Any,
) -> Runtime:
    recipe = small_recipe(
        folders[model],
        folders["teacher"],
        losses=losses,
        student={"model": str(folders[model]), "device": device.type, "dtype": dtype, **student},
        # Several micro-batches; chunks as they are chosen on this device.
        train={"steps": 5, "prompts_per_step": 2, "learning_rate": 1e-3, "micro_batch_tokens": 128},
    )
    parts = assemble(recipe)
    if dtype == "float32":
        parts.teacher.teacher.engine.model.float()
    perturb_weights(parts, 0.02)
    return parts


def textbook_gradients(
    parts: Runtime, scored: list[Scored], losses: list[dict[str, Any]]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    model = in_float64(parts.student.weights.model)
    teacher = in_float64(parts.teacher.teacher.engine.model)
    total, values = naive_loss(losses, scored, model, {parts.teacher.teacher.name: teacher}, model)
    total.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, values


@pytest.mark.parametrize("model", ["tied", "untied"])
@pytest.mark.parametrize("losses", LOSSES)
def test_gradients_in_float32(
    losses: str, model: str, folders: dict[str, Path], device: torch.device
) -> None:
    parts = make_parts(folders, device, LOSSES[losses], dtype="float32", model=model)
    scored = parts.teacher([make_trajectory(parts, n) for n in range(5)])
    ours, metrics = accumulate(parts, scored)
    right, right_values = textbook_gradients(parts, scored, LOSSES[losses])
    assert ours.keys() == right.keys()
    # A GPU's attention in float32 is that of three products of fewer digits.
    limit = 2e-4 if device.type == "cpu" else 1e-3
    assert relative_error(flatten_gradients(ours), flatten_gradients(right)) < limit
    for name, gradient in right.items():
        assert relative_error(ours[name], gradient) < 10 * limit, name
    assert metrics.losses["divergence"] == pytest.approx(right_values["divergence"], rel=1e-4)


@pytest.mark.parametrize("student", [FULL, LORA, HEAD], ids=["all weights", "LoRA", "LoRA, head"])
@pytest.mark.parametrize("losses", ["reverse", "top k", "mixed"])
def test_gradients_in_bfloat16(
    losses: str, student: dict[str, Any], folders: dict[str, Path], device: torch.device
) -> None:
    """Weights of float32 under autocast, or an adapter on a base of bfloat16. How far arithmetic in
    bfloat16 is from float64 at all is what autograd over blocks of logits gives."""
    parts = make_parts(folders, device, LOSSES[losses], dtype="bfloat16", **student)
    scored = parts.teacher([make_trajectory(parts, n) for n in range(5)])
    ours = compute_gradients(parts, scored)
    assert all(gradient.dtype == torch.float32 for gradient in ours.values())
    right, _ = textbook_gradients(parts, scored, LOSSES[losses])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(linear_divergence, "choose_backend", lambda *_, **__: "torch")
        patched.setattr(DivergenceSpec, "closed_form", None)
        plain = compute_gradients(parts, scored)
    error, usual = (
        relative_error(flatten_gradients(gradients), flatten_gradients(right))
        for gradients in (ours, plain)
    )
    # Which 20 tokens of a random teacher are the likeliest is itself a matter of rounding.
    inherent = 0.25 if losses == "top k" else 0.1
    assert error < max(1.5 * usual, 5e-3) and usual < inherent, (error, usual)


@pytest.mark.parametrize("student", [FULL, LORA, HEAD], ids=["all weights", "LoRA", "LoRA, head"])
def test_a_whole_step(
    student: dict[str, Any], folders: dict[str, Path], device: torch.device
) -> None:
    parts = make_parts(folders, device, LOSSES["reverse"], dtype="float32", **student)
    scored = parts.teacher([make_trajectory(parts, n) for n in range(5)])
    right, _ = textbook_gradients(parts, scored, LOSSES["reverse"])
    weights = parts.student.weights.trained
    before = {name: p.detach().cpu().double().clone() for name, p in weights.items()}
    settings = {k: v for k, v in parts.student.optimizer.param_groups[0].items()
                if k in ("betas", "eps", "weight_decay")}  # fmt: skip
    update = parts.student.step(0, scored)
    copies = {name: value.clone().requires_grad_() for name, value in before.items()}
    clip = min(1.0, parts.recipe.train.max_grad_norm / float(flatten_gradients(right).norm()))
    for name, copy in copies.items():
        copy.grad = right[name] * clip
    rate = update.metrics["learning_rate"]
    torch.optim.AdamW(copies.values(), lr=rate, **settings).step()
    changes = {name: p.detach().cpu().double() - before[name] for name, p in weights.items()}
    expected = {name: copy.detach() - before[name] for name, copy in copies.items()}
    # Adam divides by the gradient's size: where that is all rounding, the sign may be too.
    assert relative_error(flatten_gradients(changes), flatten_gradients(expected)) < 0.05
    assert update.metrics["grad_norm"] == pytest.approx(
        float(flatten_gradients(right).norm()), rel=1e-3
    )
    student_logp = torch.tensor([x for s in scored for x in update.student_logp[s.trajectory.id]])
    assert bool(student_logp.isfinite().all())


def test_the_update_is_the_same_with_gradient_checkpointing(
    folders: dict[str, Path], device: torch.device
) -> None:
    updates, folder = [], folders["tied"]
    for checkpointing in (False, True):
        student = {"model": str(folder), "device": device.type, "dtype": "float32"}
        recipe = small_recipe(
            folder,
            folder,
            student=student | {"gradient_checkpointing": checkpointing},
            rollout={"samples_per_prompt": 2, "max_new_tokens": 6},
        )
        parts = assemble(recipe)
        scored = parts.teacher(parts.rollout(parts.tasks.batch(0, 2), 0))
        update = parts.student.step(0, scored)
        updates.append((update.loss, update.metrics["grad_norm"]))
    assert updates[0] == pytest.approx(updates[1], rel=1e-3, abs=1e-6)
