"""What `Student.accumulate` leaves in the weights is the gradient of the textbook formula.

The reference, `textbook`, shares no code with the package but the model itself.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gradients import (
    Gradients,
    accumulate,
    assert_equal_gradients,
    compute_gradients,
    make_float64,
    take_gradients,
)
from support.small_runs import small_recipe
from support.textbook import logp_of, naive_loss
from support.tiny_model import tiny_model, tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from courtside.assemble import assemble
from courtside.errors import RecipeError
from courtside.runtime import Runtime
from courtside.training.loss_terms import find_trained_tokens, make_loss_terms
from courtside.types import Grade, Message, Scored, Task, Trajectory, Turn

# ── a batch with everything in it ────────────────────────────────────────────────────────────────


def make_trajectory(
    parts: Runtime,
    number: int,
    *,
    source: str = "student",
    preference: str | None = None,
    task=None,
) -> Trajectory:
    """Several turns, one of them the environment's; lengths and temperatures differ."""
    draw = random.Random(number)
    task = task or Task(
        id=f"task-{number % 3}",
        split="train",
        messages=(Message(role="user", content="x" * (number % 3 + 1)),),
        tags=(("wide", "plain", "other")[number % 3],),
    )
    prompt = parts.renderer.prompt_ids(task.messages)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(2, 258) for _ in range(count))

    first, between, second = ids(draw.randint(1, 5)), ids(3), ids(draw.randint(2, 6))

    def logps(count: int) -> tuple[float, ...] | None:
        return None if source == "dataset" else tuple(draw.uniform(-7, -4) for _ in range(count))

    return Trajectory(
        id=f"{number:03d}-{preference or source}",
        task=task,
        turns=(
            Turn(role="prompt", text="", token_ids=prompt, completion_mask=(False,) * len(prompt)),
            Turn(role="assistant", text="", token_ids=first, completion_mask=(True,) * len(first),
                 sampler_logp=logps(len(first))),
            Turn(role="environment", text="", token_ids=between, completion_mask=(False,) * 3),
            Turn(role="assistant", text="", token_ids=second, completion_mask=(True,) * len(second),
                 sampler_logp=logps(len(second))),
        ),
        source=source,  # type: ignore[arg-type]
        policy_version=0,
        temperature=(0.7, 1.0, 1.3)[number % 3],
        stop="eos",
        grade=Grade(score=draw.random(), passed=True, feedback=""),
        preference=preference,  # type: ignore[arg-type]
    )  # fmt: skip


def make_batch(parts: Runtime, *, mixed: bool = False) -> list[Trajectory]:
    sources = ("student", "dataset", "teacher") if mixed else ("student",)
    return [make_trajectory(parts, n, source=sources[n % len(sources)]) for n in range(7)]


def make_pairs(parts: Runtime) -> list[Trajectory]:
    """Three pairs; two of them of the same task."""
    batch = []
    for n in (0, 1, 3):
        better = make_trajectory(parts, n, source="dataset", preference="better")
        worse = make_trajectory(parts, n + 10, source="dataset", preference="worse")
        worse = replace(worse, task=better.task, temperature=better.temperature,
                        turns=(better.turns[0], *worse.turns[1:]))  # fmt: skip
        batch += [better, worse]
    return batch


# ── both sides ───────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher with the same vocabulary and another hidden size, not tied."""
    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(5)
    config = tiny_model().config.to_dict() | {"hidden_size": 48, "tie_word_embeddings": False}
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def engines_of(parts: Runtime) -> dict[str, Any]:
    teacher = parts.teacher.teacher
    if teacher is None:
        return {}
    routes = getattr(teacher, "routes", {"": teacher}).values()
    return {route.name: route.engine.model for route in routes}


def naive_gradients(
    parts: Runtime, scored: list[Scored], losses: list[dict[str, Any]]
) -> tuple[Gradients, dict[str, float]]:
    reference = parts.teacher.reference
    model = parts.student.weights.model
    total, values = naive_loss(
        losses, scored, model, engines_of(parts), reference.engine.model if reference else model
    )
    total.backward()
    return take_gradients(parts.student.weights.trained), values


def top_k(of: str, form: str = "tail", **more: Any) -> dict[str, Any]:
    return {
        "kind": "divergence",
        "support": {"kind": "top_k", "k": 9, "of": of, "form": form},
    } | more


ON_POLICY: dict[str, list[dict[str, Any]]] = {
    "reverse": [{"kind": "divergence"}],
    "forward": [{"kind": "divergence", "divergence": "forward_kl"}],
    "jsd": [{"kind": "divergence", "divergence": "jsd", "beta": 0.3}],
    "skew forward": [{"kind": "divergence", "divergence": "skew_forward_kl", "alpha": 0.2}],
    "skew reverse": [{"kind": "divergence", "divergence": "skew_reverse_kl", "alpha": 0.2}],
    "total variation": [{"kind": "divergence", "divergence": "total_variation"}],
    "total variation of both": [top_k("joint", divergence="total_variation")],
    "clip": [{"kind": "divergence", "clip": 0.05}],
    "forward clip": [{"kind": "divergence", "divergence": "forward_kl", "clip": 0.05}],
    "entropy aware": [
        {"kind": "divergence", "entropy_aware": {"threshold": 4.0, "weight": 0.7}}
    ],
    "extrapolate": [{"kind": "divergence", "extrapolate": 1.5}],
    "tail of teacher": [top_k("teacher")],
    "tail of student": [top_k("student", divergence="forward_kl")],
    "tail of both": [top_k("joint")],
    "tail jsd": [top_k("joint", divergence="jsd", beta=0.5)],
    "stop gradient": [top_k("teacher", "stop_gradient")],
    "stop gradient of both": [top_k("joint", "stop_gradient")],
    "renormalized": [top_k("student", "renormalized")],
    "teacher gap": [{"kind": "policy_gradient"}],
    "no ratio": [{"kind": "policy_gradient", "ratio": "none"}],
    "truncate": [{"kind": "policy_gradient", "truncate": 1.1}],
    "clipped ratio": [{"kind": "policy_gradient", "clip": [0.2, 0.3]}],
    "baseline": [{"kind": "policy_gradient", "baseline": True}],
    "gap extrapolated": [{"kind": "policy_gradient", "extrapolate": 1.7}],
    "reward": [{"kind": "policy_gradient", "advantage": "reward"}],
    "reward over std": [{"kind": "policy_gradient", "advantage": "reward", "scale_by_std": True}],
    "leave one out": [
        {"kind": "policy_gradient", "advantage": "reward", "group_baseline": "leave_one_out"}
    ],
    "dual clip": [
        {"kind": "policy_gradient", "advantage": "reward", "clip": [0.2, 0.3], "dual_clip": 1.5}
    ],
    "each turn": [{"kind": "divergence", "normalize": "turn"}],
    "each sequence": [{"kind": "policy_gradient", "advantage": "reward", "normalize": "sequence"}],
    "constant": [{"kind": "divergence", "normalize": "constant", "normalize_tokens": 20}],
    "gated": [
        {"kind": "divergence", "gate": {"temperature": 0.5}},
        {"kind": "policy_gradient", "gate": {"direction": "rejected"}, "normalize": "sequence"},
    ],
    "gap and reward": [
        {"kind": "policy_gradient", "name": "gap", "weight": 0.5},
        {"kind": "policy_gradient", "name": "rl", "advantage": "reward", "clip": [0.2, 0.28],
         "group_baseline": "leave_one_out", "normalize": "sequence"},
    ],
}  # fmt: skip

MIX: list[dict[str, Any]] = [
    {"kind": "divergence", "on": "student", "weight": 0.5},
    {"kind": "policy_gradient", "on": "student", "weight": 2.0, "baseline": True},
    {"kind": "policy_gradient", "name": "rl", "on": "student", "advantage": "reward"},
    {"kind": "cross_entropy", "on": "dataset", "weight": 0.3},
    top_k("teacher", name="off", on="dataset") | {"divergence": "forward_kl"},
]
"""Each on its own rows: a student's rows have no data, a data set's no sampler."""

HALF = {"samples_per_prompt": 2, "max_new_tokens": 4, "student_fraction": 0.5}


def check(parts: Runtime, scored: list[Scored], losses: list[dict[str, Any]]) -> Gradients:
    ours, metrics = accumulate(parts, scored)
    naive, expected = naive_gradients(parts, scored, losses)
    assert_equal_gradients(ours, naive)
    if not any(loss["kind"] == "policy_gradient" for loss in losses):
        assert metrics.losses == pytest.approx(expected, rel=1e-9)
    return ours


@pytest.mark.parametrize("name", ON_POLICY)
def test_gradient_is_the_textbooks(name, tiny_folder, tiny_teacher_folder):
    losses = ON_POLICY[name]
    teacher = None if losses[0].get("advantage") == "reward" else tiny_teacher_folder
    parts = make_float64(assemble(small_recipe(tiny_folder, teacher, losses=losses)))
    scored = parts.teacher(make_batch(parts))
    check(parts, scored, losses)
    if name == "entropy aware":
        (model,) = engines_of(parts).values()
        q_TV = torch.cat([logp_of(model, s.trajectory)[0] for s in scored])
        entropy_T = -(q_TV.exp() * q_TV).sum(-1)
        assert entropy_T.min() < 4.0 < entropy_T.max(), "a threshold that parts the positions"


def test_values_of_policy_gradients(tiny_folder, tiny_teacher_folder):
    """Only where surrogate and textbook agree in value: −A·log π, and the clipped one."""
    for losses in (ON_POLICY["no ratio"], ON_POLICY["clipped ratio"], ON_POLICY["truncate"]):
        parts = make_float64(
            assemble(small_recipe(tiny_folder, tiny_teacher_folder, losses=losses))
        )
        scored = parts.teacher(make_batch(parts))
        _, metrics = accumulate(parts, scored)
        _, expected = naive_gradients(parts, scored, losses)
        assert metrics.losses == pytest.approx(expected, rel=1e-9)


def test_cross_entropy_on_data(tiny_folder):
    losses = [{"kind": "cross_entropy"}]
    recipe = small_recipe(tiny_folder, losses=losses, tasks={"kind": "arithmetic"},
                          rollout={"student_fraction": 0.0})  # fmt: skip
    parts = make_float64(assemble(recipe))
    batch = [make_trajectory(parts, n, source="dataset") for n in range(5)]
    check(parts, parts.teacher(batch), losses)


def test_cross_entropy_on_own_samples_must_be_asked_for(tiny_folder):
    losses = [{"kind": "cross_entropy", "on": "student", "self_imitation": True}]
    parts = make_float64(assemble(small_recipe(tiny_folder, losses=losses)))
    (note,) = (note for note in parts.notes if "self_imitation" in note)
    assert "losses[0] (cross_entropy)" in note and "expected gradient is zero" in note
    check(parts, parts.teacher(make_batch(parts)), losses)
    with pytest.raises(RecipeError, match=r"degrades it.*self_imitation = true"):
        small_recipe(tiny_folder, losses=[{"kind": "cross_entropy", "on": "student"}])


@pytest.mark.parametrize("budget", [1, 8192])
def test_a_kl_to_the_reference_in_the_reward(budget, tiny_folder):
    """Also where a group's rewards are equal: there the KL alone is left."""
    loss = {"kind": "policy_gradient", "advantage": "reward", "clip": [0.2, 0.3],
            "zero_variance_groups": "drop"}  # fmt: skip
    rewards = [{"kind": "grade"}, {"kind": "reference_kl", "weight": 0.3}]
    recipe = small_recipe(
        tiny_folder, losses=[loss], rewards=rewards, train={"micro_batch_tokens": budget}
    )
    parts = make_float64(assemble(recipe))
    batch = [
        replace(t, rewards={"grade": t.grade.score})
        if t.task.id != "task-0"
        else replace(t, grade=Grade(score=0.5, passed=False), rewards={"grade": 0.5})
        for t in make_batch(parts)
    ]
    scored = parts.teacher(batch)
    ours = check(parts, scored, [loss | {"reference_kl": 0.3}])
    without, _ = naive_gradients(parts, scored, [loss])
    assert max(float((ours[n] - without[n]).abs().max()) for n in ours) > 1e-4
    update = parts.student.step(0, scored)
    assert update.metrics["reward/zero_variance_groups"] == 1
    assert update.metrics["kl_estimate/reference"] != 0


def preference_recipe(student: Path, **changes: Any) -> Any:
    losses = [{"kind": "preference", "beta": 0.4}]
    tasks = {"kind": "arithmetic"}
    return small_recipe(
        student, losses=losses, tasks=tasks, rollout={"student_fraction": 0.0}, **changes
    )


@pytest.mark.parametrize("budget", [1, 8192])
def test_preference_is_dpo_over_pairs(budget, tiny_folder):
    """Also when a task is in the batch twice."""
    recipe = preference_recipe(
        tiny_folder, train={"micro_batch_tokens": budget, "logits_chunk_tokens": 3}
    )
    parts = make_float64(assemble(recipe))
    scored = parts.teacher(make_pairs(parts))
    losses = [{"kind": "preference", "beta": 0.4}]
    check(parts, scored, losses)
    assert make_loss_terms(recipe.losses, recipe.loss_names(), scored)[0].denominator == 3


def test_a_pair_of_which_the_teacher_scores_one_half(tiny_folder, tiny_teacher_folder):
    losses = [{"kind": "preference", "beta": 0.4}, {"kind": "divergence", "weight": 0.2}]
    recipe = small_recipe(tiny_folder, tiny_teacher_folder, losses=losses,
                          tasks={"kind": "arithmetic"},
                                 rollout={"student_fraction": 0.0})  # fmt: skip
    parts = make_float64(assemble(recipe))
    scored = parts.teacher(make_pairs(parts))
    check(parts, [replace(scored[0], target=None), *scored[1:]], losses)


MIXED = [
    {},
    {"micro_batch_tokens": 1},
    {"micro_batch_tokens": 100, "logits_chunk_tokens": 5},
    {"logits_chunk_tokens": 1},
]


@pytest.mark.parametrize("train", MIXED, ids=str)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_mix_does_not_depend_on_the_cut(train, checkpointing, tiny_folder, tiny_teacher_folder):
    recipe = small_recipe(
        tiny_folder,
        tiny_teacher_folder,
        student={"model": str(tiny_folder), "gradient_checkpointing": checkpointing},
        tasks={"kind": "arithmetic"},
        rollout=HALF,
        losses=MIX,
        train=train,
    )
    parts = make_float64(assemble(recipe))
    scored = parts.teacher(make_batch(parts, mixed=True))
    gradients = check(parts, scored, MIX)
    backwards = compute_gradients(parts, scored[::-1])
    assert_equal_gradients(backwards, gradients)


NORMALIZED: list[dict[str, Any]] = [
    {"kind": "divergence", "normalize": "constant", "normalize_tokens": 6, "weight": 0.5},
    {"kind": "policy_gradient", "name": "rl", "advantage": "reward", "normalize": "sequence",
     "group_baseline": "leave_one_out", "clip": [0.2, 0.3], "dual_clip": 1.5},
    {"kind": "policy_gradient", "name": "gap", "normalize": "turn", "weight": 0.3},
]  # fmt: skip


@pytest.mark.parametrize("train", MIXED, ids=str)
def test_no_denominator_depends_on_the_cut(train, tiny_folder, tiny_teacher_folder):
    recipe = small_recipe(tiny_folder, tiny_teacher_folder, losses=NORMALIZED, train=train)
    parts = make_float64(assemble(recipe))
    scored = parts.teacher(make_batch(parts))
    ours = check(parts, scored, NORMALIZED)
    terms = make_loss_terms(recipe.losses, recipe.loss_names(), scored)
    num_turns = sum(len(set(s.trajectory.turn_of)) for s in scored)
    assert [term.denominator for term in terms] == [6 * len(scored), len(scored), num_turns]
    unbounded = [{k: v for k, v in loss.items() if k != "dual_clip"} for loss in NORMALIZED]
    other, _ = naive_gradients(parts, scored, unbounded)
    assert max(float((ours[n] - other[n]).abs().max()) for n in ours) > 1e-6, "a bound that acts"


def test_metrics_do_not_depend_on_the_cut(tiny_folder, tiny_teacher_folder):
    metrics = []
    for train in MIXED:
        recipe = small_recipe(tiny_folder, tiny_teacher_folder, tasks={"kind": "arithmetic"},
                              rollout=HALF, losses=MIX, train=train)  # fmt: skip
        parts = make_float64(assemble(recipe))
        scored = parts.teacher(make_batch(parts, mixed=True))
        update = parts.student.step(0, scored)
        metrics.append(dict(update.metrics) | dict(update.components))
    for other in metrics[1:]:
        assert other == pytest.approx(metrics[0], rel=1e-9)


def test_trajectories_of_others_change_nothing(tiny_folder, tiny_teacher_folder):
    """A component's mean is over its own tokens, whatever else is in the batch."""
    losses = [{"kind": "divergence", "on": "student"}]
    recipe = small_recipe(tiny_folder, tiny_teacher_folder, tasks={"kind": "arithmetic"},
                          rollout=HALF, losses=losses)  # fmt: skip
    parts = make_float64(assemble(recipe))
    scored = parts.teacher(make_batch(parts, mixed=True))
    alone = [s for s in scored if s.trajectory.source == "student"]
    assert 0 < len(alone) < len(scored)
    assert_equal_gradients(compute_gradients(parts, scored), compute_gradients(parts, alone))


@pytest.mark.parametrize("kind", ["divergence", "policy_gradient"])
def test_where_no_teacher_spoke_nothing_is_trained(kind, tiny_folder, tiny_teacher_folder):
    """Missing log-probs are NaN; they must not reach the gradient of the others."""
    losses = [{"kind": kind}]
    parts = make_float64(assemble(small_recipe(tiny_folder, tiny_teacher_folder, losses=losses)))
    scored = parts.teacher(make_batch(parts))
    scored = [replace(s, target=None) if i % 2 else s for i, s in enumerate(scored)]
    check(parts, scored, losses)


def test_routed_teachers_of_different_width(tiny_folder, tiny_teacher_folder, wide_folder):
    losses = [{"kind": "divergence"}, {"kind": "policy_gradient"}]
    routes = {
        "wide": {"kind": "model", "model": str(wide_folder)},
        "plain": {"kind": "model", "model": str(tiny_teacher_folder)},
    }
    for budget in (60, 8192):
        recipe = small_recipe(
            tiny_folder,
            losses=losses,
            teacher={"kind": "routes", "routes": routes, "default": "plain"},
            train={"micro_batch_tokens": budget},
        )
        parts = make_float64(assemble(recipe))
        scored = parts.teacher(make_batch(parts))
        assert len({s.target.hidden_TD.shape[1] for s in scored}) == 2
        check(parts, scored, losses)


@pytest.mark.parametrize("budget", [60, 8192])
@pytest.mark.parametrize("weights", ["equal", {"wide": 3.0, "plain": 0.5}], ids=str)
def test_each_route_is_averaged_on_its_own(
    weights, budget, tiny_folder, tiny_teacher_folder, wide_folder
):
    losses = [
        {"kind": "divergence", "route_weights": weights},
        {"kind": "policy_gradient", "normalize": "sequence", "route_weights": weights,
         "weight": 0.4},
    ]  # fmt: skip
    routes = {
        "wide": {"kind": "model", "model": str(wide_folder)},
        "plain": {"kind": "model", "model": str(tiny_teacher_folder)},
    }
    recipe = small_recipe(
        tiny_folder,
        losses=losses,
        teacher={"kind": "routes", "routes": routes, "default": "plain"},
        train={"micro_batch_tokens": budget},
    )
    parts = make_float64(assemble(recipe))
    scored = parts.teacher(make_batch(parts))
    ours = check(parts, scored, losses)
    together, _ = naive_gradients(
        parts, scored, [{k: v for k, v in x.items() if k != "route_weights"} for x in losses]
    )
    assert max(float((ours[n] - together[n]).abs().max()) for n in ours) > 1e-4
    # A route that a step does not have leaves the others with the whole weight.
    alone = [s for s in scored if s.trajectory.task.tags == ("wide",)]
    check(parts, alone, losses)


def test_rows_are_ordered_the_same_in_every_process(tiny_folder, tiny_teacher_folder, wide_folder):
    """Objects lie elsewhere in another process; the order of a sum of floats must not follow."""
    routes = {
        "wide": {"kind": "model", "model": str(wide_folder)},
        "plain": {"kind": "model", "model": str(tiny_teacher_folder)},
    }
    recipe = small_recipe(
        tiny_folder, teacher={"kind": "routes", "routes": routes, "default": "plain"}
    )
    parts = assemble(recipe)
    scored = parts.teacher(make_batch(parts))
    heads = {"wide": scored[0].target.head, "plain": scored[1].target.head}
    assert heads["wide"] is not heads["plain"]
    orders = []
    for swap in (False, True):
        # The same two teachers, with their heads at each other's address.
        first, second = sorted(heads.values(), key=id, reverse=swap)
        swapped = {id(heads["wide"]): first, id(heads["plain"]): second}
        swapped_scored = [
            replace(s, target=replace(s.target, head=swapped[id(s.target.head)])) for s in scored
        ]
        trained = find_trained_tokens(
            make_loss_terms(recipe.losses, recipe.loss_names(), swapped_scored)
        )
        micros = parts.student._micro_batches(swapped_scored, trained)
        orders.append([[s.trajectory.id for s in micro] for micro in micros])
    assert orders[0] == orders[1]


def test_a_tied_embedding_gets_the_gradient_of_both_its_uses(tiny_folder, tiny_teacher_folder):
    parts = make_float64(assemble(small_recipe(tiny_folder, tiny_teacher_folder)))
    scored = parts.teacher(make_batch(parts))
    tied = compute_gradients(parts, scored)
    model = parts.student.weights.model
    name = "model.embed_tokens.weight"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    total, _ = naive_loss([{"kind": "divergence"}], scored, model, engines_of(parts), model)
    total.backward()
    as_input, as_output = model.model.embed_tokens.weight.grad, model.lm_head.weight.grad
    assert as_input.abs().max() > 1e-4 and as_output.abs().max() > 1e-4
    torch.testing.assert_close(tied[name], as_input + as_output, rtol=1e-8, atol=1e-11)
