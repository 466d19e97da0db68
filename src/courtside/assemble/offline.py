"""Runs on what was written before: recorded conversations, trajectories of another run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from courtside.chat.incremental import Turns
from courtside.engines.local import TransformersEngine
from courtside.environments.tool_calls import write_call
from courtside.errors import RecipeError, TaskError
from courtside.evaluate.surprise import surprise
from courtside.reader.human import hinted_names
from courtside.recipe import ConversationTasks, Recipe, persons_of
from courtside.rollout.chat_logs import RecordedRollout
from courtside.rollout.replay import StoredRollout, told_otherwise
from courtside.tasks.base import TaskSource
from courtside.tasks.replay import StoredSource

LOOKED_AT = 16
"""Of what was recorded, before the first step."""


def named_by_hints(recipe: Recipe) -> frozenset[str]:
    """The ids that the hints of its persons name now."""
    return frozenset(name for person in persons_of(recipe) for name in hinted_names(person))


def recorded_rollout(
    recipe: Recipe, tasks: TaskSource, engine: TransformersEngine, turns: Turns
) -> tuple[RecordedRollout | StoredRollout, Sequence[str]]:
    """What takes the place of acting, and what a user should know of it."""
    rollout: RecordedRollout | StoredRollout
    if isinstance(recipe.tasks, ConversationTasks):
        what = "recorded conversations"
        rollout = _conversations(recipe.tasks, recipe, engine, turns)
    else:
        assert isinstance(tasks, StoredSource)
        _check_authors(recipe, tasks)
        what = "stored trajectories"
        rollout = StoredRollout(read=tasks.read, turns=turns, num_words=engine.head.num_words)
    some = rollout(tasks.batch(0, min(recipe.train.prompts, LOOKED_AT)), 0)
    notes = [
        f"the {what} surprise the student by {surprise(some, engine):.2f} nats a token more than "
        "its own words would (0: as if it had written them itself)"
    ]
    if isinstance(rollout, StoredRollout) and (difference := told_otherwise(some, turns)):
        notes.append(difference)
    return rollout, notes


def _check_authors(recipe: Recipe, tasks: StoredSource) -> None:
    for index, loss in enumerate(recipe.losses):
        if loss.on in ("student", "teacher", "dataset") and loss.on not in tasks.sources:
            raise RecipeError(
                f"losses[{index}] ({loss.kind}): on = {loss.on!r}, but the stored trajectories "
                f"were written by the {' and the '.join(sorted(tasks.sources))}. Use on = 'all', "
                "or one of those"
            )


def _conversations(
    config: ConversationTasks, recipe: Recipe, engine: TransformersEngine, turns: Turns
) -> RecordedRollout:
    def write(name: str, arguments: Any) -> str:
        if not isinstance(arguments, dict):
            raise TaskError(
                f"a call of {name!r} has arguments that are no JSON object: {arguments!r}. Mend or "
                "leave out the conversation"
            )
        return write_call(name, arguments, config.call_format)

    return RecordedRollout(
        turns=turns,
        write_call=write,
        temperature=recipe.rollout.temperature,
        context_length=engine.context_length,
    )
