"""Answer held-out tasks and say how sure the result is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from courtside.chat.record import answered
from courtside.chat.render import Renderer
from courtside.engines.base import Sample, SampleRequest, Sampling
from courtside.errors import TaskError
from courtside.evaluate.intervals import mean_interval
from courtside.seeds import seed_for
from courtside.types import Evaluation, Grade, Split, Task, Trajectory

Answer = Callable[[Sequence[Task], Sampling, Sequence[int]], list[Sample]]
"""Who is measured: tasks, sampling and seeds in, one sample each out."""

SHOWN = 8
"""Answers kept for people."""


def evaluate_tasks(
    tasks: Sequence[Task],
    answer: Answer,
    *,
    grade: Callable[[Task, str], Grade | None],
    renderer: Renderer,
    sampling: Sampling,
    samples: int,
    step: int,
    who: str,
    split: Split,
    seed: int,
) -> Evaluation:
    """Seeds depend on the task alone: before and after are compared on the same random numbers."""
    asked = [task for task in tasks for _ in range(samples)]
    seeds = [seed_for(seed, "evaluate", task.id, n) for task in tasks for n in range(samples)]
    written = answer(asked, sampling, seeds)
    scores: dict[str, list[float]] = {}
    shown: list[Trajectory] = []
    for task, sample in zip(asked, written, strict=True):
        verdict = grade(task, sample.text)
        if verdict is None:
            raise TaskError(
                f"task {task.id} has no grader, so it cannot be evaluated. Name a grader on the "
                "tasks"
            )
        first = task.id not in scores
        scores.setdefault(task.id, []).append(verdict.score)
        if first and len(shown) < SHOWN:
            shown.append(
                answered(
                    task,
                    renderer.prompt_ids(task.messages),
                    sample,
                    id=f"{who}-{task.id}",
                    source="student" if who == "student" else "teacher",
                    policy_version=step if who == "student" else None,
                    temperature=sampling.temperature,
                    grade=verdict,
                )
            )
    means = {id: sum(values) / len(values) for id, values in scores.items()}
    rate, low, high = mean_interval(list(means.values()))
    return Evaluation(
        step=step,
        who=who,
        split=split,
        scores=means,
        rate=rate,
        low=low,
        high=high,
        metrics={
            "num_tasks": len(tasks),
            "samples": samples,
            "length": sum(len(s.token_ids) for s in written) / len(written),
            "truncated": sum(s.stop == "length" for s in written) / len(written),
        },
        samples=tuple(shown),
    )


def answer_with(engine_sample: Callable[..., list[Sample]], renderer: Renderer) -> Answer:
    """The student itself: the prompt as it is."""

    def answer(tasks: Sequence[Task], sampling: Sampling, seeds: Sequence[int]) -> list[Sample]:
        requests = [
            SampleRequest(prompt_ids=renderer.prompt_ids(task.messages), seed=seed)
            for task, seed in zip(tasks, seeds, strict=True)
        ]
        return engine_sample(requests, sampling)

    return answer
