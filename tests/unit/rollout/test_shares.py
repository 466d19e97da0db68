"""How the tasks and trajectories of a batch are shared out to several ranks."""

from __future__ import annotations

import random
from itertools import chain

import pytest

from courtside.recipe.rollout import RolloutConfig
from courtside.rollout.off_policy import MixedRollout
from courtside.rollout.shares import (
    TaskShare,
    balance_tokens,
    batch_size,
    count_tokens,
    index_tasks,
)
from courtside.seeds import trajectory_id
from courtside.types import Message, Task, Trajectory, Turn


def make_task(number: int) -> Task:
    return Task(
        id=f"task-{number}", messages=(Message(role="user", content=str(number)),), split="train"
    )


def make_trajectory(index: int, sample: int, length: int, prompt: int = 4) -> Trajectory:
    ids = tuple(range(length))
    return Trajectory(
        id=trajectory_id(0, index, sample),
        task=make_task(index),
        turns=(
            Turn(
                role="prompt",
                text="",
                token_ids=ids[:1] * prompt,
                completion_mask=(False,) * prompt,
            ),
            Turn(role="assistant", text="", token_ids=ids, completion_mask=(True,) * length),
        ),
        source="student",
        policy_version=0,
        temperature=1.0,
        stop="eos",
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_balanced_shares_hold_everything_once_and_no_task_twice(num_ranks: int) -> None:
    draw = random.Random(num_ranks)
    batch = [make_trajectory(i, n, draw.randint(1, 200)) for i in range(16) for n in range(4)]
    shares = balance_tokens(reversed(batch), num_ranks)
    assert sorted(t.id for t in chain(*shares)) == [t.id for t in batch]
    owners = [{t.task.id for t in share} for share in shares]
    assert sum(map(len, owners)) == 16
    assert all([t.id for t in share] == sorted(t.id for t in share) for share in shares)
    # No rank has more than another by more than the group that it took last.
    loads = [sum(count_tokens([t for t in s if t.task.id == id]) for id in ids)
             for s, ids in zip(shares, owners, strict=True)]  # fmt: skip
    largest = max(count_tokens(batch[4 * i : 4 * i + 4]) for i in range(16))
    assert max(loads) - min(loads) <= largest
    assert balance_tokens(batch, num_ranks) == shares


def test_a_shared_prompt_is_computed_once() -> None:
    assert count_tokens([make_trajectory(0, n, 10, prompt=7) for n in range(3)]) == 7 + 3 * 10


def test_shares_of_a_mixed_batch_are_those_of_the_whole() -> None:
    """Which prompts the student answers is decided over the whole batch."""

    class Author:
        def __init__(self, name: str):
            self.name = name

        def sample(self, tasks: dict[int, Task], step: int) -> list[Trajectory]:
            assert all(task == make_task(index) for index, task in tasks.items())
            return [make_trajectory(index, ord(self.name), 3) for index in tasks]

        __call__ = sample

    config = RolloutConfig(student_fraction=0.5, off_policy_source="dataset")
    mixed = MixedRollout(student=Author("s"), source=Author("d"), config=config, seed=3)
    tasks = [make_task(i) for i in range(10)]
    for step in range(4):
        whole = [t.id for t in mixed(tasks, step)]
        parts = [mixed(TaskShare(tasks, range(rank, 10, 3)), step) for rank in range(3)]
        assert sorted(t.id for t in chain(*parts)) == whole


def test_indices_and_size_are_those_of_the_batch() -> None:
    tasks = [make_task(i) for i in range(5)]
    assert index_tasks(tasks) == dict(enumerate(tasks))
    assert index_tasks(TaskShare(tasks, [1, 4])) == {1: tasks[1], 4: tasks[4]}
    assert batch_size(tasks) == batch_size(TaskShare(tasks, [2])) == 5
