"""The teacher stage of the loop: trajectories in, scored trajectories out."""

from __future__ import annotations

from collections.abc import Sequence

from courtside.teacher.model import Teacher
from courtside.teacher.routing import RoutedTeachers
from courtside.types import Scored, Trajectory


class Scoring:
    def __init__(self, teacher: Teacher | RoutedTeachers | None, reference: Teacher | None):
        self.teacher = teacher
        self.reference = reference
        """The student before training, where a loss compares with it."""

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Scored]:
        targets = self.teacher.score(trajectories) if self.teacher else {}
        references = self.reference.score(trajectories) if self.reference else {}
        return [
            Scored(trajectory=t, target=targets.get(t.id), reference=references.get(t.id))
            for t in trajectories
        ]

    def follow(self) -> None:
        if self.teacher:
            self.teacher.follow()
