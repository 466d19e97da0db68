"""Teachers whose scores cannot be stored."""

from __future__ import annotations

from collections.abc import Iterator

from courtside.recipe.recipe import Recipe
from courtside.recipe.server_validation import find_whole_distribution
from courtside.recipe.teacher import RoutedTeacherConfig, SelfTeacherConfig


def find_store_problems(recipe: Recipe) -> Iterator[str]:
    prefix = "teacher.routes." if isinstance(recipe.teacher, RoutedTeacherConfig) else "teacher"
    names = recipe.teacher.routes if isinstance(recipe.teacher, RoutedTeacherConfig) else [""]
    stored = [
        (f"{prefix}{name}", teacher)
        for name, teacher in zip(names, recipe.model_teachers, strict=False)
        if teacher.store is not None
    ]
    for field, teacher in stored:
        if isinstance(teacher, SelfTeacherConfig) and teacher.weights != "frozen":
            yield (
                f"{field}.store: the weights of a {teacher.weights} teacher change with every "
                f"step, so no score would be used again. Remove it, or set {field}.weights = "
                "'frozen'"
            )
    if not stored:
        return
    field = f"{stored[0][0]}.store"
    for index, loss in enumerate(recipe.losses):
        if (need := find_whole_distribution(loss)) is not None:
            yield (
                f"losses[{index}].{need} needs the teacher's whole distributions, and {field} "
                "keeps the k likeliest tokens a position. Use support = { kind = 'top_k', of = "
                f"'teacher' }} without a baseline, or remove {field}"
            )
    if recipe.rollout.mixed_sampling is not None:
        yield f"rollout.mixed_sampling decodes with the teacher, which {field} keeps from it"
