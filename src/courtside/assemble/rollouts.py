"""Makes tasks and rollouts: single turns, episodes of an environment, or recorded trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from courtside.chat.chat_log_rendering import trajectory_from_chat_log
from courtside.chat.incremental import IncrementalTemplate
from courtside.chat.template import ChatTemplate
from courtside.engines.base import Engine, Sampling
from courtside.environments.base import Environment
from courtside.environments.loading import make_environment
from courtside.errors import RecipeError
from courtside.evaluate.evaluator import EpisodeAttempt, TaskSuite
from courtside.recipe import Recipe, override_tasks
from courtside.rollout.episode_state import EpisodeRequest
from courtside.rollout.episodes import EpisodeRollout
from courtside.rollout.single_turn import SingleTurnRollout, Writer
from courtside.tasks.graders import grade
from courtside.tasks.loading import PromptLimit, make_task_source
from courtside.types import Task, Trajectory


def make_prompt_limit(recipe: Recipe, template: ChatTemplate, context_length: int) -> PromptLimit:
    """Leaves `rollout.max_new_tokens` of the context, and more for a longer answer from data."""
    new = 0 if recipe.tasks.is_recorded else recipe.rollout.max_new_tokens

    def length(task: Task) -> int:
        answers = (task.completion, task.rejected) if recipe.trains_on_data else ()
        sizes = [
            len(template.completion_ids(task.messages, text))
            for text in answers
            if text is not None
        ]
        return len(template.prompt_ids(task.messages)) + max(0, max(sizes, default=0) - new)

    return PromptLimit(length=length, max_tokens=context_length - new)


def make_suites(recipe: Recipe, limit: PromptLimit) -> dict[str, TaskSuite]:
    """Further held-out tasks, by the name that the recipe gives them."""
    suites = {}
    for name, changes in recipe.evaluate.suites.items():
        config = override_tasks(recipe.tasks, changes)
        environment = make_environment(config)
        source = make_task_source(config, recipe.seed, limit, environment)
        suites[name] = TaskSuite(source, environment)
    return suites


def make_single_turn_rollout(
    recipe: Recipe, engine: Engine, template: ChatTemplate, teacher_writes: Writer | None
) -> SingleTurnRollout:
    return SingleTurnRollout(
        engine=engine,
        renderer=template,
        config=recipe.rollout,
        grade=grade,
        teacher_writes=teacher_writes,
        seed=recipe.seed,
        pairs=any(loss.kind == "preference" for loss in recipe.losses),
    )


def make_episode_rollout(
    recipe: Recipe, environment: Environment, engine: Engine, template: IncrementalTemplate
) -> EpisodeRollout:
    expert: Any = getattr(environment, "demonstrate", None)
    if expert is None and recipe.trains_on_data:
        raise RecipeError(
            "rollout.student_fraction < 1 with off_policy_source = 'dataset' needs demonstrations, "
            "and this environment has no method demonstrate(task). Add one that returns the "
            "messages of a whole episode, or set student_fraction = 1"
        )

    def demonstrate(task: Task, id: str) -> Trajectory:
        messages = expert(task)
        # The expert may put messages before its first reply that are not in the task's prompt.
        prompt = tuple(takewhile(lambda message: message.role != "assistant", messages))
        log = [{"role": m.role, "content": m.content} for m in messages]
        return trajectory_from_chat_log(
            replace(task, messages=prompt),
            log,
            template,
            id=id,
            temperature=recipe.rollout.temperature,
        )

    return EpisodeRollout(
        engine=engine,
        template=template,
        config=recipe.rollout,
        start=environment.start,
        demonstrate=None if expert is None else demonstrate,
        context_length=engine.context_length,
        seed=recipe.seed,
    )


def play_attempts(
    rollout: EpisodeRollout,
    attempts: Sequence[EpisodeAttempt],
    environment: Environment,
    sampling: Sampling,
    version: int,
) -> list[Trajectory]:
    """Episodes of an evaluation, played as those of training are."""
    requests = [
        EpisodeRequest(id=a.id, task=a.task, seed=a.seed, start=environment.start) for a in attempts
    ]
    return rollout.run_episodes(requests, sampling, policy_version=version)
