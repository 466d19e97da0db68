"""Checks of prompts and of the teacher's context, which need tasks and a tokenizer."""

from __future__ import annotations

from functools import partial

from courtside.chat.privileged_context import task_context
from courtside.chat.template import ChatTemplate
from courtside.recipe import Recipe
from courtside.tasks.base import PromptLimit, TaskSource


def make_prompt_limit(recipe: Recipe, template: ChatTemplate, context_length: int) -> PromptLimit:
    """Leaves `rollout.max_new_tokens` of the context, and more for a longer answer from data."""
    new = 0 if recipe.tasks.is_recorded else recipe.rollout.max_new_tokens
    length = partial(
        template.count_prompt_tokens, max_new_tokens=new, with_completions=recipe.trains_on_data
    )
    return PromptLimit(length=length, max_tokens=context_length - new)


def check_contexts(recipe: Recipe, tasks: TaskSource) -> None:
    """A privileged field that the tasks lack is an error now, not at the first step."""
    for teacher in recipe.model_teachers:
        if teacher.context is not None:
            for task in tasks.batch(0, recipe.train.prompts_per_step):
                task_context(teacher.context, task)
