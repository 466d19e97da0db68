"""The teacher stage of the loop: trajectories in, scored trajectories out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from courtside.teacher.routing import RoutedTeachers
from courtside.teacher.teacher import Teacher
from courtside.types import Hint, HintOutcome, Scored, Target, Trajectory, Update


class TeacherStage:
    def __init__(
        self,
        teacher: Teacher | RoutedTeachers | None,
        reference: Teacher | None,
        *,
        hinted: bool = False,
    ):
        self.teacher = teacher
        self.hinted = hinted
        """With a reader the teacher speaks on hinted turns only."""
        self.reference = reference
        """The student before training, where a loss compares with it."""

    def __call__(
        self, trajectories: Sequence[Trajectory], hints: Sequence[Hint] = ()
    ) -> list[Scored]:
        targets: Mapping[str, Target] = {}
        hint_outcomes: Mapping[str, tuple[HintOutcome, ...]] = {}
        if self.teacher and self.hinted:
            targets, hint_outcomes = self.teacher.score_hints(trajectories, hints)
        elif self.teacher:
            targets = self.teacher.score(trajectories)
        references = self.reference.score(trajectories) if self.reference else {}
        return [
            Scored(
                trajectory=t,
                target=targets.get(t.id),
                reference=references.get(t.id),
                hints=hint_outcomes.get(t.id, ()),
            )
            for t in trajectories
        ]

    def measured(self, scored: Sequence[Scored], update: Update) -> list[Scored]:
        """With what the update found of hints that it read in its own pass."""
        if not update.teacher_logp:
            return list(scored)
        assert isinstance(self.teacher, Teacher), "one teacher, and it is the student"
        return [self.teacher.measured(s, update) for s in scored]

    def follow(self) -> None:
        if self.teacher:
            self.teacher.follow()
