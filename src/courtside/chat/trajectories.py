"""Single-turn trajectories: a prompt and one sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from courtside.types import Grade, Message, Sample, Source, Task, Trajectory, Turn


def make_trajectory(
    task: Task,
    prompt_ids: tuple[int, ...],
    sample: Sample,
    *,
    id: str,
    source: Source,
    policy_version: int | None,
    temperature: float,
    grade: Grade | None,
    preference: Literal["better", "worse"] | None = None,
) -> Trajectory:
    """A single-turn trajectory. A text from a data set has no sampler log-probs."""
    prompt = Turn(
        role="prompt",
        text=format_messages(task.messages),
        token_ids=prompt_ids,
        completion_mask=(False,) * len(prompt_ids),
    )
    answer = Turn(
        role="assistant",
        text=sample.text,
        token_ids=sample.token_ids,
        completion_mask=(True,) * len(sample.token_ids),
        sampler_logp=None if source == "dataset" else sample.logp,
    )
    return Trajectory(
        id=id,
        task=task,
        turns=(prompt, answer),
        source=source,
        policy_version=policy_version,
        temperature=temperature,
        stop=sample.stop,
        grade=grade,
        preference=preference,
    )


def format_messages(messages: Sequence[Message]) -> str:
    """Messages as display text."""
    return "\n\n".join(f"{message.role}: {message.content}" for message in messages)
