"""Whether a batch without a token to train on is fine or a mistake."""

from __future__ import annotations

from collections.abc import Sequence

from courtside.errors import RunError
from courtside.recipe import Recipe
from courtside.types import Scored, Update


def check_trained(recipe: Recipe, scored: Sequence[Scored], update: Update) -> None:
    """An empty batch is not a zero loss: raise unless the student made no mistake to correct."""
    if any(update.num_tokens.values()):
        return
    if recipe.reader is not None:
        hints = [hint for s in scored for hint in s.hints]
        # A threshold that drops every hint of the first step is a mistake in the recipe; later the
        # student may no longer need any of them.
        if not hints or (update.step > 0 and all(hint.drop_reason is not None for hint in hints)):
            return
    elif scored and _imitates_corrections(recipe):
        num_wrong = sum(bool(turn.events) for s in scored for turn in s.trajectory.turns)
        if not num_wrong:
            return
        raise RunError(
            f"step {update.step}: {num_wrong} turns went wrong, and the environment says of none "
            "what would have been right, so rollout.corrections has nothing to imitate. Put it "
            "into the events' details as `correct`, or remove rollout.corrections"
        )
    raise RunError(
        f"step {update.step}: no trajectory has anything to train on (of {len(scored)}, "
        f"{sum(not s.has_target for s in scored)} have no teacher). An empty batch is not a zero "
        "loss. Look at the tasks, the teacher's context and each loss's `on`"
    )


def _imitates_corrections(recipe: Recipe) -> bool:
    imitates = all(loss.on == "dataset" for loss in recipe.losses)
    return imitates and bool(recipe.rollout.corrections)
