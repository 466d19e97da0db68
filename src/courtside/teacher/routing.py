"""Several teachers: a task's tags choose the one that scores it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from courtside.engines.base import PromptSize, Sampling
from courtside.errors import TaskError
from courtside.recipe.teacher import choose_route
from courtside.teacher.teacher import Teacher
from courtside.types import Hint, Sample, Scored, Target, Task, Trajectory


class RoutedTeachers:
    def __init__(self, routes: Mapping[str, Teacher], default: str | None):
        self.routes = routes
        self.default = default
        self.name = "routes:" + ",".join(routes)

    def score(self, trajectories: Sequence[Trajectory]) -> Mapping[str, Target]:
        targets: dict[str, Target] = {}
        for tag, indices in self._by_route([t.task for t in trajectories]).items():
            targets |= self.routes[tag].score([trajectories[i] for i in indices])
        return targets

    def score_hints(
        self, trajectories: Sequence[Trajectory], hints: Sequence[Hint]
    ) -> Mapping[str, Scored]:
        scored: dict[str, Scored] = {}
        for tag, indices in self._by_route([t.task for t in trajectories]).items():
            group = {trajectories[i].id: trajectories[i] for i in indices}
            group_hints = [hint for hint in hints if hint.trajectory in group]
            scored |= self.routes[tag].score_hints(list(group.values()), group_hints)
        return scored

    def write(
        self, tasks: Sequence[Task], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Sample]:
        samples: dict[int, Sample] = {}
        for tag, indices in self._by_route(tasks).items():
            group, group_seeds = [tasks[i] for i in indices], [seeds[i] for i in indices]
            answers = self.routes[tag].write(group, sampling, group_seeds)
            samples |= zip(indices, answers, strict=True)
        return [samples[i] for i in range(len(tasks))]

    def measure_prompt(self, task: Task) -> PromptSize:
        return self.choose(task).measure_prompt(task)

    def choose(self, task: Task) -> Teacher:
        """The teacher of a task."""
        return self.routes[self.route(task)]

    def route(self, task: Task) -> str:
        tag = choose_route(task.tags, self.routes, self.default)
        if tag is None:
            raise TaskError(
                f"task {task.id}: none of its tags {list(task.tags)} has a route "
                f"{list(self.routes)}. Add one, or set teacher.default"
            )
        return tag

    def _by_route(self, tasks: Sequence[Task]) -> dict[str, list[int]]:
        indices: dict[str, list[int]] = {}
        for index, task in enumerate(tasks):
            indices.setdefault(self.route(task), []).append(index)
        return indices
