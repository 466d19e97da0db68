"""Checks of prompts and of the teacher's context, which need tasks and a tokenizer."""

from __future__ import annotations

from functools import partial

from courtside.assemble.recordings import make_chat_log_rollout
from courtside.chat.incremental import IncrementalTemplate
from courtside.chat.privileged_context import task_context
from courtside.recipe import Recipe
from courtside.recipe.tasks import ConversationTasks, TasksConfig
from courtside.tasks.base import PromptLimit, TaskSource


def make_prompt_limit(
    recipe: Recipe,
    template: IncrementalTemplate,
    context_length: int,
    *,
    suite: TasksConfig | None = None,
) -> PromptLimit:
    """Leaves `rollout.max_new_tokens` of the context, and more for a longer answer from data. Of a
    recorded conversation, the whole counts: what cannot be rendered is told now, not in its step.

    `suite`: tasks that are evaluated only, in place of the recipe's.
    """
    longest_token = max(map(len, template.renderer.tokenizer.get_vocab()))
    if suite is None and isinstance(recipe.tasks, ConversationTasks):
        rollout = make_chat_log_rollout(recipe, template, context_length)
        return PromptLimit(
            length=rollout.count_tokens,
            max_tokens=context_length,
            of_whole=True,
            max_chars=context_length * longest_token,
        )
    new = recipe.rollout.max_new_tokens
    if suite is not None:
        new = recipe.evaluate.max_new_tokens or new
    elif recipe.tasks.is_recorded:
        new = 0
    length = partial(
        template.renderer.count_prompt_tokens,
        max_new_tokens=new,
        with_completions=recipe.trains_on_data and suite is None,
    )
    return PromptLimit(
        length=length,
        max_tokens=context_length - new,
        max_chars=context_length * longest_token,
    )


def check_contexts(recipe: Recipe, tasks: TaskSource) -> None:
    """A privileged field that the tasks lack is an error now, not at the first step."""
    for teacher in recipe.model_teachers:
        if teacher.context is not None:
            for task in tasks.batch(0, recipe.train.prompts_per_step):
                task_context(teacher.context, task)
