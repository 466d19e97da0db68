"""Inputs of all stages, checked before the first one runs: files, prompts, sizes and overlap."""

from __future__ import annotations

from collections.abc import Iterator

from courtside.assemble.inputs import Inputs, load_inputs
from courtside.errors import UserError
from courtside.pipeline.overlap import collect_prompts, describe_overlap
from courtside.recipe import Recipe
from courtside.recipe.builtin import find_data_path
from courtside.recipe.document_tasks import DocumentTasks
from courtside.recipe.pipeline import Pipeline, Stage
from courtside.tasks.documents import read_documents


def check_stage_inputs(pipeline: Pipeline, stage: Stage) -> list[str]:
    """Raises where the stage could not start; returns notes for the user.

    Weights of earlier stages do not exist yet, so tokenizer and sizes are those of the model that
    they start from. Environments are left to their stage: loading one runs code of the user's.
    """
    recipe = resolve_to_roots(pipeline, stage)
    if recipe is None or recipe.tasks.is_environment:
        return []
    try:
        inputs = load_inputs(recipe)
    except UserError as error:
        raise type(error)(f"stage {stage.name!r}: {error}") from error
    return [*check_overlap(pipeline, stage, inputs)]


def resolve_to_roots(pipeline: Pipeline, stage: Stage) -> Recipe | None:
    """The recipe with the models that stages started from in place of what they will make; None: it
    trains on trajectories that do not exist yet."""
    values: dict[tuple[str, ...], str] = {}
    for reference in stage.references:
        if reference.kind == "run":
            return None
        if reference.kind == "model":
            root = pipeline.root_of(pipeline.stage(reference.stage))
            values[reference.path] = root.recipe.student.model
    return stage.resolve(values)


def check_overlap(pipeline: Pipeline, stage: Stage, inputs: Inputs) -> Iterator[str]:
    """A note for each stage before that learned documents, where this one trains on prompts."""
    if stage.recipe.tasks.is_recorded:
        return
    for ancestor in pipeline.ancestors(stage):
        config = ancestor.recipe.tasks
        if isinstance(config, DocumentTasks):
            documents = read_documents(
                find_data_path(config.path), config.pattern, config.invalid_documents, [],
                "tasks.path",
            )  # fmt: skip
            prompts = collect_prompts(inputs.tasks, stage.recipe)
            texts = [document.text for document in documents]
            yield describe_overlap(texts, prompts, learned_in=ancestor.name)
