"""Small made-up runs. No model: the records are written by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from courtside.recipe import Recipe
from courtside.recipe.load import parse_recipe
from courtside.types import (
    Evaluation,
    Grade,
    Message,
    Scored,
    Target,
    Task,
    Trajectory,
    Turn,
    Update,
)

TEXT = "we add the digits from the right and carry one so the sum is <b>four</b> & done ."
TOKENS = TEXT.split()


class Logps:
    """Stands in for a tensor: the report only ever calls `tolist`."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values = list(values)

    def tolist(self) -> list[float]:
        return self.values


def make_recipe(**changes: Any) -> Recipe:
    tree: dict[str, Any] = {
        "student": {"model": "smollm2-135m", "lora": {"rank": 8}},
        "tasks": {"kind": "arithmetic"},
        "teacher": {"kind": "self", "context": {"kind": "field", "field": "solution"}},
        "losses": [
            {"kind": "divergence", "support": {"kind": "top_k"}},
            {"kind": "policy_gradient", "advantage": "reward", "weight": 0.5},
        ],
        "train": {"steps": 4},
    }
    return parse_recipe(tree | changes)


def make_task(number: int) -> Task:
    return Task(
        id=f"task-{number}",
        split="train",
        messages=(
            Message(role="system", content="Add."),
            Message(role="user", content=f"{number} + 4 = ?"),
        ),
        answer=str(number + 4),
        privileged={"solution": f"the sum is {number + 4}"},
        tags=("add",),
        grader="number",
        grader_args={"tolerance": 0.5},
    )


def make_trajectory(name: str, number: int, *, length: int = 6, passed: bool = True) -> Trajectory:
    draw = random.Random(f"{name} {number}")
    tokens = [TOKENS[(number + i) % len(TOKENS)] for i in range(length)]
    prompt = Turn(
        role="prompt", text=f"{number} + 4 = ?", token_ids=(1, 2, 3), completion_mask=(False,) * 3
    )
    # The last token is the template's, not the student's.
    answer = Turn(
        role="assistant",
        text=" ".join(tokens),
        token_ids=(*(100 + (number + i) % len(TOKENS) for i in range(length)), 0),
        completion_mask=(True,) * length + (False,),
        sampler_logp=(*(-draw.randrange(1, 24) / 8 for _ in range(length)), math.nan),
    )
    return Trajectory(
        id=name,
        task=make_task(number),
        turns=(prompt, answer),
        source="student",
        policy_version=0,
        temperature=0.7,
        stop="eos" if passed else "length",
        grade=Grade(score=float(passed), passed=passed, feedback="" if passed else "wrong sum"),
    )


def make_batch(step: int, *, num: int = 4) -> list[Scored]:
    scored = []
    for i in range(num):
        trajectory = make_trajectory(f"{step}-{i}", i, passed=i % 4 != 3)
        draw = random.Random(i)
        logps = [-draw.randrange(1, 40) / 8 for _ in range(trajectory.num_completion_tokens)]
        target: Any = Target(
            teacher="self:frozen",
            context=f"the sum is {i + 4}",
            logp_T=Logps(logps),  # type: ignore[arg-type]
        )
        scored.append(Scored(trajectory=trajectory, target=None if i == 2 else target))
    return scored


def make_update(step: int, scored: Sequence[Scored], **metrics: float) -> Update:
    return Update(
        step=step,
        loss=1.5 / (step + 1),
        components={"divergence": 1.0 / (step + 1), "policy_gradient": 1.0 / (step + 1)},
        metrics={"kl": 0.9 / (step + 1), "grad_norm": 0.5, "learning_rate": 1e-4} | metrics,
        num_tokens={"divergence": 18, "policy_gradient": 24},
        student_logp={
            s.trajectory.id: s.trajectory.sampler_logp or () for s in scored if s.target is not None
        },
    )


def make_evaluation(step: int, *, policy: str = "student", rate: float = 0.5) -> Evaluation:
    return Evaluation(
        step=step,
        policy=policy,
        split="test",
        scores={f"task-{i}": float(i < 8 * rate) for i in range(8)},
        mean_score=rate,
        ci_low=max(rate - 0.2, 0.0),
        ci_high=min(rate + 0.2, 1.0),
        metrics={"length/mean": 12.0},
        samples=tuple(
            make_trajectory(f"eval-{policy}-{step}-{i}", i, passed=i < 3 * rate) for i in range(3)
        ),
    )
