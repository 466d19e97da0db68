"""The shapes of a recipe's models: given, known, or read from their configs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from courtside.errors import ModelError, PlanError
from courtside.planning.presets import find_preset, match_preset
from courtside.planning.shapes import ModelShape, shape_from_config
from courtside.recipe import Recipe
from courtside.recipe.teacher import ModelTeacherConfig


def resolve_shapes(
    recipe: Recipe, *, shape: str | None, teacher_shape: str | None
) -> tuple[ModelShape, Mapping[str, ModelShape]]:
    """The student's, and those of its teachers by `teacher.model`."""
    config = recipe.student
    if shape is not None:
        student = find_preset(shape, "--shape")
    else:
        student = read_shape(
            config.model, option="--shape", trust_remote_code=config.trust_remote_code
        )
    student = prune_shape(student, config.keep_layers)
    teachers: dict[str, ModelShape] = {}
    for teacher in recipe.model_teachers:
        if isinstance(teacher, ModelTeacherConfig) and teacher.model not in teachers:
            teachers[teacher.model] = (
                read_shape(
                    teacher.model,
                    option="--teacher-shape",
                    trust_remote_code=teacher.trust_remote_code,
                )
                if teacher_shape is None
                else find_preset(teacher_shape, "--teacher-shape")
            )
    if teacher_shape is not None and not teachers:
        raise PlanError(
            f"--teacher-shape {teacher_shape}: no teacher here is another model. Remove it"
        )
    return student, teachers


def prune_shape(shape: ModelShape, keep_layers: Sequence[int] | None) -> ModelShape:
    """With `student.keep_layers` alone."""
    if keep_layers is None:
        return shape
    if max(keep_layers, default=0) >= shape.num_layers:
        raise PlanError(
            f"student.keep_layers names layer {max(keep_layers)}; {shape.name} has "
            f"{shape.num_layers}, counted from 0"
        )
    return replace(shape, num_layers=len(keep_layers))


def read_shape(model: str, *, option: str, trust_remote_code: bool = False) -> ModelShape:
    """A folder's config, or the preset that a name means, or the hub's config."""
    is_folder = Path(model).expanduser().is_dir()
    if not is_folder and (preset := match_preset(model)) is not None:
        return preset
    from courtside.engines.loading import load_config

    try:
        config = load_config(model, trust_remote_code=trust_remote_code)
    except ModelError as error:
        raise PlanError(
            f"{error}. To plan without its files give {option}, e.g. qwen3-8b"
        ) from error
    return shape_from_config(model, config)
