"""Every way of distilling does what it is for: on tiny models, in a second, on held-out prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_runs import small_recipe, write_jsonl

from courtside.assemble import assemble
from courtside.chat.messages import insert_context
from courtside.runtime import Runtime
from courtside.types import Trajectory, Update

CONTEXT = "ANSWER LOUDLY"


@pytest.fixture(scope="module")
def short_tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = write_jsonl(tmp_path_factory.mktemp("short") / "tasks.jsonl", two_letters())
    return {"kind": "jsonl", "path": str(path)}


def two_letters() -> list[dict[str, Any]]:
    """Short questions; every fourth is held out."""
    letters = "abcdefgh"
    return [
        {
            "prompt": a + b,
            "completion": (b + a) * 2,
            "split": "test" if (i + j) % 4 == 3 else "train",
        }
        for i, a in enumerate(letters)
        for j, b in enumerate(letters)
    ]


def recipe(student: Path, tasks: dict[str, Any], /, *, lr: float = 1e-2, **changes: Any) -> Any:
    defaults = {
        "tasks": tasks,
        "rollout": {"samples_per_prompt": 2, "max_new_tokens": 4},
        "train": {"steps": 100, "prompts_per_step": 8, "learning_rate": lr},
    }
    return small_recipe(student, **(defaults | changes))


def train(parts: Runtime, steps: int) -> list[tuple[list[Trajectory], Update]]:
    """The loop, without a folder."""
    done = []
    for step in range(steps):
        trajectories = parts.rollout(
            parts.tasks.batch(step, parts.recipe.train.prompts_per_step), step
        )
        scored = parts.teacher(trajectories)
        done.append((trajectories, parts.student.step(step, scored)))
        for average in parts.averages.values():
            average.update()
    return done


def logp_of_last(model: Any, ids: tuple[int, ...], num_last: int) -> torch.Tensor:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, -num_last - 1 : -1]
    return logits.double().log_softmax(-1)


def held_out_kl(parts: Runtime, teacher: Any, context: str | None = None) -> float:
    """KL(student ‖ teacher) on the student's own answers to prompts it never trained on."""
    tasks = parts.tasks.held_out("test", 12)
    kls = []
    for trajectory in parts.rollout(tasks, 9999):
        answer = trajectory.turns[1].token_ids
        p_TV = logp_of_last(parts.engine.model, trajectory.token_ids, len(answer))
        messages = trajectory.task.messages
        if context:
            messages = insert_context(messages, context, "system")
        q_TV = logp_of_last(teacher, parts.renderer.prompt_ids(messages) + answer, len(answer))
        kls.append((p_TV.exp() * (p_TV - q_TV)).sum(-1))
    return float(torch.cat(kls).mean())


@pytest.mark.parametrize(
    ("loss", "samples", "steps"),
    [
        ({"kind": "divergence"}, 2, 12),
        ({"kind": "divergence", "support": {"kind": "top_k", "k": 32}}, 2, 12),
        ({"kind": "policy_gradient"}, 4, 24),
        ({"kind": "policy_gradient", "baseline": True}, 4, 24),
    ],
    ids=["full", "top-k", "sampled", "baseline"],
)
def test_on_policy_distillation(
    loss, samples, steps, tiny_folder, tiny_teacher_folder, short_tasks
):
    parts = assemble(
        recipe(
            tiny_folder,
            short_tasks,
            rollout={"samples_per_prompt": samples, "max_new_tokens": 4},
            teacher={"kind": "model", "model": str(tiny_teacher_folder)},
            losses=[loss],
        )
    )
    teacher = parts.teacher.teacher.engine.model
    before = held_out_kl(parts, teacher)
    train(parts, steps)
    after = held_out_kl(parts, teacher)
    assert before > 2
    assert after < 0.85 * before


@pytest.mark.parametrize(
    ("weights", "lora", "share"),
    [("frozen", None, 0.7), ("frozen", {"rank": 8}, 0.7), ("ema", None, 0.2), ("live", None, 0.1)],
    ids=["frozen", "adapter", "ema", "live"],
)
def test_self_distillation_makes_a_context_unnecessary(
    weights, lora, share, tiny_folder, short_tasks
):
    student = {"model": str(tiny_folder)} | ({"lora": lora} if lora else {})
    teacher_config: dict[str, Any] = {"kind": "self", "weights": weights}
    teacher_config["context"] = {"kind": "system", "text": CONTEXT}
    if weights == "ema":
        teacher_config["ema_decay"] = 0.9
    parts = assemble(
        recipe(tiny_folder, short_tasks, lr=1e-2, student=student, teacher=teacher_config)
    )
    weights_then = parts.student.weights.copy()
    before = held_out_kl(parts, weights_then, CONTEXT)
    train(parts, 20)
    # What it was meant to learn: from its old self with the context, or, where the teacher moves
    # along, from itself with it.
    teacher = weights_then if weights == "frozen" else parts.engine.model
    after = held_out_kl(parts, teacher, CONTEXT)
    assert before > 0.3
    assert after < share * before


def nll(parts: Runtime, text: str = "completion") -> float:
    """Of the held-out texts, per token."""
    total, count = 0.0, 0
    for task in parts.tasks.held_out("test", 12):
        answer = parts.renderer.completion_ids(task.messages, getattr(task, text))
        ids = parts.renderer.prompt_ids(task.messages) + answer
        logp_TV = logp_of_last(parts.engine.model, ids, len(answer))
        total -= float(logp_TV[range(len(answer)), list(answer)].sum())
        count += len(answer)
    return total / count


def test_off_policy_imitation(tiny_folder, short_tasks):
    parts = assemble(
        recipe(
            tiny_folder,
            short_tasks,
            rollout={"student_fraction": 0.0},
            losses=[{"kind": "cross_entropy"}],
        )
    )
    before = nll(parts)
    done = train(parts, 25)
    assert all(t.source == "dataset" for trajectories, _ in done for t in trajectories)
    assert nll(parts) < 0.5 * before


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl"])
def test_off_policy_divergence(divergence, tiny_folder, tiny_teacher_folder, short_tasks):
    parts = assemble(
        recipe(
            tiny_folder,
            short_tasks,
            rollout={"student_fraction": 0.0},
            teacher={"kind": "model", "model": str(tiny_teacher_folder)},
            losses=[{"kind": "divergence", "divergence": divergence}],
        )
    )
    done = train(parts, 20)
    values = [update.components["divergence"] for _, update in done]
    assert all(t.source == "dataset" for trajectories, _ in done for t in trajectories)
    assert sum(values[-3:]) < 0.6 * sum(values[:3])


def test_a_mix_has_the_fractions_of_the_recipe(tiny_folder, tiny_teacher_folder, short_tasks):
    ramp = {"start": 0.25, "end": 1.0, "steps": 3}
    parts = assemble(
        recipe(
            tiny_folder,
            short_tasks,
            rollout={
                "samples_per_prompt": 2,
                "max_new_tokens": 4,
                "student_fraction": ramp,
                "off_policy_source": "dataset",
            },
            teacher={"kind": "model", "model": str(tiny_teacher_folder)},
            losses=[
                {"kind": "divergence", "on": "student"},
                {"kind": "cross_entropy", "on": "dataset"},
            ],
        )
    )
    for (trajectories, update), num_student in zip(train(parts, 5), [2, 4, 6, 8, 8], strict=True):
        by_student = [t for t in trajectories if t.source == "student"]
        by_data = [t for t in trajectories if t.source == "dataset"]
        assert len(by_student) == 2 * num_student and len(by_data) == 8 - num_student
        assert update.num_tokens["divergence"] == sum(t.num_completion_tokens for t in by_student)
        assert update.num_tokens["cross_entropy"] == sum(t.num_completion_tokens for t in by_data)


def test_one_prompt_many_times(tiny_folder, tiny_teacher_folder, short_tasks):
    parts = assemble(
        recipe(
            tiny_folder,
            short_tasks | {"limit": 1},
            rollout={"samples_per_prompt": 4, "max_new_tokens": 4},
            train={"steps": 100, "prompts_per_step": 2, "learning_rate": 1e-2},
            teacher={"kind": "model", "model": str(tiny_teacher_folder)},
        )
    )
    done = train(parts, 20)
    assert len({t.task.id for trajectories, _ in done for t in trajectories}) == 1
    # Not the same samples, though: each draws its own random numbers.
    assert len({t.completion_ids for t in done[0][0]}) > 4
    kls = [update.metrics["kl"] for _, update in done]
    assert sum(kls[-3:]) < 0.5 * sum(kls[:3])


def test_preferences(tiny_folder, tmp_path):
    pairs = [row | {"rejected": row["prompt"][0] * 4} for row in two_letters()]
    rows = [row for row in pairs if row["rejected"] != row["completion"]]
    parts = assemble(
        recipe(
            tiny_folder,
            {"kind": "jsonl", "path": str(write_jsonl(tmp_path / "pairs.jsonl", rows))},
            lr=3e-3,
            rollout={"student_fraction": 0.0},
            losses=[{"kind": "preference"}],
        )
    )
    margin_before = nll(parts, "rejected") - nll(parts)
    done = train(parts, 20)
    assert done[0][1].components["preference"] == pytest.approx(0.6931, abs=1e-3)
    assert done[-1][1].components["preference"] < 0.2
    assert done[0][1].metrics["preference/accuracy"] < 1.0
    assert done[-1][1].metrics["preference/accuracy"] == 1.0
    assert nll(parts, "rejected") - nll(parts) > margin_before + 1


def test_reinforcement_learning(tiny_folder):
    parts = assemble(
        small_recipe(
            tiny_folder,
            tasks={
                "kind": "instructions",
                "checks": ["lower_case"],
                "instruction_in_prompt": False,
            },
            rollout={"samples_per_prompt": 12, "max_new_tokens": 2},
            losses=[{"kind": "policy_gradient", "advantage": "reward"}],
            train={"steps": 100, "prompts_per_step": 2, "learning_rate": 2e-2},
        )
    )
    done = train(parts, 12)
    rewards = [sum(t.grade.score for t in ts) / len(ts) for ts, _ in done]
    assert sum(rewards[:2]) / 2 < 0.5
    assert sum(rewards[-3:]) / 3 > 0.8
