"""What a step reports, and what it does when a number is not finite."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from support.small_runs import small_recipe

from courtside.assemble import assemble
from courtside.errors import NotFiniteError, RunError
from courtside.report.alarms import check_empty_update
from courtside.runtime import Runtime
from courtside.types import Grade, Scored


@pytest.fixture
def parts(tiny_folder, tiny_teacher_folder) -> Runtime:
    return assemble(small_recipe(tiny_folder, tiny_teacher_folder))


def batch_of(parts: Runtime, step: int = 0) -> list[Scored]:
    return parts.teacher(parts.rollout(parts.tasks.batch(step, 2), step))


def weights_of(parts: Runtime) -> list[torch.Tensor]:
    return [p.detach().clone() for p in parts.student.weights.trained.values()]


def token_logps(model, trajectory) -> torch.Tensor:
    """Log-probs over the vocabulary at the completion tokens, in float64."""
    ids = torch.tensor(trajectory.token_ids)
    at = torch.tensor([i for i, c in enumerate(trajectory.completion_mask) if c])
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0, at - 1].double()
    return (logits / trajectory.temperature).log_softmax(-1)


def test_the_reported_numbers_by_hand(tiny_folder, tiny_teacher_folder):
    recipe = small_recipe(
        tiny_folder,
        tiny_teacher_folder,
        rollout={"samples_per_prompt": 2, "max_new_tokens": 6, "temperature": 0.8},
        losses=[{"kind": "divergence", "divergence": "forward_kl", "weight": 2.0}],
        train={"logits_chunk_tokens": 5},
    )
    parts = assemble(recipe)
    scored = batch_of(parts)
    p_NV = torch.cat([token_logps(parts.engine.model, s.trajectory) for s in scored])
    teacher = parts.teacher.teacher.engine.model
    q_NV = torch.cat([token_logps(teacher, s.trajectory) for s in scored])
    ids_N = torch.tensor([i for s in scored for i in s.trajectory.completion_ids])
    p_N, q_N = p_NV[range(len(ids_N)), ids_N], q_NV[range(len(ids_N)), ids_N]
    mu_N = torch.tensor([x for s in scored for x in s.trajectory.sampler_logp]).double()

    update = parts.student.step(0, scored)
    near = partial(pytest.approx, rel=1e-4)
    metrics = update.metrics
    forward = float((q_NV.exp() * (q_NV - p_NV)).sum(-1).mean())
    assert update.components == {"divergence": near(forward)}
    assert update.loss == near(2 * forward)
    assert update.num_tokens == {"divergence": len(ids_N)}
    assert metrics["kl"] == near(float((p_NV.exp() * (p_NV - q_NV)).sum(-1).mean()))
    assert metrics["kl_estimate"] == near(float((mu_N - q_N).mean()))
    assert metrics["entropy/student"] == near(-float((p_NV.exp() * p_NV).sum(-1).mean()))
    assert metrics["entropy/teacher"] == near(-float((q_NV.exp() * q_NV).sum(-1).mean()))
    assert metrics["teacher_gap/mean"] == near(float((q_N - p_N).mean()))
    assert metrics["teacher_gap/negative"] == near(float((q_N < p_N).double().mean()))
    assert metrics["sampler/logp_diff"] == pytest.approx(float((p_N - mu_N).abs().mean()), abs=1e-5)
    assert metrics["sampler/ratio_max"] == near(1.0)
    for s in scored:
        expected = words_before = p_N[: s.trajectory.num_completion_tokens]
        p_N = p_N[len(words_before) :]
        assert update.student_logp[s.trajectory.id] == near(expected.tolist())


def test_a_component_without_tokens_is_not_zero(tiny_folder, tiny_teacher_folder):
    recipe = small_recipe(
        tiny_folder,
        tiny_teacher_folder,
        tasks={"kind": "arithmetic"},
        rollout={"samples_per_prompt": 2, "max_new_tokens": 4, "student_fraction": 0.5},
        losses=[{"kind": "divergence"}, {"kind": "cross_entropy", "on": "dataset"}],
    )
    parts = assemble(recipe)
    scored = [s for s in batch_of(parts) if s.trajectory.source == "student"]
    update = parts.student.step(0, scored)
    assert math.isnan(update.components["cross_entropy"])
    assert update.num_tokens["cross_entropy"] == 0
    assert update.loss == update.components["divergence"] > 0


@pytest.mark.parametrize("empty", ["no trajectories", "no teacher"])
def test_an_empty_batch_is_no_zero_loss(empty, parts):
    scored = (
        [] if empty == "no trajectories" else [replace(s, target=None) for s in batch_of(parts)]
    )
    before = weights_of(parts)
    update = parts.student.step(0, scored)
    assert update.num_tokens == {"divergence": 0} and math.isnan(update.components["divergence"])
    with pytest.raises(RunError, match=r"anything to train on.*not a zero loss"):
        check_empty_update(parts.recipe, scored, update)
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(parts), strict=True))


@pytest.mark.parametrize(
    ("kind", "step", "num_passed", "stops"),
    [
        ("feedback", 0, 4, False),  # nothing went wrong
        ("feedback", 0, 3, True),  # one did, and the grader says nothing about it
        ("feedback", 1, 3, False),
        ("sibling", 0, 0, True),
        ("sibling", 1, 0, False),
        ("system", 1, 4, True),
    ],
)
def test_a_batch_that_needs_no_correction_changes_no_weight(
    kind: str, step: int, num_passed: int, stops: bool, tiny_folder: Path
) -> None:
    context = {"kind": kind} | ({"text": "Be brief."} if kind == "system" else {})
    parts = assemble(small_recipe(tiny_folder, teacher={"kind": "self", "context": context}))
    grades = [Grade(score=float(n < num_passed), passed=n < num_passed) for n in range(4)]
    sampled = parts.rollout(parts.tasks.batch(step, 2), step)
    trajectories = [replace(t, grade=grade) for t, grade in zip(sampled, grades, strict=True)]
    scored = [replace(s, target=None) for s in parts.teacher(trajectories)]
    before = weights_of(parts)
    update = parts.student.step(step, scored)
    with pytest.raises(RunError, match="not a zero loss") if stops else nullcontext():
        check_empty_update(parts.recipe, scored, update)
    assert update.metrics["grad_norm"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(parts), strict=True))


def spoil_student(parts: Runtime, scored: list[Scored]) -> list[Scored]:
    next(iter(parts.student.weights.trained.values())).data[0, 0] = math.nan
    return scored


def spoil_teacher(parts: Runtime, scored: list[Scored]) -> list[Scored]:
    """Tokens that the teacher excludes and the student does not."""
    target = scored[-1].target
    module = torch.nn.Linear(target.hidden_TD.shape[1], target.head.vocab_size)
    module.bias.data[:] = -math.inf
    module.bias.data[0] = 0.0
    target.head.module = module
    return scored


@pytest.mark.parametrize("spoil", [spoil_student, spoil_teacher])
def test_what_is_not_finite_changes_no_weight(spoil, parts):
    parts.student.step(0, batch_of(parts))  # so that the optimizer has its moments
    scored = spoil(parts, batch_of(parts, 1))
    before = weights_of(parts)
    moments = [
        {k: v.clone() for k, v in state.items()} for state in parts.student.optimizer.state.values()
    ]
    with pytest.raises(
        NotFiniteError, match=r"step 1: the loss 'divergence' is not finite; no wei"
    ):
        parts.student.step(1, scored)
    after = weights_of(parts)
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, after, strict=True)
    )
    for old, state in zip(moments, parts.student.optimizer.state.values(), strict=True):
        assert all(torch.equal(old[key], state[key]) for key in old)
    assert all(p.grad is None for p in parts.student.weights.trained.values())
    assert not parts.student.weights.model.training


def test_a_policy_gradient_with_an_impossible_token(tiny_folder, tiny_teacher_folder):
    losses = [{"kind": "policy_gradient"}]
    parts = assemble(small_recipe(tiny_folder, tiny_teacher_folder, losses=losses))
    scored = batch_of(parts)
    target = scored[0].target
    target.logp_T[0] = -math.inf
    with pytest.raises(NotFiniteError, match="'policy_gradient'"):
        parts.student.step(0, scored)


def test_a_finite_loss_with_an_infinite_gradient_is_caught(parts):
    parameter = parts.student.weights.trained["model.norm.weight"]
    parameter.register_hook(lambda gradient: gradient * math.inf)
    before = weights_of(parts)
    with pytest.raises(NotFiniteError, match="step 0: the gradient is not finite"):
        parts.student.step(0, batch_of(parts))
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(parts), strict=True))


def test_an_infinite_loss_is_caught_even_where_its_gradient_is_finite(parts, monkeypatch):
    real = parts.student.accumulate

    def accumulate(step, scored, chosen, metrics):
        logps = real(step, scored, chosen, metrics)
        metrics.add_loss("divergence", torch.tensor(math.inf))
        return logps

    monkeypatch.setattr(parts.student, "accumulate", accumulate)
    with pytest.raises(NotFiniteError, match="the loss 'divergence' is not finite"):
        parts.student.step(0, batch_of(parts))


def test_dropout_follows_from_the_step_and_leaves_the_callers_numbers_alone(
    tiny_folder, tiny_teacher_folder
):
    student = {"model": str(tiny_folder), "lora": {"rank": 4, "dropout": 0.5}}
    recipe = small_recipe(tiny_folder, tiny_teacher_folder, student=student)
    logps = []
    for step, seed in ((0, 1), (0, 2), (1, 1)):
        parts = assemble(recipe)
        for name, parameter in parts.student.weights.trained.items():
            if "lora_B" in name:
                parameter.data.fill_(0.1)
        scored = batch_of(parts)
        torch.manual_seed(seed)
        state = torch.random.get_rng_state()
        logps.append(parts.student.step(step, scored).student_logp)
        assert torch.equal(state, torch.random.get_rng_state())
    assert logps[0] == logps[1] != logps[2]
