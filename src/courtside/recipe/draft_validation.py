"""Combinations of [[drafts]] with other sections that cannot work."""

from __future__ import annotations

from collections.abc import Iterator

from courtside.recipe.recipe import Recipe


def find_draft_problems(recipe: Recipe) -> Iterator[str]:
    kinds = [config.kind for config in recipe.drafts]
    for kind in sorted({kind for kind in kinds if kinds.count(kind) > 1}):
        yield f"drafts: two are of kind = {kind!r}, whose counts have one name; remove one"
    if recipe.drafts and recipe.tasks.is_recorded:
        yield (
            f"drafts: tasks.kind = {recipe.tasks.kind!r} was written elsewhere, and drafts are "
            "what the student samples in a step; remove them"
        )
    elif recipe.drafts and recipe.rollout.student_fraction_range[1] == 0:
        yield (
            "drafts: rollout.student_fraction = 0 leaves no samples of the student to correct; "
            "set it above 0, or remove them"
        )
    for index, config in enumerate(recipe.drafts):
        where = f"drafts[{index}] ({config.kind})"
        if config.kind == "choose" and recipe.rollout.samples_per_prompt < 2:
            yield (
                f"{where}: compares samples of one prompt; set rollout.samples_per_prompt to 2 or "
                "more"
            )
        if config.asks_teacher and recipe.teacher is None:
            yield f"{where}: by = 'teacher_logp' needs a [teacher] section; add it"
        if config.makes_pairs and not _uses_pairs(recipe):
            yield (
                f"{where}: no loss uses its pairs; add one of kind = 'preference', or one with "
                "on = 'chosen'"
            )


def _uses_pairs(recipe: Recipe) -> bool:
    return any(loss.kind == "preference" or loss.on == "chosen" for loss in recipe.losses)
