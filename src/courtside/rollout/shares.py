"""A batch over several ranks: each samples some of its tasks, and trains about as many tokens.

What is sampled does not depend on the number of ranks: ids and seeds follow a task's index in the
batch. Trajectories of one task stay together, as they are compared with each other and share their
prompt's prefix.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from courtside.ranks import Ranks
from courtside.types import Task, Trajectory


class TaskShare(list[Task]):
    """Some tasks of a batch."""

    def __init__(self, tasks: Sequence[Task], indices: Sequence[int]) -> None:
        super().__init__(tasks[index] for index in indices)
        self.indices = tuple(indices)
        self.batch_size = len(tasks)


def index_tasks(tasks: Sequence[Task]) -> dict[int, Task]:
    """By their index in the batch, which ids and seeds follow."""
    if isinstance(tasks, TaskShare):
        return dict(zip(tasks.indices, tasks, strict=True))
    return dict(enumerate(tasks))


def batch_size(tasks: Sequence[Task]) -> int:
    """Tasks of the whole batch."""
    return tasks.batch_size if isinstance(tasks, TaskShare) else len(tasks)


def take_share(tasks: Sequence[Task], ranks: Ranks) -> TaskShare:
    """This rank's part of a whole batch."""
    return TaskShare(tasks, range(ranks.rank, len(tasks), ranks.size))


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRollout:
    """Samples this rank's tasks, and returns those trajectories of all ranks that it trains on."""

    rollout: Callable[[Sequence[Task], int], list[Trajectory]]
    ranks: Ranks
    together: Callable[[], AbstractContextManager[None]] = nullcontext
    """Around a rollout in which a teacher samples, whose weights may be in shards over the ranks.
    """

    def __call__(self, tasks: Sequence[Task], step: int) -> list[Trajectory]:
        share = take_share(tasks, self.ranks)
        with self.together():
            trajectories = self.rollout(share, step)
        sampled = self.ranks.gather_lists(trajectories)
        return balance_tokens(sampled, self.ranks.size)[self.ranks.rank]


def balance_tokens(trajectories: Iterable[Trajectory], num_ranks: int) -> list[list[Trajectory]]:
    """Trajectories by rank, each sorted by id: the task with the most tokens first, to the rank
    that has the fewest."""
    by_task: dict[str, list[Trajectory]] = {}
    for trajectory in sorted(trajectories, key=lambda t: t.id):
        by_task.setdefault(trajectory.task.id, []).append(trajectory)
    loads = [(0, rank) for rank in range(num_ranks)]
    shares: list[list[Trajectory]] = [[] for _ in range(num_ranks)]
    for group in sorted(by_task.values(), key=lambda g: (-count_tokens(g), g[0].id)):
        load, rank = heapq.heappop(loads)
        shares[rank] += group
        heapq.heappush(loads, (load + count_tokens(group), rank))
    return [sorted(share, key=lambda t: t.id) for share in shares]


def count_tokens(group: Sequence[Trajectory]) -> int:
    """Of the forward passes over samples of one prompt, which is computed once."""
    lengths = [len(t.token_ids) for t in group]
    prompts = [len(t.turns[0].token_ids) for t in group]
    return sum(lengths) - sum(prompts) + max(prompts)
