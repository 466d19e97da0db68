"""Combinations of rollout.mixed_sampling with other sections that cannot work."""

from __future__ import annotations

from collections.abc import Iterator

from courtside.recipe.recipe import Recipe
from courtside.recipe.teacher import CustomTeacherConfig


def find_mixed_sampling_problems(recipe: Recipe) -> Iterator[str]:
    rollout = recipe.rollout
    if rollout.mixed_sampling is None:
        return
    field = "rollout.mixed_sampling"
    kind = f"tasks.kind = {recipe.tasks.kind!r}"
    if recipe.tasks.is_environment:
        yield (
            f"{field}: the two models decode one answer from its prompt, and {kind} has episodes, "
            "whose KV caches would have to persist over turns. Remove it; [takeover] puts the "
            "teacher into episodes"
        )
    elif recipe.tasks.is_recorded:
        yield f"{field}: nothing is sampled with {kind}. Remove it"
    elif rollout.student_fraction_range[1] == 0:
        yield (
            f"{field} mixes the student's samples, and rollout.student_fraction = 0 has none. "
            "Raise it, or remove mixed_sampling"
        )
    truncations = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    for name, off in truncations.items():
        if getattr(rollout, name) != off:
            yield (
                f"rollout.{name} truncates the student's proposals, and {field} replaces those "
                f"outside the teacher's top-k instead. Remove rollout.{name}"
            )
    yield from _teacher_problems(recipe, field)
    for index, loss in enumerate(recipe.losses):
        if loss.kind == "divergence" and loss.gate is not None:
            yield (
                f"losses[{index}]: gate compares the teacher with the probability that the student "
                f"sampled a token with, and with {field} it is that of the mixture. Remove one of "
                "the two"
            )
        if loss.kind != "policy_gradient":
            continue
        if loss.advantage != "reward":
            yield (
                f"losses[{index}]: advantage = {loss.advantage!r} takes the sampler's probability "
                f"of a token for the student's, and with {field} it is that of the mixture. Use "
                "kind = 'divergence', or advantage = 'reward'"
            )
        elif loss.ratio == "none":
            yield (
                f"losses[{index}]: ratio = 'none' takes tokens for the student's own samples, and "
                f"with {field} they are not. Use ratio = 'importance'"
            )


def _teacher_problems(recipe: Recipe, field: str) -> Iterator[str]:
    if recipe.teacher is None:
        yield (
            f"{field}: there is no [teacher] to replace tokens (an endpoint gives text, no "
            "distributions); add it, or remove mixed_sampling"
        )
    if isinstance(recipe.teacher, CustomTeacherConfig):
        yield (
            f"{field}: a teacher of kind = 'custom' scores whole trajectories and cannot decode "
            "with the student. Use teacher.kind = 'self' or 'model'"
        )
    for kind in recipe.draft_contexts:
        yield (
            f"{field}: teacher.context.kind = {kind!r} is known after an "
            "answer, and the teacher is needed while it is sampled. Use kind = 'system' or "
            "'field'"
        )
