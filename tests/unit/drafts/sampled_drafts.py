"""Samples of a student, made up."""

from __future__ import annotations

from courtside.seeds import trajectory_id
from courtside.types import Grade, Message, Task, Trajectory, Turn


def draft(
    index: int, sample: int, score: float | None = 0.0, length: int = 4, **changes: object
) -> Trajectory:
    """`index`: of the prompt in the batch; prompts 0 and 1 are the same task."""
    ids = tuple(range(10 * sample + 1, 10 * sample + 1 + length))
    task = Task(
        id=f"t-{max(index, 1)}", split="train", messages=(Message(role="user", content="?"),)
    )
    fields: dict[str, object] = {
        "id": trajectory_id(0, index, sample),
        "task": task,
        "turns": (
            Turn(role="prompt", text="?", token_ids=(0,), completion_mask=(False,)),
            Turn(
                role="assistant", text="!", token_ids=ids, completion_mask=(True,) * length,
                sampler_logp=(-1.0,) * length,
            ),
        ),
        "source": "student",
        "policy_version": 0,
        "temperature": 1.0,
        "stop": "eos",
        "grade": None if score is None else Grade(score=score, passed=score == 1),
    }  # fmt: skip
    return Trajectory(**(fields | changes))  # type: ignore[arg-type]
