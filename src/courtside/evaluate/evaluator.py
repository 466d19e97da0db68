"""Evaluates the student or the teacher of a run on held-out tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from courtside.chat.template import ChatTemplate
from courtside.engines.base import Engine, Sampling
from courtside.environments.base import Environment, EpisodeRequest
from courtside.errors import TaskError
from courtside.evaluate.episodes import episode_metrics
from courtside.evaluate.suite import Suite, forward_kl, make_answer, reverse_kl
from courtside.recipe import Recipe
from courtside.recipe.teacher import CustomTeacherConfig
from courtside.types import Evaluation, Grade, Sample, Split, Target, Task, Trajectory

if TYPE_CHECKING:
    from courtside.tasks.base import TaskSource


class TaskSuite(NamedTuple):
    tasks: TaskSource
    environment: Environment | None


class GradedAnswers(NamedTuple):
    evaluation: Evaluation
    trajectories: list[Trajectory]


RunEpisodes = Callable[[Sequence[EpisodeRequest], Sampling, int], list[Trajectory]]
"""Requests, sampling and policy version in, trajectories out."""


class AnsweringTeacher(Protocol):
    def score(self, trajectories: Sequence[Trajectory]) -> Mapping[str, Target]: ...

    def write(
        self, tasks: Sequence[Task], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Sample]: ...


class Evaluator:
    def __init__(
        self,
        recipe: Recipe,
        *,
        tasks: TaskSuite,
        suites: Mapping[str, TaskSuite],
        engine: Engine,
        renderer: ChatTemplate,
        grade: Callable[[Task, str], Grade | None],
        teacher: AnsweringTeacher | None,
        run_episodes: RunEpisodes | None,
    ):
        self.recipe, self.tasks, self.suites = recipe, tasks, suites
        self.engine, self.renderer, self.grade = engine, renderer, grade
        self.teacher = teacher
        self.run_episodes = run_episodes
        """How episodes are played; None: tasks are single turns."""

    def evaluate(
        self, split: Split, *, step: int, policy: str = "student", num_tasks: int | None = None
    ) -> GradedAnswers:
        """`policy`: student, teacher, or `student:NAME` on the tasks of the recipe's suite NAME."""
        config = self.recipe.evaluate
        name = policy.partition(":")[2]
        tasks = self.suites[name] if name else self.tasks
        suite = Suite(
            tasks=tasks.tasks.held_out(split, num_tasks or config.num_tasks),
            split=split,
            sampling=Sampling(
                max_new_tokens=config.max_new_tokens or self.recipe.rollout.max_new_tokens,
                temperature=config.temperature,
                stop=self.recipe.rollout.stop,
            ),
            samples=config.samples_per_task,
            seed=self.recipe.seed,
            renderer=self.renderer,
            grade=self.grade,
        )
        metrics: dict[str, float] = {}
        if policy == "teacher":
            assert self.teacher is not None
            answers = suite.ask(self.teacher.write, policy=policy, step=step)
        else:
            answers = self._answer(suite, tasks.environment, policy=policy, step=step)
            metrics = self._metrics(suite, answers, step=step)
        return GradedAnswers(
            suite.evaluation(answers, policy=policy, step=step, metrics=metrics), answers
        )

    def reason_not_to(self, split: Split) -> str | None:
        """Why the student cannot be evaluated on this split; None: it can."""
        if self.recipe.tasks.is_recorded:
            what = "recorded" if self.recipe.tasks.kind == "conversations" else "stored"
            return f"nothing answers the student in {what} {self.recipe.tasks.kind}"
        try:
            tasks = self.tasks.tasks.held_out(split, self.recipe.evaluate.num_tasks)
        except TaskError as error:
            return str(error)
        if self.recipe.tasks.is_environment:
            return None  # an episode grades itself
        if any(task.grader is None for task in tasks):
            return f"some {split} tasks have no grader"
        return None

    def teacher_can_answer(self) -> bool:
        """Feedback and siblings exist only after an answer, and teachers play no episodes."""
        if isinstance(self.recipe.teacher, CustomTeacherConfig):
            return False
        return not self.recipe.tasks.is_environment and all(
            t.context is None or t.context.kind in ("system", "field")
            for t in self.recipe.model_teachers
        )

    def _answer(
        self, suite: Suite, environment: Environment | None, *, policy: str, step: int
    ) -> list[Trajectory]:
        if self.run_episodes is None:
            return suite.ask(make_answer(self.engine, self.renderer), policy=policy, step=step)
        assert environment is not None
        requests = [
            EpisodeRequest(
                id=f"{policy}-{task.id}-{n}", task=task, seed=seed, start=environment.start
            )
            for task, n, seed in suite.asked()
        ]
        return self.run_episodes(requests, suite.sampling, step)

    def _metrics(
        self, suite: Suite, answers: Sequence[Trajectory], *, step: int
    ) -> dict[str, float]:
        metrics = episode_metrics(answers) if self.run_episodes is not None else {}
        # Greedy answers are no samples of the student and estimate no KL; and a teacher with hints
        # has no target for whole answers.
        is_sampled = self.recipe.evaluate.temperature > 0
        if self.teacher is not None and is_sampled and self.recipe.reader is None:
            metrics |= reverse_kl(answers, self.teacher.score(answers))
            if self.recipe.evaluate.forward_kl:
                samples = suite.ask(self.teacher.write, policy="teacher", step=step)
                metrics |= forward_kl(samples, self.engine)
        return metrics
