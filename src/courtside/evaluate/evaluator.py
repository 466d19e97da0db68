"""Evaluates the student or the teacher of a run on held-out tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from courtside.chat.messages import make_trajectory
from courtside.chat.template import ChatTemplate
from courtside.engines.base import Engine, SampleRequest, Sampling, ScoreRequest
from courtside.environments.base import EpisodeRequest, HostedEnvironment
from courtside.errors import RunError, TaskError
from courtside.evaluate.episodes import episode_metrics
from courtside.evaluate.intervals import mean_interval
from courtside.progress import PhaseProgress, ProgressMeter
from courtside.ranks import ALONE, Ranks
from courtside.recipe import Recipe
from courtside.recipe.teacher import CustomTeacherConfig
from courtside.seeds import seed_for
from courtside.types import Evaluation, Grade, Sample, Split, Target, Task, Trajectory

if TYPE_CHECKING:
    from courtside.tasks.base import TaskSource

NUM_STORED_SAMPLES = 8


class TaskSuite(NamedTuple):
    tasks: TaskSource
    environment: HostedEnvironment | None
    """None: single turns."""
    grade: Callable[[Task, str], Grade | None]
    """Of single turns; an episode grades itself."""
    shares_kind: bool = True
    """Whether its tasks have the fields and tags of the recipe's own, which the teacher needs."""


class Attempt(NamedTuple):
    id: str
    task: Task
    seed: int
    suite: TaskSuite


class GradedAnswers(NamedTuple):
    evaluation: Evaluation
    trajectories: list[Trajectory]


SampleAnswers = Callable[[Sequence[Task], Sampling, Sequence[int]], list[Sample]]
"""Tasks, sampling and seeds in, one sample each out."""
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
        teacher: AnsweringTeacher | None,
        run_episodes: RunEpisodes | None,
        progress: ProgressMeter | None = None,
        ranks: Ranks = ALONE,
        together: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        """`together`: around what a teacher does whose weights may be in shards over the ranks."""
        self.ranks, self.together = ranks, together
        self.recipe, self.tasks, self.suites = recipe, tasks, suites
        self.engine, self.renderer = engine, renderer
        self.teacher = teacher
        self.progress = progress or ProgressMeter()
        self.run_episodes = run_episodes
        """None: neither the tasks nor a suite are episodes."""
        config = recipe.evaluate
        self.sampling = Sampling(
            max_new_tokens=config.max_new_tokens or recipe.rollout.max_new_tokens,
            temperature=config.temperature,
            stop=recipe.rollout.stop,
        )

    def evaluate(
        self, split: Split, *, step: int, policy: str = "student", num_tasks: int | None = None
    ) -> GradedAnswers:
        """`policy`: student, teacher, or `student:NAME` on the tasks of the recipe's suite NAME."""
        if policy != "teacher":
            return self.evaluate_suites(split, [policy], step=step, num_tasks=num_tasks)[policy]
        answers = self._sample_teacher(
            self._make_attempts(self._tasks(split, num_tasks, policy), policy)
        )
        return GradedAnswers(self._grade(answers, split, policy, step, {}), answers)

    def evaluate_suites(
        self, split: Split, policies: Sequence[str], *, step: int, num_tasks: int | None = None
    ) -> dict[str, GradedAnswers]:
        """The student on several suites, whose tasks share their forward passes: a decoding step of
        twice the rows takes much less than twice as long. Results are those of single suites."""
        tasks = {policy: self._tasks(split, num_tasks, policy) for policy in policies}
        attempts = {policy: self._make_attempts(tasks[policy], policy) for policy in policies}
        together = self._play([a for policy in policies for a in attempts[policy]], step)
        by_id = {answer.id: answer for answer in together}
        results = {}
        for policy in policies:
            answers = [by_id[attempt.id] for attempt in attempts[policy]]
            suite = self._suite(policy)
            metrics = {} if suite.environment is None else episode_metrics(answers)
            if suite.shares_kind:
                metrics |= self._estimate_kl(tasks[policy], answers)
            if policy == "student" and self.recipe.tasks.limit is not None:
                metrics |= self._score_completions(tasks[policy])
            evaluation = self._grade(answers, split, policy, step, metrics)
            results[policy] = GradedAnswers(evaluation, answers)
        return results

    def reason_not_to(self, split: Split, policy: str = "student") -> str | None:
        """Why the student cannot be evaluated on this split; None: it can."""
        suite = self._suite(policy)
        if suite is self.tasks and self.recipe.tasks.is_recorded:
            what = "stored" if self.recipe.tasks.kind == "trajectories" else "recorded"
            return f"nothing answers the student in {what} {self.recipe.tasks.kind}"
        try:
            tasks = suite.tasks.held_out(split, self.recipe.evaluate.num_tasks)
        except TaskError as error:
            return str(error)
        if suite.environment is not None:
            return None  # an episode grades itself
        if any(task.grader is None for task in tasks):
            return f"some {split} tasks have no grader"
        return None

    def teacher_can_answer(self) -> bool:
        """Feedback and siblings exist only after an answer, and teachers play no episodes."""
        if isinstance(self.recipe.teacher, CustomTeacherConfig):
            return False
        if self.recipe.tasks.is_recorded:
            return False
        return not self.recipe.tasks.is_environment and all(
            t.context is None or t.context.kind in ("system", "field")
            for t in self.recipe.model_teachers
        )

    def _suite(self, policy: str) -> TaskSuite:
        name = policy.partition(":")[2]
        return self.suites[name] if name else self.tasks

    def _tasks(self, split: Split, num_tasks: int | None, policy: str) -> tuple[Task, ...]:
        num_tasks = num_tasks or self.recipe.evaluate.num_tasks
        return self._suite(policy).tasks.held_out(split, num_tasks)

    def _play(self, attempts: Sequence[Attempt], step: int) -> list[Trajectory]:
        return self._share(attempts, partial(self._play_here, step=step))

    def _share(
        self,
        attempts: Sequence[Attempt],
        answer: Callable[[Sequence[Attempt]], list[Trajectory]],
    ) -> list[Trajectory]:
        """Each rank answers some; all have all answers."""
        if self.ranks.size == 1:
            return answer(attempts)
        answers = self.ranks.gather_lists(answer(attempts[self.ranks.rank :: self.ranks.size]))
        by_id = {trajectory.id: trajectory for trajectory in answers}
        return [by_id[attempt.id] for attempt in attempts]

    def _play_here(self, attempts: Sequence[Attempt], step: int) -> list[Trajectory]:
        single_turns = [a for a in attempts if a.suite.environment is None]
        requests = [
            EpisodeRequest(id=a.id, task=a.task, seed=a.seed, start=a.suite.environment.start)
            for a in attempts
            if a.suite.environment is not None
        ]
        answers = []
        if single_turns:
            answers += self._sample(single_turns, self._sample_student, policy_version=step)
        if requests:
            assert self.run_episodes is not None
            answers += self.run_episodes(requests, self.sampling, step)
        return answers

    def _make_attempts(self, tasks: Sequence[Task], policy: str) -> list[Attempt]:
        """Seeds depend on task and sample alone: before and after sample the same noise."""
        return [
            Attempt(
                id=f"{policy}-{task.id}-{n}",
                task=task,
                seed=seed_for(self.recipe.seed, "evaluate", task.id, n),
                suite=self._suite(policy),
            )
            for task in tasks
            for n in range(self.recipe.evaluate.samples_per_task)
        ]

    def _sample_student(
        self, tasks: Sequence[Task], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Sample]:
        requests = [
            SampleRequest(prompt_ids=self.renderer.prompt_ids(task.messages), seed=seed)
            for task, seed in zip(tasks, seeds, strict=True)
        ]
        return self.engine.sample(requests, sampling)

    def _sample_teacher(self, attempts: Sequence[Attempt]) -> list[Trajectory]:
        assert self.teacher is not None
        write = self.teacher.write

        def answer(part: Sequence[Attempt]) -> list[Trajectory]:
            with self.together():
                return self._sample(part, write, policy_version=None)

        return self._share(attempts, answer)

    def _sample(
        self,
        attempts: Sequence[Attempt],
        sample_answers: SampleAnswers,
        *,
        policy_version: int | None,
    ) -> list[Trajectory]:
        """`policy_version`: of the student; None: the teacher samples."""
        tasks, seeds = [a.task for a in attempts], [a.seed for a in attempts]
        self.progress.phase = PhaseProgress(
            total=len(attempts), unit="answers", max_tokens=self.sampling.max_new_tokens
        )
        samples = sample_answers(tasks, self.sampling, seeds)
        return [
            make_trajectory(
                attempt.task,
                self.renderer.prompt_ids(attempt.task.messages),
                sample,
                id=attempt.id,
                source="teacher" if policy_version is None else "student",
                policy_version=policy_version,
                temperature=self.sampling.temperature,
                grade=attempt.suite.grade(attempt.task, sample.text),
            )
            for attempt, sample in zip(attempts, samples, strict=True)
        ]

    def _grade(
        self,
        answers: Sequence[Trajectory],
        split: Split,
        policy: str,
        step: int,
        metrics: Mapping[str, float],
    ) -> Evaluation:
        scores: dict[str, list[float]] = {}
        for trajectory in answers:
            if trajectory.fault is not None:
                continue  # it says nothing about the student
            if trajectory.grade is None:
                raise TaskError(
                    f"task {trajectory.task.id} has no grader, so it cannot be evaluated. Name a "
                    "grader on the tasks"
                )
            scores.setdefault(trajectory.task.id, []).append(trajectory.grade.score)
        if not scores:
            raise RunError(
                f"{policy} on {split} tasks: bugs in the environment ended all {len(answers)} "
                f"episodes, so there is nothing to score. The first: {answers[0].fault}"
            )
        means = {id: sum(values) / len(values) for id, values in scores.items()}
        mean_score, ci_low, ci_high = mean_interval(list(means.values()))
        num_samples = self.recipe.evaluate.samples_per_task
        return Evaluation(
            step=step,
            policy=policy,
            split=split,
            scores=means,
            mean_score=mean_score,
            ci_low=ci_low,
            ci_high=ci_high,
            metrics={
                "num_tasks": len(answers) // num_samples,
                "samples": num_samples,
                "length": sum(t.num_completion_tokens for t in answers) / len(answers),
                "truncated": sum(t.stop == "length" for t in answers) / len(answers),
                **metrics,
            },
            samples=tuple(answers[::num_samples][:NUM_STORED_SAMPLES]),
        )

    def _score_completions(self, tasks: Sequence[Task]) -> dict[str, float]:
        """How likely the tasks' own completions are: of trained and held-out prompts side by side,
        it tells memorizing from learning. Empty where tasks have none."""
        requests = []
        for task in tasks:
            if task.completion is not None:
                prompt = self.renderer.prompt_ids(task.messages)
                ids = self.renderer.completion_ids(
                    task.messages, task.completion, task.completion_thoughts
                )
                scored = (False,) * len(prompt) + (True,) * len(ids)
                requests.append(ScoreRequest(token_ids=prompt + ids, scored=scored))
        logps = [logp for scores in self.engine.score(requests) for logp in scores.logp_T.tolist()]
        return {"completion_logp": sum(logps) / len(logps)} if logps else {}

    def _estimate_kl(
        self, tasks: Sequence[Task], answers: Sequence[Trajectory]
    ) -> dict[str, float]:
        """KL per token, in both directions, each on samples of its first distribution."""
        # Greedy answers are no samples of the student, and a teacher with hints has no target for
        # whole answers.
        is_sampled = self.recipe.evaluate.temperature > 0
        if self.teacher is None or not is_sampled or self.recipe.reader is not None:
            return {}
        with self.together():
            targets = self.teacher.score(answers)
        scored = [answer for answer in answers if answer.id in targets]
        logps = [targets[answer.id].logp_T.tolist() for answer in scored]
        metrics = {"kl_estimate": _mean_gap(scored, logps)}
        if self.recipe.evaluate.forward_kl:
            samples = self._sample_teacher(self._make_attempts(tasks, "teacher"))
            requests = [ScoreRequest.of_trajectory(t) for t in samples]
            logps = [scores.logp_T.tolist() for scores in self.engine.score(requests)]
            metrics["forward_kl_estimate"] = _mean_gap(samples, logps)
        return {name: gap for name, gap in metrics.items() if gap is not None}


def _mean_gap(answers: Sequence[Trajectory], logps: Sequence[Sequence[float]]) -> float | None:
    """Log-prob of the sampler minus the given one, mean over tokens; None without tokens."""
    gaps = [
        sampler_logp - logp
        for answer, answer_logps in zip(answers, logps, strict=True)
        for sampler_logp, logp in zip(answer.sampler_logp or (), answer_logps, strict=True)
    ]
    return sum(gaps) / len(gaps) if gaps else None
