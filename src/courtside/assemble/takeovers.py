"""Makes the take-over of drafts by the teacher."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from courtside.chat.incremental import IncrementalTemplate
from courtside.chat.privileged_context import task_context
from courtside.chat.reply_failures import FailureMonitor
from courtside.chat.template import ChatTemplate
from courtside.engines.base import Engine
from courtside.errors import RecipeError
from courtside.progress import ProgressMeter
from courtside.recipe import Recipe
from courtside.recipe.endpoint import EndpointConfig
from courtside.recipe.takeover import TakeoverConfig
from courtside.rollout.continuations import (
    AnswerContinuation,
    Continuation,
    EpisodeContinuation,
)
from courtside.rollout.episodes import EpisodeRollout
from courtside.rollout.takeover import Continue, Takeover
from courtside.rollout.text_continuations import (
    Dialog,
    Play,
    TextAnswers,
    TextContinuation,
    TextEpisodes,
)
from courtside.rollout.text_teacher import TextTeacher
from courtside.tasks.base import TaskSource
from courtside.tasks.graders import make_grader
from courtside.teacher.routing import RoutedTeachers
from courtside.teacher.teacher import ScoringTeacher, TakeOver, Teacher


def make_takeover(
    recipe: Recipe,
    config: TakeoverConfig,
    *,
    teacher: ScoringTeacher | None,
    episodes: EpisodeRollout | None,
    template: IncrementalTemplate,
    engine: Engine,
    progress: ProgressMeter,
) -> TakeOver:
    """`engine`: the student's. `episodes`: the student's in an environment; None: there is none."""
    if config.endpoint is not None:
        return _make_text_takeover(
            recipe, config, config.endpoint, episodes=episodes, template=template, engine=engine,
            progress=progress,
        )  # fmt: skip
    assert isinstance(teacher, (Teacher, RoutedTeachers)), "the recipe was checked"
    continue_drafts: Continue[Teacher]
    if episodes is None:
        continue_drafts = AnswerContinuation(
            template=template.renderer,
            config=recipe.rollout,
            grade=make_grader(recipe.tasks),
            context_length=engine.context_length,
            seed=recipe.seed,
            progress=progress,
        )
    else:
        continue_drafts = EpisodeContinuation(episodes=episodes)
    return Takeover(
        config=config,
        choose_teacher=teacher.choose,
        continue_drafts=continue_drafts,
        has_episodes=episodes is not None,
        seed=recipe.seed,
    )


def _make_text_takeover(
    recipe: Recipe,
    config: TakeoverConfig,
    endpoint: EndpointConfig,
    *,
    episodes: EpisodeRollout | None,
    template: IncrementalTemplate,
    engine: Engine,
    progress: ProgressMeter,
) -> TakeOver:
    from courtside.chat.openai_client import OpenAIClient

    rollout = recipe.rollout
    client = OpenAIClient(
        endpoint,
        field="takeover.endpoint",
        max_new_tokens=config.max_new_tokens or rollout.max_new_tokens,
        temperature=rollout.temperature if config.temperature is None else config.temperature,
        shorten="shorten the tasks, or lower takeover.max_new_tokens",
    )
    teacher = TextTeacher(
        client=client,
        context=config.context,
        template=template,
        keep_thoughts=config.keep_thoughts,
    )
    play: Callable[[Dialog], Play[Continuation]]
    if episodes is None:
        play = TextAnswers(
            template=template,
            config=rollout,
            grade=make_grader(recipe.tasks),
            context_length=engine.context_length,
        )
    else:
        threads = ThreadPoolExecutor(endpoint.max_concurrency, thread_name_prefix="environment")
        play = TextEpisodes(episodes=episodes, threads=threads)
    monitor = FailureMonitor(name="takeover", max_fraction=config.max_failure_fraction)
    return Takeover(
        config=config,
        choose_teacher=lambda task: teacher,
        continue_drafts=TextContinuation(play=play, monitor=monitor, progress=progress),
        has_episodes=episodes is not None,
        seed=recipe.seed,
    )


# ── before any model is loaded ───────────────────────────────────────────────────────────────────


def check_takeover(recipe: Recipe, tasks: TaskSource, template: ChatTemplate) -> None:
    """What the tasks or the template lack is an error now, not at the first step."""
    if recipe.takeover is not None:
        check_graders(recipe, recipe.takeover, tasks)
        if recipe.takeover.endpoint is not None:
            check_texts(recipe, recipe.takeover, tasks, template)


def check_texts(
    recipe: Recipe, config: TakeoverConfig, tasks: TaskSource, template: ChatTemplate
) -> None:
    """The endpoint's texts can be answers of the student, and its context is there."""
    batch = tasks.batch(0, recipe.train.prompts_per_step)
    for task in batch:
        if task.messages[-1].role == "assistant":
            raise RecipeError(
                f"takeover.endpoint: the prompt of task {task.id} ends with the beginning of the "
                "answer (a response prefix), which a chat server would not go on with. Put it into "
                "the last user message"
            )
        if config.context is not None:
            task_context(config.context, task, where="takeover.context")
    # A template that renders the prompt of an answered task differently raises here.
    thoughts = "I look." if config.keep_thoughts else ""
    template.completion_ids(batch[0].messages, "It is.", thoughts)


def check_graders(recipe: Recipe, takeover: TakeoverConfig, tasks: TaskSource) -> None:
    """Single answers that no grader judges are never selected, or never train."""
    if recipe.tasks.is_environment:
        return
    needs = [
        f"takeover.{name} = {value!r}"
        for name, value in (("select", takeover.select), ("require", takeover.require))
        if value not in ("all", "none")
    ]
    batch = tasks.batch(0, recipe.train.prompts_per_step)
    if needs and all(task.grader is None for task in batch):
        raise RecipeError(
            f"{needs[0]} needs graded tasks, and none of the first {len(batch)} has a grader. Name "
            "a grader on the tasks, or use select = 'all' with require = 'none'"
        )
