"""Rollouts without sampling: recorded conversations, stored trajectories of another run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from courtside.chat.incremental import IncrementalTemplate
from courtside.engines.local import LocalEngine
from courtside.environments.tool_calls import format_call
from courtside.errors import RecipeError, TaskError
from courtside.evaluate.surprise import surprise
from courtside.reader.human import hinted_task_ids
from courtside.recipe import ConversationTasks, Recipe
from courtside.rollout.offline import ChatLogRollout, ReplayRollout, describe_prompt_difference
from courtside.tasks.base import TaskSource
from courtside.tasks.stored_trajectories import ReplaySource

MAX_PROBED = 16
"""Trajectories whose surprise is measured before the first step."""


def hinted_ids(recipe: Recipe) -> frozenset[str]:
    """The task ids that hints of human readers name."""
    return frozenset(id for human in recipe.human_readers for id in hinted_task_ids(human))


def make_offline_rollout(
    recipe: Recipe, tasks: TaskSource, engine: LocalEngine, turns: IncrementalTemplate
) -> tuple[ChatLogRollout | ReplayRollout, Sequence[str]]:
    """The rollout, and notes for the user."""
    rollout: ChatLogRollout | ReplayRollout
    if isinstance(recipe.tasks, ConversationTasks):
        what = "recorded conversations"
        rollout = _conversations(recipe.tasks, recipe, engine, turns)
    else:
        assert isinstance(tasks, ReplaySource)
        _check_authors(recipe, tasks)
        what = "stored trajectories"
        rollout = ReplayRollout(load=tasks.load, template=turns, vocab_size=engine.head.vocab_size)
    sample = rollout(tasks.batch(0, min(recipe.train.prompts_per_step, MAX_PROBED)), 0)
    notes = [
        f"the {what} surprise the student by {surprise(sample, engine):.2f} nats a token more than "
        "its own samples would (0: as if it had sampled them itself)"
    ]
    if isinstance(rollout, ReplayRollout) and (
        difference := describe_prompt_difference(sample, turns)
    ):
        notes.append(difference)
    return rollout, notes


def _check_authors(recipe: Recipe, tasks: ReplaySource) -> None:
    for index, loss in enumerate(recipe.losses):
        if loss.on in ("student", "teacher", "dataset") and loss.on not in tasks.sources:
            raise RecipeError(
                f"losses[{index}] ({loss.kind}): on = {loss.on!r}, but the stored trajectories "
                f"were written by the {' and the '.join(sorted(tasks.sources))}. Use on = 'all', "
                "or one of those"
            )


def _conversations(
    config: ConversationTasks, recipe: Recipe, engine: LocalEngine, turns: IncrementalTemplate
) -> ChatLogRollout:
    def write(name: str, arguments: Any) -> str:
        if not isinstance(arguments, dict):
            raise TaskError(
                f"a call of {name!r} has arguments that are no JSON object: {arguments!r}. Mend or "
                "leave out the conversation"
            )
        return format_call(name, arguments, config.tool_call_format)

    return ChatLogRollout(
        template=turns,
        format_call=write,
        temperature=recipe.rollout.temperature,
        context_length=engine.context_length,
    )
