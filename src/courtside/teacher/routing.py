"""Several teachers: a task's tags choose the one that scores it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from courtside.engines.base import Sampling
from courtside.errors import TaskError
from courtside.teacher.teacher import Teacher
from courtside.types import Hint, Sample, Scored, Target, Task, Trajectory

T = TypeVar("T")


class RoutedTeachers:
    def __init__(self, routes: Mapping[str, Teacher], default: str | None):
        self.routes = routes
        self.default = default
        self.name = "routes:" + ",".join(routes)

    def score(self, trajectories: Sequence[Trajectory]) -> Mapping[str, Target]:
        targets: dict[str, Target] = {}
        for tag, group in self._by_route(trajectories, lambda t: t.task).items():
            targets.update(self.routes[tag].score([trajectory for _, trajectory in group]))
        return targets

    def score_hints(
        self, trajectories: Sequence[Trajectory], hints: Sequence[Hint]
    ) -> Mapping[str, Scored]:
        scored: dict[str, Scored] = {}
        for tag, group in self._by_route(trajectories, lambda t: t.task).items():
            trajectories = [trajectory for _, trajectory in group]
            ids = {trajectory.id for trajectory in trajectories}
            scored |= self.routes[tag].score_hints(
                trajectories, [hint for hint in hints if hint.trajectory in ids]
            )
        return scored

    def write(
        self, tasks: Sequence[Task], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Sample]:
        samples: dict[int, Sample] = {}
        for tag, group in self._by_route(tasks, lambda task: task).items():
            answers = self.routes[tag].write(
                [task for _, task in group], sampling, [seeds[i] for i, _ in group]
            )
            samples.update({i: s for (i, _), s in zip(group, answers, strict=True)})
        return [samples[i] for i in range(len(tasks))]

    def route(self, task: Task) -> str:
        tag = next((tag for tag in task.tags if tag in self.routes), self.default)
        if tag is None:
            raise TaskError(
                f"task {task.id}: none of its tags {list(task.tags)} has a route "
                f"{list(self.routes)}. Add one, or set teacher.default"
            )
        return tag

    def _by_route(
        self, items: Sequence[T], task_of: Callable[[T], Task]
    ) -> dict[str, list[tuple[int, T]]]:
        groups: dict[str, list[tuple[int, T]]] = {}
        for index, item in enumerate(items):
            groups.setdefault(self.route(task_of(item)), []).append((index, item))
        return groups
