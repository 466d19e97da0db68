"""The chat templates of a recipe's models, with their switches."""

from __future__ import annotations

from collections.abc import Collection
from datetime import date
from typing import Any

from courtside.chat.template import ChatTemplate
from courtside.chat.template_variables import check_args
from courtside.engines.loading import load_settings, load_tokenizer
from courtside.recipe import Recipe
from courtside.recipe.teacher import (
    ModelTeacherConfig,
    ScoringTeacherConfig,
    SelfTeacherConfig,
    ServerTeacherConfig,
)


def make_student_template(recipe: Recipe, tokenizer: Any, eos_ids: Collection[int]) -> ChatTemplate:
    student = recipe.student
    return ChatTemplate(
        tokenizer,
        name=student.model,
        eos_ids=eos_ids,
        args=student.chat_template_args,
        day=_day(recipe),
    )


def make_teacher_template(
    config: ScoringTeacherConfig,
    recipe: Recipe,
    student: ChatTemplate,
    tokenizer: Any,
    eos_ids: Collection[int],
) -> ChatTemplate:
    """The student's own where both render alike."""
    args = recipe.student.chat_template_args
    teacher_args = args if config.chat_template_args is None else config.chat_template_args
    if teacher_args == args and renders_alike(tokenizer, student.tokenizer):
        return student
    return ChatTemplate(
        tokenizer,
        name=student.name if isinstance(config, SelfTeacherConfig) else config.model,
        eos_ids=eos_ids,
        args=teacher_args,
        day=_day(recipe),
        field="teacher",
    )


def load_teacher_template(
    config: ScoringTeacherConfig, recipe: Recipe, student: ChatTemplate
) -> ChatTemplate:
    """For what needs no weights."""
    tokenizer, eos_ids = _load_tokenizer(config, student), student.eos_ids
    if isinstance(config, ModelTeacherConfig):
        trust = config.trust_remote_code
        eos_ids = load_settings(config.model, trust_remote_code=trust).eos_ids(tokenizer)
    return make_teacher_template(config, recipe, student, tokenizer, eos_ids)


def check_teacher_args(recipe: Recipe, student: ChatTemplate) -> None:
    """Switches that a teacher's template does not read, before weights are loaded."""
    for config in recipe.model_teachers:
        args = recipe.student.chat_template_args
        args = args if config.chat_template_args is None else config.chat_template_args
        if not args:
            continue
        name = student.name if isinstance(config, SelfTeacherConfig) else config.model
        check_args(_load_tokenizer(config, student), args, name=name, field="teacher")


def _load_tokenizer(config: ScoringTeacherConfig, student: ChatTemplate) -> Any:
    """Of a teacher that is a model of its own; the student's for one that names none."""
    if isinstance(config, ModelTeacherConfig):
        return load_tokenizer(config.model, trust_remote_code=config.trust_remote_code)
    if isinstance(config, ServerTeacherConfig) and config.tokenizer is not None:
        return load_tokenizer(config.tokenizer)
    return student.tokenizer


def renders_alike(tokenizer: Any, other: Any) -> bool:
    """Whether both make the same ids of the same messages."""
    if tokenizer is other:
        return True
    backends = [getattr(t, "backend_tokenizer", None) for t in (tokenizer, other)]
    if tokenizer.chat_template != other.chat_template or None in backends:
        return False
    first, second = (backend.to_str() for backend in backends if backend is not None)
    return bool(first == second)


def _day(recipe: Recipe) -> date | None:
    text = recipe.student.chat_template_date
    return None if text is None else date.fromisoformat(text)
