"""The parts of a run folder that the report shows; a damaged part is named, not fatal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from courtside.errors import UserError
from courtside.report.folder.evaluation_names import EvaluationName
from courtside.report.folder.folder import RunFolder
from courtside.report.folder.outlines import Outline
from courtside.report.folder.parquet import StoredTrajectory
from courtside.types import Evaluation, HintOutcome, Trajectory

T = TypeVar("T")
MAX_LISTED = 12
"""Steps that are listed one by one."""


class GradedId(NamedTuple):
    id: str
    """Of a trajectory."""
    score: float


class FolderReader:
    """Reads a part at a time; one that cannot be read counts as empty, and `problems` says why."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.problems: list[str] = []
        self._trajectories: dict[int, list[StoredTrajectory]] = {}

    def read(self, load: Callable[[], T], default: T) -> T:
        try:
            return load()
        except UserError as error:
            if str(error) not in self.problems:
                self.problems.append(str(error))
            return default

    def trajectories(self, step: int) -> list[StoredTrajectory]:
        """Of a stored step, read once."""
        if step not in self._trajectories:
            self._trajectories[step] = self.read(lambda: self.folder.trajectories(step), [])
        return self._trajectories[step]

    def hints(self, step: int) -> list[HintOutcome]:
        return self.read(lambda: self.folder.hints(step), [])

    def first_and_last_step(self) -> list[list[StoredTrajectory]]:
        """Trajectories of the last and the first stored step that can be read, or the only one."""
        steps = self.folder.trajectory_steps()
        last = next((step for step in reversed(steps) if self.trajectories(step)), None)
        first = next((step for step in steps if self.trajectories(step)), None)
        ends = dict.fromkeys(step for step in (last, first) if step is not None)
        return [self.trajectories(step) for step in ends]

    def grades_by_task(self, evaluation: Evaluation) -> dict[str, list[GradedId]]:
        """Ids and scores of the answers to each task. Of the few in the evaluation itself, where
        the others are not stored."""
        answers: Sequence[Trajectory] = evaluation.samples
        if self.folder.evaluation_file(EvaluationName.of(evaluation)).exists():
            outlines: list[Outline] = self.read(
                lambda: self.folder.evaluation_outlines(evaluation), []
            )
            answers = [outline.trajectory for outline in outlines] or answers
        grades: dict[str, list[GradedId]] = {}
        for answer in answers:
            score = answer.grade.score if answer.grade is not None else 0.0
            grades.setdefault(answer.task.id, []).append(GradedId(answer.id, score))
        return grades

    def answers(self, evaluation: Evaluation, ids: Collection[str]) -> dict[str, Trajectory]:
        """By task."""
        answers = [sample for sample in evaluation.samples if sample.id in ids]
        if self.folder.evaluation_file(EvaluationName.of(evaluation)).exists():
            stored: list[Trajectory] = self.read(
                lambda: self.folder.evaluation_trajectories(evaluation, ids), []
            )
            answers = stored or answers
        return {answer.task.id: answer for answer in answers}

    def check_metrics(
        self, metrics: Sequence[Mapping[str, Any]], evaluations: Sequence[Evaluation]
    ) -> None:
        """Steps that something else in the folder knows of must have their metrics."""
        recorded = {row["step"] for row in metrics}
        steps = {*recorded, *self.folder.trajectory_steps(), *(e.step - 1 for e in evaluations)}
        missing = sorted(set(range(max(steps, default=-1) + 1)) - recorded)
        if missing:
            self.problems.append(
                f"{self.folder.path / 'metrics.jsonl'}: has no metrics of {list_steps(missing)}. "
                "The file was removed or changed; the curves leave these steps out"
            )


def list_steps(steps: Sequence[int]) -> str:
    """
    >>> list_steps([4]), list_steps([0, 1, 2, 3, 7])
    ('step 4', 'steps 0 to 3, 7')
    """
    ranges: list[tuple[int, int]] = []
    for step in sorted(steps):
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], step)
        else:
            ranges.append((step, step))
    texts = [
        str(first) if first == last else f"{first}{' to ' if last - first > 1 else ', '}{last}"
        for first, last in ranges
    ]
    more = f" and {len(texts) - MAX_LISTED} more" if len(texts) > MAX_LISTED else ""
    return f"step{'' if len(steps) == 1 else 's'} {', '.join(texts[:MAX_LISTED])}{more}"
