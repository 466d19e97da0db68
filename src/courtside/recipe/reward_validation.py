"""Rewards and weights of routes that cannot work: the field, the reason and the fix of each."""

from __future__ import annotations

from collections.abc import Iterator

from courtside.recipe.losses import Loss
from courtside.recipe.recipe import Recipe
from courtside.recipe.teacher import RoutedTeacherConfig


def find_reward_problems(recipe: Recipe) -> Iterator[str]:
    names = recipe.reward_names()
    if len(set(names)) != len(names):
        yield f"rewards: two are logged as the same name in {list(names)}; give each its own `name`"
    is_compared = any(
        loss.kind == "policy_gradient" and loss.advantage == "reward" for loss in recipe.losses
    )
    if recipe.rewards and not is_compared:
        yield (
            "rewards: no loss uses them; add a loss of kind = 'policy_gradient' with advantage = "
            "'reward', or remove the section"
        )
    if recipe.rewards and all(reward.kind == "reference_kl" for reward in recipe.rewards):
        yield (
            "rewards: reference_kl alone rewards nothing. Add kind = 'grade', or use a loss of "
            "kind = 'divergence' with against = 'reference'"
        )
    longest = recipe.rollout.max_new_tokens
    for index, reward in enumerate(recipe.rewards):
        is_single_turn = not recipe.tasks.is_environment
        if reward.kind == "length" and is_single_turn and reward.free_tokens >= longest:
            yield (
                f"rewards[{index}] (length): free_tokens = {reward.free_tokens}, and no answer is "
                f"longer than rollout.max_new_tokens = {longest}, so the penalty is always 0. Set "
                "free_tokens lower"
            )


def find_route_problems(recipe: Recipe, loss: Loss) -> Iterator[str]:
    if loss.route_weights is None:
        return
    if not isinstance(recipe.teacher, RoutedTeacherConfig):
        yield "route_weights are of teacher.kind = 'routes'; use that, or remove them"
    elif (
        loss.route_weights != "equal" and loss.route_weights.keys() != recipe.teacher.routes.keys()
    ):
        yield (
            f"route_weights = {dict(loss.route_weights)}: give one weight to each of the routes "
            f"{list(recipe.teacher.routes)}"
        )


def find_gate_problems(recipe: Recipe, loss: Loss) -> Iterator[str]:
    """A gate needs the probability that the student sampled a token with."""
    if loss.kind != "divergence" or loss.gate is None:
        return
    low, high = recipe.rollout.student_fraction_range
    is_stored = recipe.tasks.kind == "trajectories"
    if recipe.tasks.is_recorded and not is_stored:
        yield (
            "gate compares the teacher with the probabilities that tokens were sampled with, and "
            f"tasks.kind = {recipe.tasks.kind!r} has none; remove it"
        )
    elif not is_stored and (high == 0 or (low < 1 and loss.on not in ("student", "hinted_turns"))):
        yield (
            "gate is defined on the student's own samples; set on = 'student', or "
            "rollout.student_fraction = 1"
        )


def find_contrast_problems(recipe: Recipe) -> Iterator[str]:
    """Losses that contrast two hints, and the wrong hints for them."""
    is_used = False
    for index, loss in enumerate(recipe.losses):
        contrasts_tokens = loss.kind == "policy_gradient" and loss.advantage == "hint_contrast"
        if not contrasts_tokens and (loss.kind != "divergence" or loss.contrast is None):
            continue
        is_used = True
        option = "advantage = 'hint_contrast'" if contrasts_tokens else "contrast"
        if loss.on != "hinted_turns":
            yield f"losses[{index}]: {option} is defined on hinted turns; set on = 'hinted_turns'"
        elif recipe.hints.contrast is None:
            yield (
                f"losses[{index}]: {option} needs a wrong hint for each turn; set hints.contrast = "
                "'random_hint' or 'other_kind'"
            )
    if recipe.hints.contrast is not None and not is_used:
        yield (
            "hints.contrast: no loss contrasts two hints; add one with advantage = "
            "'hint_contrast', or remove it"
        )
