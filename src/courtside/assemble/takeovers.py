"""Makes the take-over of drafts by the teacher."""

from __future__ import annotations

from courtside.chat.template import ChatTemplate
from courtside.engines.base import Engine
from courtside.errors import RecipeError
from courtside.progress import ProgressMeter
from courtside.recipe import Recipe
from courtside.recipe.takeover import TakeoverConfig
from courtside.rollout.continuations import AnswerContinuation, EpisodeContinuation
from courtside.rollout.episodes import EpisodeRollout
from courtside.rollout.takeover import Continue, Takeover
from courtside.tasks.base import TaskSource
from courtside.tasks.graders import make_grader
from courtside.teacher.routing import RoutedTeachers
from courtside.teacher.teacher import ScoringTeacher, Teacher


def make_takeover(
    recipe: Recipe,
    config: TakeoverConfig,
    *,
    teacher: ScoringTeacher | None,
    episodes: EpisodeRollout | None,
    template: ChatTemplate,
    engine: Engine,
    progress: ProgressMeter,
) -> Takeover:
    """`engine`: the student's. `episodes`: the student's in an environment; None: there is none."""
    assert isinstance(teacher, (Teacher, RoutedTeachers)), "the recipe was checked"
    continue_drafts: Continue
    if episodes is None:
        continue_drafts = AnswerContinuation(
            template=template,
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


def check_graders(recipe: Recipe, tasks: TaskSource) -> None:
    """Single answers that no grader judges are never selected, or never train."""
    takeover = recipe.takeover
    if takeover is None or recipe.tasks.is_environment:
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
