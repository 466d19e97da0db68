"""The teacher stage of the loop: trajectories in, scored trajectories out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from courtside.teacher.custom import CustomTeacher
from courtside.teacher.routing import RoutedTeachers
from courtside.teacher.teacher import HintedTarget, Teacher
from courtside.types import Hint, Scored, Target, Trajectory


class TeacherStage:
    def __init__(
        self,
        teacher: Teacher | RoutedTeachers | CustomTeacher | None,
        reference: Teacher | None,
        *,
        hinted: bool = False,
    ):
        self.teacher = teacher
        self.hinted = hinted
        """With a reader, only hinted turns get targets."""
        self.reference = reference
        """The student before training, where a loss compares with it."""

    def __call__(
        self, trajectories: Sequence[Trajectory], hints: Sequence[Hint] = ()
    ) -> list[Scored]:
        targets: Mapping[str, Target] = {}
        hinted: Mapping[str, HintedTarget] = {}
        if self.teacher and self.hinted:
            assert not isinstance(self.teacher, CustomTeacher), "the recipe was checked"
            hinted = self.teacher.score_hints(trajectories, hints)
        elif self.teacher:
            targets = self.teacher.score(trajectories)
        references = self.reference.score(trajectories) if self.reference else {}
        nothing = HintedTarget(outcomes=())
        return [
            Scored(
                trajectory=t,
                target=targets.get(t.id) or hinted.get(t.id, nothing).target,
                deferred=hinted.get(t.id, nothing).deferred,
                reference=references.get(t.id),
                hints=hinted.get(t.id, nothing).outcomes,
            )
            for t in trajectories
        ]

    def follow(self) -> None:
        if self.teacher:
            self.teacher.follow()
