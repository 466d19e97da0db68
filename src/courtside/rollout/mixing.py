"""Which tasks of a batch are on-policy, and names that all rollouts share."""

from __future__ import annotations

import random
from collections.abc import Sequence

from courtside.engines.base import Sampling
from courtside.recipe import RolloutConfig
from courtside.seeds import seed_for
from courtside.types import Task


def choose_student_tasks(
    config: RolloutConfig, tasks: Sequence[Task], *, seed: int, step: int
) -> set[int]:
    """Indices of on-policy tasks: a random share, different in each step."""
    order = list(range(len(tasks)))
    random.Random(seed_for(seed, "share", step)).shuffle(order)
    return set(order[: round(config.student_fraction_at(step) * len(tasks))])


def make_sampling(config: RolloutConfig) -> Sampling:
    return Sampling(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        stop=config.stop,
    )


def trajectory_id(step: int, index: int, sample: int) -> str:
    """Ids sort in the order of the batch."""
    return f"{step:06d}-{index:03d}-{sample}"
