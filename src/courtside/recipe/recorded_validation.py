"""Recordings, stored trajectories and documents: what cannot work with text written elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

from courtside.recipe.context import SiblingContext
from courtside.recipe.document_tasks import DocumentTasks
from courtside.recipe.recipe import Recipe
from courtside.recipe.rollout import RolloutConfig
from courtside.recipe.tasks import TrajectoryTasks

SAMPLING = (
    "samples_per_prompt",
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop",
)
"""Fields of [rollout] that configure sampling."""


def find_recorded_problems(recipe: Recipe) -> Iterator[str]:
    if not recipe.tasks.is_recorded:
        return
    kind = f"tasks.kind = {recipe.tasks.kind!r}"
    if recipe.rollout.student_fraction != 0 or recipe.rollout.off_policy_source != "dataset":
        yield (
            f"{kind}: these were written elsewhere, and nothing answers the student in them. "
            "Set rollout.student_fraction = 0, with off_policy_source = 'dataset'"
        )
    if recipe.tasks.limit_by == "seed" and recipe.tasks.kind in ("documents", "trajectories"):
        yield f"tasks.limit_by = 'seed': with {kind} a limit takes the first ones; remove it"
    for name, changes in recipe.evaluate.suites.items():
        if "kind" not in changes:
            yield (
                f"evaluate.suites: nothing answers the student with {kind}; give {name!r} a `kind` "
                "of its own with all of its fields, or remove it"
            )
    if recipe.evaluate.collateral:
        yield f"evaluate.collateral: nothing answers the student with {kind}; remove it"
    if isinstance(recipe.tasks, TrajectoryTasks):
        yield from _stored_problems(recipe, recipe.tasks)
        return
    if isinstance(recipe.tasks, DocumentTasks):
        yield from _document_problems(recipe)
    for index, loss in enumerate(recipe.losses):
        if loss.kind == "policy_gradient":
            yield (
                f"losses[{index}]: a policy gradient needs the probabilities that tokens were "
                f"sampled with, and {kind} has none. Use kind = 'divergence'"
            )


def _document_problems(recipe: Recipe) -> Iterator[str]:
    kind = "tasks.kind = 'documents'"
    for name in SAMPLING:
        is_used = name == "temperature" or (
            name in ("max_new_tokens", "stop") and bool(recipe.evaluate.suites)
        )
        if not is_used and getattr(recipe.rollout, name) != getattr(RolloutConfig(), name):
            yield f"rollout.{name}: nothing is sampled with {kind}. Remove it"
    if recipe.reader is not None:
        yield f"reader: {kind} has no turns that a hint could precede; remove it"
    if any(teacher.context is not None for teacher in recipe.model_teachers):
        yield f"teacher.context: {kind} has no prompt that a context could join; remove it"
    for index, loss in enumerate(recipe.losses):
        if loss.kind == "preference":
            yield f"losses[{index}]: preferences compare the texts of a pair, and {kind} has none"


def _stored_problems(recipe: Recipe, tasks: TrajectoryTasks) -> Iterator[str]:
    kind = "tasks.kind = 'trajectories'"
    for name in SAMPLING:
        if getattr(recipe.rollout, name) != getattr(RolloutConfig(), name):
            yield f"rollout.{name}: nothing is sampled with {kind}. Remove it"
    if tasks.select == "hinted" and not recipe.human_readers:
        yield (
            "tasks.select = 'hinted' selects by a person's hints; add a [reader] of kind = "
            "'human', or use select = 'all'"
        )
    alone = f"and {kind} batches them one by one, so those of a prompt are in different steps"
    for index, loss in enumerate(recipe.losses):
        if loss.kind == "preference":
            yield f"losses[{index}]: preferences compare the two texts of a pair, {alone}"
        if loss.kind == "policy_gradient" and loss.advantage == "reward":
            yield (
                f"losses[{index}]: advantage = 'reward' compares the samples of a prompt, {alone}. "
                "Use advantage = 'teacher_gap'"
            )
    if any(isinstance(teacher.context, SiblingContext) for teacher in recipe.model_teachers):
        yield f"teacher.context: a sibling is another sample of the prompt, {alone}"
