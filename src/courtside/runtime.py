"""The parts of a run, as `assemble` makes them from a recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from courtside.chat.template import ChatTemplate
from courtside.drafts.base import DraftStage
from courtside.engines.base import Engine, InProcessEngine
from courtside.evaluate.evaluator import Evaluator
from courtside.progress import ProgressMeter
from courtside.ranks import Ranks
from courtside.reader.base import Reader
from courtside.recipe import Recipe
from courtside.tasks.base import TaskSource
from courtside.teacher.teacher import TeacherStage
from courtside.training.student import Student
from courtside.training.weights import MovingAverage
from courtside.types import Task, Trajectory


class Rollout(Protocol):
    def __call__(self, tasks: Sequence[Task], step: int) -> list[Trajectory]:
        """Trajectories of one step, sorted by id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    recipe: Recipe
    tasks: TaskSource
    rollout: Rollout
    drafts: DraftStage
    """Corrects what the student sampled; without `drafts` in the recipe it changes nothing."""
    reader: Reader
    teacher: TeacherStage
    student: Student
    engine: Engine
    """Samples with the student's weights; the student itself only trains."""
    evaluator: Evaluator
    renderer: ChatTemplate
    local_engine: InProcessEngine
    """The student's weights in this process, whatever samples."""
    load_untrained: Callable[[], InProcessEngine]
    """Loads the student as it was before training into an engine of its own."""
    averages: Mapping[str, MovingAverage]
    """Moving averages of teachers, by the teacher's name: part of every checkpoint."""
    teacher_sizes: Mapping[str, int]
    """Parameters of each teacher, by its name."""
    ranks: Ranks
    progress: ProgressMeter
    """Counts answers, episodes and tokens of the phase that is running."""
    reader_is_student: bool
    """Whether the student is the model of a reader."""
    close_rollouts: Callable[[], None]
    """Gives up what is sampled ahead, when the run ends."""
    notes: tuple[str, ...]
    """What a user should know before the run starts."""
