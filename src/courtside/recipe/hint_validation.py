"""Combinations of [reader] and [hints] with other sections that cannot work."""

from __future__ import annotations

from collections.abc import Iterator

from courtside.recipe.hints import HintsConfig
from courtside.recipe.reader import (
    CombinedReaderConfig,
    CustomReaderConfig,
    ReaderConfig,
    RuleReaderConfig,
)
from courtside.recipe.recipe import Recipe


def find_hint_problems(recipe: Recipe) -> Iterator[str]:
    if recipe.reader is None:
        if recipe.hints != HintsConfig():
            yield "hints: there is no reader; add a [reader], or remove the section"
        for index, loss in enumerate(recipe.losses):
            if loss.on in ("hinted_turns", "unhinted_turns"):
                yield f"losses[{index}]: on = {loss.on!r} needs hints; add a [reader]"
        return
    if recipe.hints.resamples and not recipe.tasks.is_environment:
        yield (
            "hints.resamples are checked by an environment, and tasks.kind = "
            f"{recipe.tasks.kind!r} is none; set it to 0"
        )
    locates_takeovers = recipe.takeover is not None and recipe.takeover.at == "reader"
    if not locates_takeovers and all(loss.on != "hinted_turns" for loss in recipe.losses):
        yield "reader: no loss has on = 'hinted_turns', so its hints would train nothing"
    yield from _control_problems(recipe, recipe.reader)
    if any(teacher.context is not None for teacher in recipe.model_teachers):
        yield (
            "teacher.context: with a [reader] the hint is the teacher's additional context; "
            "remove one of the two"
        )
    if any(teacher.chat_template_args is not None for teacher in recipe.model_teachers):
        yield (
            "teacher.chat_template_args: with a [reader] hinted turns are scored in the student's "
            "own context, which student.chat_template_args renders; remove the field"
        )
    for index, loss in enumerate(recipe.losses):
        is_takeover = loss.on == "teacher" and recipe.takeover is not None
        if loss.needs_teacher and loss.on != "hinted_turns" and not is_takeover:
            yield (
                f"losses[{index}] ({loss.kind}): with a [reader] the teacher scores hinted turns "
                "only; set on = 'hinted_turns', or against = 'reference' for the others"
            )
    reports_errors = recipe.tasks.is_environment or recipe.tasks.is_recorded
    if isinstance(recipe.reader, RuleReaderConfig) and not reports_errors:
        text_detectors = {"over_length", "pattern", "answer_without_lookup"}
        if all(rule.detect not in text_detectors for rule in recipe.reader.rules):
            yield (
                "reader.kind = 'rules' needs an environment that reports errors; tasks.kind = "
                f"{recipe.tasks.kind!r} reports none. Use reader.kind = 'model', or a rule with "
                "detect = 'pattern'"
            )


def _control_problems(recipe: Recipe, reader: ReaderConfig) -> Iterator[str]:
    """Of controls that would drop every hint."""
    sources = _hint_sources(reader)
    for field, choice in (
        ("reader.control", reader.control),
        ("hints.contrast", recipe.hints.contrast),
    ):
        if choice == "other_kind" and sources is not None and len(sources) < 2:
            yield (
                f"{field} = 'other_kind' exchanges hints of different rules, and this reader has "
                f"one kind of hint. Add a rule, or use {field.partition('.')[2]} = 'random_hint'"
            )
    tells_decisions = recipe.tasks.is_environment and recipe.tasks.kind != "toolbox"
    if reader.control == "mirror_turn" and not (tells_decisions or recipe.tasks.is_recorded):
        yield (
            "reader.control = 'mirror_turn' needs an environment that tells decisions apart "
            f"(Observation.decision); tasks.kind = {recipe.tasks.kind!r} does not. Use "
            "tasks.kind = 'switchboard', an environment of your own, or control = 'random_turn'"
        )


def _hint_sources(reader: ReaderConfig) -> set[str] | None:
    """What `Hint.source` can be; None: a custom reader names its sources itself."""
    if isinstance(reader, CombinedReaderConfig):
        members = [_hint_sources(member) for member in reader.readers]
        return None if None in members else {s for member in members for s in member or ()}
    if isinstance(reader, RuleReaderConfig):
        return {rule.event or rule.detect for rule in reader.rules}
    return None if isinstance(reader, CustomReaderConfig) else {reader.kind}
