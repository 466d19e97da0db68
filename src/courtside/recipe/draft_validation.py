"""Combinations of [[drafts]] with other sections that cannot work."""

from __future__ import annotations

from collections.abc import Iterator

from courtside.recipe.drafts import ChooseConfig, CriticizeConfig, DraftConfig, RewriteConfig
from courtside.recipe.recipe import Recipe
from courtside.recipe.teacher import CustomTeacherConfig


def find_draft_problems(recipe: Recipe) -> Iterator[str]:
    yield from _context_problems(recipe)
    if not recipe.drafts:
        return
    kinds = [config.kind for config in recipe.drafts]
    for kind in sorted({kind for kind in kinds if kinds.count(kind) > 1}):
        yield f"drafts: two are of kind = {kind!r}, whose counts have one name; remove one"
    if recipe.tasks.is_recorded:
        yield (
            f"drafts: tasks.kind = {recipe.tasks.kind!r} was written elsewhere, and drafts are "
            "what the student samples in a step; remove them"
        )
    elif recipe.rollout.student_fraction_range[1] == 0:
        yield (
            "drafts: rollout.student_fraction = 0 leaves no samples of the student to correct; "
            "set it above 0, or remove them"
        )
    if sum(config.makes_pairs for config in recipe.drafts) > 1:
        yield (
            "drafts: choose and rewrite both make pairs, and a sample is in one pair; set pairs = "
            "false in rewrite, or remove choose"
        )
    for index, config in enumerate(recipe.drafts):
        for problem in _stage_problems(recipe, config, index):
            yield f"drafts[{index}] ({config.kind}): {problem}"


def _stage_problems(recipe: Recipe, config: DraftConfig, index: int) -> Iterator[str]:
    if config.asks_teacher and recipe.teacher is None:
        if config.writes_with_teacher:
            yield "asks a model; add a [teacher] section, or name a server in endpoint"
        else:
            yield "by = 'teacher_logp' needs a [teacher] section; add it"
    if config.writes_with_teacher and isinstance(recipe.teacher, CustomTeacherConfig):
        yield (
            "teacher.kind = 'custom' scores and does not write; name a server in endpoint, or use "
            "teacher.kind = 'self' or 'model'"
        )
    if config.makes_pairs and not _uses_pairs(recipe):
        yield ("no loss uses its pairs; add one of kind = 'preference', or one with on = 'chosen'")
    match config:
        case ChooseConfig():
            yield from _choose_problems(recipe, config)
        case RewriteConfig():
            yield from _rewrite_problems(recipe, config)
        case CriticizeConfig():
            rewrites_later = any(c.kind == "rewrite" and c.feedback for c in recipe.drafts[index:])
            if "critique" not in _contexts(recipe) and not rewrites_later:
                yield (
                    "nothing reads its critiques; set teacher.context = { kind = 'critique' }, or "
                    "add a rewrite after it"
                )


def _choose_problems(recipe: Recipe, config: ChooseConfig) -> Iterator[str]:
    if recipe.rollout.samples_per_prompt < 2:
        yield "compares samples of one prompt; set rollout.samples_per_prompt to 2 or more"
    own_contexts = _contexts(recipe) & {"repair", "critique"}
    if config.by == "teacher_logp" and own_contexts:
        yield (
            f"by = 'teacher_logp' compares samples under one context, and teacher.context.kind = "
            f"{min(own_contexts)!r} is another for each of them; use by = 'reward' or 'judge'"
        )


def _rewrite_problems(recipe: Recipe, config: RewriteConfig) -> Iterator[str]:
    if recipe.reader is not None:
        yield "a [reader] would give hints to repairs, too; remove one of the two"
    trains_on_repairs = any(
        loss.kind in ("cross_entropy", "divergence") and loss.on in ("teacher", "all")
        for loss in recipe.losses
    )
    if not (trains_on_repairs or config.pairs or "repair" in _contexts(recipe)):
        yield (
            "nothing uses its repairs; add a loss with on = 'teacher', set pairs = true, or "
            "teacher.context = { kind = 'repair' }"
        )
    if config.turn != "first_event" and not recipe.tasks.is_environment:
        yield f"turn is of episodes, and tasks.kind = {recipe.tasks.kind!r} has none; remove it"


def _context_problems(recipe: Recipe) -> Iterator[str]:
    kinds = {config.kind for config in recipe.drafts}
    for context, kind in (("repair", "rewrite"), ("critique", "criticize")):
        if context in _contexts(recipe) and kind not in kinds:
            yield (
                f"teacher.context.kind = {context!r} needs a stage that writes it; add [[drafts]] "
                f"with kind = {kind!r}"
            )
    if "repair" in _contexts(recipe) and recipe.tasks.is_environment:
        yield (
            "teacher.context.kind = 'repair': in an environment one turn is repaired, and the "
            "context goes above the whole episode. Use a loss with on = 'teacher', or a [reader]"
        )


def _contexts(recipe: Recipe) -> set[str]:
    return {t.context.kind for t in recipe.model_teachers if t.context is not None}


def _uses_pairs(recipe: Recipe) -> bool:
    return any(loss.kind == "preference" or loss.on == "chosen" for loss in recipe.losses)
