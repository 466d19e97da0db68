"""Combinations of [takeover] with other sections that cannot work."""

from __future__ import annotations

from collections.abc import Iterator

from courtside.recipe.recipe import Recipe
from courtside.recipe.takeover import TakeoverConfig
from courtside.recipe.teacher import CustomTeacherConfig


def find_takeover_problems(recipe: Recipe) -> Iterator[str]:
    takeover = recipe.takeover
    if takeover is None:
        return
    if recipe.tasks.is_recorded:
        yield (
            f"takeover: tasks.kind = {recipe.tasks.kind!r} was written elsewhere, and nothing "
            "answers a teacher in it. Use other tasks, or remove [takeover]"
        )
        return
    if takeover.endpoint is None:
        yield from _teacher_problems(recipe)
    else:
        yield from _endpoint_problems(recipe, takeover)
    if recipe.rollout.student_fraction_range[1] == 0:
        yield (
            "takeover: a teacher takes over the student's drafts, and rollout.student_fraction = 0 "
            "samples none. Raise it, or remove [takeover]"
        )
    yield from _location_problems(recipe, takeover)
    trains_by = [
        loss
        for loss in recipe.losses
        if loss.kind in ("cross_entropy", "divergence") and loss.on in ("teacher", "all")
        if not (loss.kind == "divergence" and loss.against == "reference")
    ]
    has_preference = any(loss.kind == "preference" for loss in recipe.losses)
    if takeover.pair and not has_preference:
        yield (
            "takeover.pair: its pairs train by a loss of kind = 'preference', and there is none. "
            "Add it, or remove pair"
        )
    if not trains_by and not (takeover.pair and has_preference):
        yield (
            "takeover: no loss trains on what the teacher samples. Add one with on = 'teacher' "
            "(kind = 'cross_entropy' or 'divergence'), or pair = true with a loss of kind = "
            "'preference'"
        )


def _teacher_problems(recipe: Recipe) -> Iterator[str]:
    if recipe.teacher is None:
        yield "takeover: there is no [teacher] to take over; add it, or remove [takeover]"
    if isinstance(recipe.teacher, CustomTeacherConfig):
        yield (
            "takeover: a teacher of kind = 'custom' scores and does not sample. Use teacher.kind = "
            "'self' or 'model', or remove [takeover]"
        )
    for kind in recipe.draft_contexts:
        yield (
            f"takeover: teacher.context.kind = {kind!r} differs between a "
            "draft and what the teacher makes of it, so the teacher would score its tokens in "
            "another context than it sampled them in. Use kind = 'system' or 'field'"
        )


def _endpoint_problems(recipe: Recipe, takeover: TakeoverConfig) -> Iterator[str]:
    """What a teacher that gives text alone cannot do."""
    if recipe.rollout.stop:
        yield (
            "takeover.endpoint: rollout.stop ends answers of the student at a text, and a chat "
            "server does not say whether such a text or the model itself ended a reply. Remove "
            "rollout.stop: a reply ends with the template's own end token"
        )
    for kind in recipe.draft_contexts:
        yield (
            f"takeover.endpoint: teacher.context.kind = {kind!r} is about "
            "drafts, and the [teacher] would score what the endpoint writes under it, too. Use "
            "kind = 'system' or 'field'"
        )
    if recipe.tasks.is_environment:
        if takeover.can_continue:
            yield (
                "takeover.can_continue is of forks inside an answer, and episodes of tasks.kind = "
                f"{recipe.tasks.kind!r} fork between turns. Remove it"
            )
    elif takeover.at != 0 and not takeover.can_continue:
        yield (
            f"takeover.at = {takeover.at!r} is a token inside an answer, and a chat server begins "
            "an answer of its own. Set at = 0, where it answers in the draft's place; or "
            "can_continue = true for vLLM, which goes on with one"
        )


def _location_problems(recipe: Recipe, takeover: TakeoverConfig) -> Iterator[str]:
    kind = f"tasks.kind = {recipe.tasks.kind!r}"
    if takeover.at == "reader" and recipe.reader is None:
        yield "takeover.at = 'reader': there is no reader; add a [reader], or use at = 'random'"
    if recipe.tasks.is_environment:
        if isinstance(takeover.at, float):
            yield (
                f"takeover.at = {takeover.at:g} is a part of one answer's tokens, and {kind} has "
                "episodes of many turns. Use a whole number of turns, 'first_error' or 'random'"
            )
        return
    if takeover.at in ("first_error", "reader"):
        yield (
            f"takeover.at = {takeover.at!r} locates a turn, and {kind} has one answer. Use "
            "'random', a number of tokens, or a fraction of the answer such as 0.5"
        )
    elif isinstance(takeover.at, int) and takeover.at >= recipe.rollout.max_new_tokens:
        yield (
            f"takeover.at = {takeover.at}: no draft is longer than rollout.max_new_tokens = "
            f"{recipe.rollout.max_new_tokens}, so nothing is left to take over. Use fewer tokens"
        )
    if takeover.select == "errors":
        yield (
            f"takeover.select = 'errors' are events of an environment, and {kind} is none. Use "
            "'failed' or 'all'"
        )
