"""Makes the draft stages: each way with the teacher, grader and template that it needs."""

from __future__ import annotations

from courtside.drafts.base import DraftStage, DraftStages, keep_drafts
from courtside.drafts.choose import Chooser, Rank, TeacherRanking, rank_by_reward
from courtside.errors import RecipeError
from courtside.recipe import Recipe
from courtside.recipe.drafts import ChooseConfig
from courtside.tasks.base import TaskSource
from courtside.teacher.teacher import ScoringTeacher


def make_draft_stages(recipe: Recipe, teacher: ScoringTeacher | None) -> DraftStage:
    if not recipe.drafts:
        return keep_drafts
    return DraftStages(stages={c.kind: _make_chooser(c, teacher) for c in recipe.drafts})


def _make_chooser(config: ChooseConfig, teacher: ScoringTeacher | None) -> Chooser:
    rank: Rank = rank_by_reward
    if config.by == "teacher_logp":
        assert teacher is not None, "the recipe was checked"
        rank = TeacherRanking(score=teacher.score, config=config)
    return Chooser(config=config, rank=rank)


def check_drafts(recipe: Recipe, tasks: TaskSource) -> None:
    """What the tasks lack is an error now, not at the first step."""
    if recipe.tasks.is_environment:
        return
    for index, config in enumerate(recipe.drafts):
        if not isinstance(config, ChooseConfig) or config.by != "reward":
            continue
        for task in tasks.batch(0, recipe.train.prompts_per_step):
            if task.grader is None:
                raise RecipeError(
                    f"drafts[{index}].by = 'reward': task {task.id} has no grader. Name one on the "
                    "tasks, or use by = 'teacher_logp'"
                )
