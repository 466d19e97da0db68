"""What a user should know of a run before it starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from courtside.chat.incremental import IncrementalTemplate
from courtside.engines.base import Engine
from courtside.engines.local import LocalEngine
from courtside.recipe import Recipe
from courtside.tasks.base import TaskSource


def describe_setup(
    recipe: Recipe,
    *,
    tasks: TaskSource,
    template: IncrementalTemplate,
    engine: Engine,
    local: LocalEngine,
    teacher_sizes: Mapping[str, int],
    score_first_reason: str | None,
) -> Iterator[str]:
    if tasks.num_dropped:
        yield f"{tasks.num_dropped} prompts do not fit the context and were left out"
    if recipe.tasks.is_environment and template.note is not None:
        yield template.note
    yield from engine.notes()
    if recipe.reader is None:
        return
    if local.separate_branches_reason is not None:
        yield f"{local.name}: each hint takes a pass of its own ({local.separate_branches_reason})"
    if score_first_reason is not None and "self:live" in teacher_sizes:
        yield (
            "hints are scored before the update, which takes a second pass over the trajectories "
            f"({score_first_reason})"
        )
