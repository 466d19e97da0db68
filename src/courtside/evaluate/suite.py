"""Answer held-out tasks and say how sure the result is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from courtside.chat.template import ChatTemplate, make_trajectory
from courtside.engines.base import Engine, SampleRequest, Sampling, ScoreRequest
from courtside.errors import TaskError
from courtside.evaluate.intervals import mean_interval
from courtside.seeds import seed_for
from courtside.types import Evaluation, Grade, Sample, Split, Target, Task, Trajectory

Answer = Callable[[Sequence[Task], Sampling, Sequence[int]], list[Sample]]
"""Who is measured: tasks, sampling and seeds in, one sample each out."""

SHOWN = 8
"""Answers kept for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Held-out tasks and how they are answered and graded."""

    tasks: tuple[Task, ...]
    split: Split
    sampling: Sampling
    samples: int
    seed: int
    renderer: ChatTemplate
    grade: Callable[[Task, str], Grade | None]

    def asked(self) -> list[tuple[Task, int, int]]:
        """Task, number of the sample and its seed, which depends on these alone: before and after
        draw the same random numbers."""
        return [
            (task, n, seed_for(self.seed, "evaluate", task.id, n))
            for task in self.tasks
            for n in range(self.samples)
        ]

    def ask(self, answer: Answer, *, policy: str, step: int) -> list[Trajectory]:
        asked = self.asked()
        written = answer(
            [task for task, _, _ in asked], self.sampling, [seed for *_, seed in asked]
        )
        return [
            make_trajectory(
                task,
                self.renderer.prompt_ids(task.messages),
                sample,
                id=f"{policy}-{task.id}-{n}",
                source="student" if policy == "student" else "teacher",
                policy_version=step if policy == "student" else None,
                temperature=self.sampling.temperature,
                grade=self.grade(task, sample.text),
            )
            for (task, n, _), sample in zip(asked, written, strict=True)
        ]

    def evaluation(
        self,
        trajectories: Sequence[Trajectory],
        *,
        policy: str,
        step: int,
        metrics: Mapping[str, float],
    ) -> Evaluation:
        scores: dict[str, list[float]] = {}
        for trajectory in trajectories:
            if trajectory.grade is None:
                raise TaskError(
                    f"task {trajectory.task.id} has no grader, so it cannot be evaluated. Name a "
                    "grader on the tasks"
                )
            scores.setdefault(trajectory.task.id, []).append(trajectory.grade.score)
        means = {id: sum(values) / len(values) for id, values in scores.items()}
        mean_score, ci_low, ci_high = mean_interval(list(means.values()))
        return Evaluation(
            step=step,
            policy=policy,
            split=self.split,
            scores=means,
            mean_score=mean_score,
            ci_low=ci_low,
            ci_high=ci_high,
            metrics={
                "num_tasks": len(self.tasks),
                "samples": self.samples,
                "length": sum(t.num_completion_tokens for t in trajectories) / len(trajectories),
                "truncated": sum(t.stop == "length" for t in trajectories) / len(trajectories),
                **metrics,
            },
            samples=tuple(trajectories[:: self.samples][:SHOWN]),
        )


def make_answer(engine: Engine, renderer: ChatTemplate) -> Answer:
    """The student itself: the prompt as it is."""

    def answer(tasks: Sequence[Task], sampling: Sampling, seeds: Sequence[int]) -> list[Sample]:
        requests = [
            SampleRequest(prompt_ids=renderer.prompt_ids(task.messages), seed=seed)
            for task, seed in zip(tasks, seeds, strict=True)
        ]
        return engine.sample(requests, sampling)

    return answer


def reverse_kl(own: Sequence[Trajectory], targets: Mapping[str, Target]) -> dict[str, float]:
    """KL(student ‖ teacher) per token, estimated on the student's own answers."""
    gaps = [
        logp - teacher
        for trajectory in own
        if trajectory.id in targets
        for logp, teacher in zip(
            trajectory.sampler_logp or (), targets[trajectory.id].logp_T.tolist(), strict=True
        )
    ]
    return {"kl_estimate": sum(gaps) / len(gaps)} if gaps else {}


def forward_kl(theirs: Sequence[Trajectory], engine: Engine) -> dict[str, float]:
    """KL(teacher ‖ student) per token, estimated on the teacher's answers."""
    requests = [
        ScoreRequest(token_ids=t.token_ids, scored=t.completion_mask, temperature=t.temperature)
        for t in theirs
    ]
    gaps = [
        logp - student
        for trajectory, scores in zip(theirs, engine.score(requests), strict=True)
        for logp, student in zip(trajectory.sampler_logp or (), scores.logp_T.tolist(), strict=True)
    ]
    return {"forward_kl_estimate": sum(gaps) / len(gaps)} if gaps else {}
