"""What a run over several processes does not support, with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from courtside.errors import RecipeError
from courtside.ranks import Ranks
from courtside.recipe import Recipe
from courtside.recipe.teacher import ModelTeacherConfig, SelfTeacherConfig

QUANTIZED = ("int8", "nf4")
"""Precisions of a teacher whose weights are not sharded."""


def refuse_sharded(recipe: Recipe, ranks: Ranks) -> None:
    problems = list(find_sharding_problems(recipe, ranks.size))
    if problems:
        raise RecipeError("\n".join(problems))


def find_sharding_problems(recipe: Recipe, num_ranks: int) -> Iterator[str]:
    fix = "train with one process"
    if recipe.train.optimizer_offload:
        yield (
            "train.optimizer_offload: the optimizer state is sharded over the processes, and its "
            f"offload takes whole parameters. Set it to false, or {fix}"
        )
    if recipe.student.lora is not None and recipe.student.lora.base_dtype != "auto":
        yield (
            "student.lora.base_dtype = 'nf4': weights in 4 bits cannot be sharded here. Leave it "
            f"out, or {fix}"
        )
    if recipe.sharding.teachers == "shards":
        yield from _find_problems_of_shards(recipe, fix)
    if num_ranks == 1:
        return
    if recipe.rollout.server is not None and recipe.rollout.server.weight_transfer == "nccl":
        yield (
            "rollout.server.weight_transfer = 'nccl': one process would send the weights, and a "
            "server that was restarted may need them from another one. Use 'folder', on a disk "
            f"that all machines share, or {fix}"
        )
    if recipe.rollout.mixed_sampling is not None:
        yield (
            "rollout.mixed_sampling: which prompts are mixed is decided over the whole batch, and "
            f"a process has only its own part. Remove it, or {fix}"
        )


def _find_problems_of_shards(recipe: Recipe, fix: str) -> Iterator[str]:
    field = "sharding.teachers = 'shards'"
    models = [t for t in recipe.model_teachers if isinstance(t, ModelTeacherConfig)]
    for teacher in models:
        if teacher.dtype in QUANTIZED:
            yield (
                f"{field}: teacher.model = {teacher.model!r} has dtype = {teacher.dtype!r}, and "
                "quantized weights are whole on every process. Set teacher.dtype = 'bfloat16', or "
                f"sharding.teachers = 'auto', or {fix}"
            )
    copies = [
        t for t in recipe.model_teachers if isinstance(t, SelfTeacherConfig) and t.weights != "live"
    ]
    has_copies = recipe.student.lora is None and (copies or recipe.needs_reference)
    if not models and not has_copies:
        yield (
            f"{field}: no model of this recipe can be in shards. The live student, and with LoRA "
            "the student before training and moving averages, score on the process's own copy of "
            f"the student; other teachers are no models of these processes. Leave it out, or {fix}"
        )


def shards_model(recipe: Recipe, ranks: Ranks, model: Any) -> bool:
    """Whether a model that never trains is in shards. It depends on the recipe and on sizes, never
    on the memory that is free, so that a run is the same wherever it goes on."""
    num_bytes = sum(p.nbytes for p in model.parameters())
    return ranks.is_sharded and recipe.sharding.shards_teacher(num_bytes, num_ranks=ranks.size)


def note_shards(name: str) -> str:
    """`name`: of a model that is in shards."""
    return (
        f"{name}: its weights are in shards over the processes, and gathered layer by layer for "
        "every forward pass. What it samples (evaluate.teacher, drafts) gathers all of them for "
        "each token; sharding.teachers = 'whole' gives each process a copy"
    )


def note_idle_ranks(recipe: Recipe, ranks: Ranks) -> str | None:
    """Trajectories of one prompt stay on one process."""
    num_prompts = recipe.train.prompts_per_step
    if num_prompts >= ranks.size:
        return None
    return (
        f"train.prompts_per_step = {num_prompts}: samples of a prompt stay together, so "
        f"{ranks.size - num_prompts} of {ranks.size} processes have nothing to sample or train on"
    )
