"""The parts of a run, and how held-out tasks are answered with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from courtside.chat.template import ChatTemplate
from courtside.engines.base import Sampling
from courtside.engines.local import LocalEngine
from courtside.environments.base import Environment
from courtside.errors import TaskError
from courtside.evaluate.episodes import episode_metrics
from courtside.evaluate.suite import Suite, forward_kl, make_answer, reverse_kl
from courtside.reader.base import Reader
from courtside.recipe import CombinedReaderConfig, ModelReaderConfig, Recipe, teachers_of
from courtside.rollout.episodes import EpisodeRequest, EpisodeRollout
from courtside.rollout.offline import ChatLogRollout, ReplayRollout
from courtside.rollout.single_turn import SingleTurnRollout
from courtside.tasks.base import TaskSource
from courtside.tasks.graders import grade
from courtside.teacher.stage import TeacherStage
from courtside.training.student import Student
from courtside.training.weights import MovingAverage
from courtside.types import Evaluation, Scored, Split, Trajectory, Update


class MeasuredEvaluation(NamedTuple):
    evaluation: Evaluation
    trajectories: list[Trajectory]


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    recipe: Recipe
    tasks: TaskSource
    environment: Environment | None
    suites: Mapping[str, tuple[TaskSource, Environment | None]]
    """Further held-out tasks and their world, by the name the recipe gives them."""
    rollout: SingleTurnRollout | EpisodeRollout | ChatLogRollout | ReplayRollout
    reader: Reader
    teacher: TeacherStage
    student: Student
    check_update: Callable[[Sequence[Scored], Update], None]
    """Raises where an update without a trained token is a mistake."""
    engine: LocalEngine
    """The student's."""
    renderer: ChatTemplate
    averages: dict[str, MovingAverage]
    """Moving averages of teachers, by the teacher's name: part of every checkpoint."""
    teacher_sizes: dict[str, int]
    """Parameters of each teacher, by its name."""
    notes: tuple[str, ...]
    """What a user should know before the run starts."""

    def evaluate(
        self, split: Split, *, step: int, who: str = "student", num_tasks: int | None = None
    ) -> MeasuredEvaluation:
        """`who`: student, teacher, or `student:NAME` on the tasks of the recipe's suite NAME."""
        config = self.recipe.evaluate
        teacher = self.teacher.teacher
        name = who.partition(":")[2]
        source, world = self.suites[name] if name else (self.tasks, self.environment)
        suite = Suite(
            tasks=source.held_out(split, num_tasks or config.num_tasks),
            split=split,
            sampling=Sampling(
                max_new_tokens=config.max_new_tokens or self.recipe.rollout.max_new_tokens,
                temperature=config.temperature,
                stop=self.recipe.rollout.stop,
            ),
            samples=config.samples_per_task,
            seed=self.recipe.seed,
            renderer=self.renderer,
            grade=grade,
        )
        if who == "teacher":
            assert teacher is not None
            answers = suite.ask(teacher.write, who=who, step=step)
            return MeasuredEvaluation(
                suite.evaluation(answers, who=who, step=step, metrics={}), answers
            )
        metrics: dict[str, float] = {}
        if isinstance(self.rollout, EpisodeRollout):
            assert world is not None
            starts = [
                EpisodeRequest(id=f"{who}-{task.id}-{n}", task=task, seed=seed, begin=world.start)
                for task, n, seed in suite.asked()
            ]
            answers = self.rollout.play(starts, suite.sampling, version=step)
            metrics |= episode_metrics(answers)
        else:
            answers = suite.ask(make_answer(self.engine, self.renderer), who=who, step=step)
        # Greedy answers are no sample of the student, so they estimate no KL; and a teacher that
        # speaks through hints has nothing to say of whole answers.
        if teacher is not None and config.temperature > 0 and self.recipe.reader is None:
            metrics |= reverse_kl(answers, teacher.score(answers))
            if config.forward_kl:
                metrics |= forward_kl(
                    suite.ask(teacher.write, who="teacher", step=step), self.engine
                )
        return MeasuredEvaluation(
            suite.evaluation(answers, who=who, step=step, metrics=metrics), answers
        )

    @property
    def reads_itself(self) -> bool:
        """Whether the student is the model that reads its trajectories."""
        reader = self.recipe.reader
        readers = reader.readers if isinstance(reader, CombinedReaderConfig) else [reader]
        return any(isinstance(r, ModelReaderConfig) and r.endpoint is None for r in readers)

    def can_evaluate(self, split: Split) -> str | None:
        """None if it can, else why not."""
        if self.recipe.tasks.is_recorded:
            what = "recorded" if self.recipe.tasks.kind == "conversations" else "stored"
            return f"nothing answers the student in {what} {self.recipe.tasks.kind}"
        try:
            tasks = self.tasks.held_out(split, self.recipe.evaluate.num_tasks)
        except TaskError as error:
            return str(error)
        if self.recipe.tasks.is_environment:
            return None  # an episode grades itself
        if any(task.grader is None for task in tasks):
            return f"some {split} tasks have no grader"
        return None

    def teacher_can_answer(self) -> bool:
        """Feedback and siblings exist only once something was written, and so do hints: no gate to
        measure then. Nor does a teacher play episodes."""
        return not self.recipe.tasks.is_environment and all(
            t.context is None or t.context.kind in ("system", "field")
            for t in teachers_of(self.recipe)
        )
